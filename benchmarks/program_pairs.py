"""Pairs of programs for diffing: utilities of GNU, built from Debian's sources in several ways.

Each program of coreutils, findutils and diffutils is compiled at several levels, by gcc and clang,
and of two versions where both can be fetched. A configured tree is compiled once a level. Below
CACHE/pairs lie

    programs/PROJECT-VERSION/COMPILER-LEVEL/PROGRAM    stripped: what is compared
    debug/PROJECT-VERSION/COMPILER-LEVEL/PROGRAM       the same with symbols and debug information
    sources/PROJECT-VERSION/                           what the line tables of these name
    pairs.toml                                         a recipe of pairs for `tokmill build`
    built.json                                         versions of the compilers, what was left out

What was made is kept, so the same command goes on. What cannot be fetched or built is named.

    python benchmarks/program_pairs.py CACHE [--small]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from programs import PROGRAMS, Failed, fetch, release, run

PACKAGES = ("diffutils", "findutils", "coreutils")
SMALL = "bzip2"
"""What is compiled in seconds, without configure; one version."""
COMPILERS = ("gcc", "clang")
LEVELS = ("O0", "O1", "O2", "O3")
SUITES = ("bullseye", "bookworm", "trixie", "forky")
"""Debian's releases; beside the one of this machine the first other one that can be fetched."""
LAYOUT = "{project}-{version}/{compiler}-{level}/{program}"
CONFIGURE = ("--disable-nls", "--disable-dependency-tracking", "--without-selinux", "--disable-acl")
KINDS = (
    (("gcc", "O0"), ("gcc", "O2")),
    (("gcc", "O2"), ("gcc", "O3")),
    (("gcc", "O0"), ("gcc", "O3")),
    (("gcc", "O2"), ("clang", "O2")),
)
"""Pairs within a version; between versions it is gcc at O2."""
ELF = b"\x7fELF"


@dataclass
class Made:
    """What lies in the folder, and what does not."""

    folder: Path
    left_out: list[str] = field(default_factory=list)

    def write_about(self, names: Sequence[str]) -> None:
        """Write the versions of compilers, and what was left out."""
        facts: dict[str, Any] = {"compilers": compilers(names), "layout": LAYOUT}
        facts |= {"left_out": self.left_out, "programs": len(self.programs())}
        (self.folder / "built.json").write_text(json.dumps(facts, indent=1) + "\n")

    def programs(self) -> list[str]:
        root = self.folder / "programs"
        return sorted(p.relative_to(root).as_posix() for p in root.glob("*/*/*") if p.is_file())


@dataclass(frozen=True)
class Tree:
    """The unpacked sources of one version."""

    project: str
    version: str
    path: Path

    @property
    def name(self) -> str:
        return f"{self.project}-{self.version}"


def trees(package: str, made: Made, versions: int) -> Iterator[Tree]:
    """Yield the sources of a package in up to so many versions."""
    own = release()
    found: list[str] = []
    problems = []
    for suite in (own, *(suite for suite in reversed(SUITES) if suite != own)):
        if len(found) == versions:
            break
        try:
            path = fetch(package, made.folder / "fetched", suite)
        except Failed as error:
            problems.append(f"{package} of {suite}: {error}")
            continue
        version = (path / ".version").read_text().strip()
        if version not in found:
            found.append(version)
            yield Tree(package, version, path)
    if len(found) < versions:
        made.left_out += problems


def build(tree: Tree, compiler: str, levels: Sequence[str], made: Made) -> None:
    """Compile all programs of a tree with one compiler at the levels that are missing."""
    missing = [level for level in levels if not done(tree, compiler, level, made).exists()]
    if not missing:
        return
    if shutil.which(compiler) is None:
        made.left_out.append(f"{tree.name} with {compiler}: there is no such compiler")
        return
    work = made.folder / "work" / f"{tree.name}-{compiler}"
    try:
        _configure(tree, compiler, work, made)
    except Failed as error:
        made.left_out.append(f"{tree.name} with {compiler}: {error}")
        return
    for level in missing:
        try:
            _compile(tree, compiler, level, work, made)
        except Failed as error:
            made.left_out.append(f"{tree.name} with {compiler} at {level}: {error}")
    shutil.rmtree(work)


def done(tree: Tree, compiler: str, level: str, made: Made) -> Path:
    """Return the file that says that all programs of one way lie there."""
    return made.folder / "debug" / tree.name / f"{compiler}-{level}.done"


def _configure(tree: Tree, compiler: str, work: Path, made: Made) -> None:
    if (work / ".configured").exists():
        return
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(tree.path, work, symlinks=True)
    kept = made.folder / "sources" / tree.name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(tree.path, kept, symlinks=True)
    if (work / "configure").exists():
        env = {**os.environ, "CC": compiler, "FORCE_UNSAFE_CONFIGURE": "1", "CFLAGS": "-g -O2 -w"}
        run("./configure", "-q", *CONFIGURE, cwd=work, env=env)
    (work / ".configured").touch()


def _compile(tree: Tree, compiler: str, level: str, work: Path, made: Made) -> None:
    # Debug information names the sources by their place below `sources`.
    flags = f"-g -{level} -w -ffile-prefix-map={work.resolve()}={tree.name}"
    if tree.project == SMALL:
        programs = _compile_small(compiler, flags, work)
    else:
        run("make", "clean", cwd=work)
        # Manuals and tests may want tools that are not there; the programs are looked for below.
        jobs = len(os.sched_getaffinity(0))
        subprocess.run(
            ["make", "-k", f"-j{jobs}", f"CFLAGS={flags}", "MAKEINFO=true", "HELP2MAN=true"],
            cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        programs = [
            path for folder in _folders(work) for path in folder.iterdir() if _is_program(path)
        ]
    if not programs:
        raise Failed("no program was made")
    keep(programs, tree, compiler, level, made)


def keep(programs: Sequence[Path], tree: Tree, compiler: str, level: str, made: Made) -> None:
    """Put programs that were built in one way where they belong, as they are and stripped."""
    names = f"{tree.name}/{compiler}-{level}"
    debug, bare = made.folder / "debug" / names, made.folder / "programs" / names
    for folder in (debug, bare):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for path in sorted(programs):
        shutil.copy(path, debug / path.name)
        run("objcopy", "--strip-all", path, bare / path.name)
    done(tree, compiler, level, made).touch()
    count = f"{len(programs)} program{'' if len(programs) == 1 else 's'}"
    print(f"{names}: {count}", flush=True)


def _compile_small(compiler: str, flags: str, work: Path) -> list[Path]:
    library = [path for path in PROGRAMS[SMALL].files(work) if path.stem != "bzip2"]
    for name, parts in (("bzip2", library), ("bzip2recover", [])):
        files = [*parts, work / f"{name}.c"]
        run(compiler, *flags.split(), "-D_FILE_OFFSET_BITS=64", "-o", work / name, *files)
    return [work / "bzip2", work / "bzip2recover"]


def _folders(work: Path) -> list[Path]:
    return [path for name in ("src", "find", "xargs", "locate") if (path := work / name).is_dir()]


def _is_program(path: Path) -> bool:
    if path.suffix or not path.is_file() or path.is_symlink() or not os.access(path, os.X_OK):
        return False
    with open(path, "rb") as file:
        return file.read(4) == ELF


def pairs_of(programs: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of programs that are both there: levels, compilers, versions."""
    known = set(programs)
    found = set()
    versions: dict[tuple[str, str], set[str]] = {}
    for name in programs:
        package, _, program = name.split("/")
        project, _, version = package.rpartition("-")
        versions.setdefault((project, program), set()).add(version)
    for (project, program), several in versions.items():
        for version in several:
            for first, second in KINDS:
                both = [f"{project}-{version}/{'-'.join(way)}/{program}" for way in (first, second)]
                found.add((both[0], both[1]))
        ordered = sorted(several, key=_by_number)
        for old, new in zip(ordered, ordered[1:], strict=False):
            found.add((f"{project}-{old}/gcc-O2/{program}", f"{project}-{new}/gcc-O2/{program}"))
    return sorted(pair for pair in found if known.issuperset(pair))


def _by_number(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def compilers(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for compiler in names:
        if shutil.which(compiler):
            found[compiler] = run(compiler, "--version").splitlines()[0]
    return found


def main(arguments: Sequence[str]) -> int:
    """Build what is missing; return the exit code: 1 where there is no pair."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--small", action="store_true", help=f"{SMALL} alone, in seconds")
    chosen = parser.parse_args(arguments)
    folder = chosen.cache.resolve() / ("pairs-small" if chosen.small else "pairs")
    made = Made(folder)
    made.folder.mkdir(parents=True, exist_ok=True)
    packages, versions = ([SMALL], 1) if chosen.small else (PACKAGES, 2)
    for package in packages:
        for tree in trees(package, made, versions):
            for compiler in COMPILERS:
                build(tree, compiler, LEVELS, made)
    return report(made)


def report(made: Made) -> int:
    """Write the list of pairs and say what lies there."""
    programs = made.programs()
    pairs = pairs_of(programs)
    lines = [f"  {json.dumps(':'.join(pair))}," for pair in pairs]
    options = ["[options]", f"layout = '{LAYOUT}'", "pair = [", *lines, "]", ""]
    text = "\n".join(['source = "pairs"', "", *options])
    (made.folder / "pairs.toml").write_text(text)
    made.write_about(COMPILERS)
    print(f"{made.folder}: {len(programs)} programs, {len(pairs)} pairs in pairs.toml")
    for line in made.left_out:
        print(f"left out: {line}")
    return 0 if pairs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
