"""The programs of `diffing.py`: each built in several ways from Debian's sources, in pairs.

Objects are linked in the order of the names of their sources, or in one that a seed shuffles; git
is built by its own Makefile. Below CACHE/diffing lie `programs/NAME` (stripped: what is compared),
`debug/NAME` (the same with symbols and debug information) and `sources` (what the line tables
name).
"""

import random
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from programs import PROGRAMS, Failed, Source, below, command_of, fetch, release, run, strip

SEED = 1
SUITES = {"bullseye": "bookworm", "bookworm": "trixie", "trixie": "forky"}
"""Debian's release → the next one, whose version is the newer one of a pair."""


MORE = {
    "lz4": Source(
        "lz4",
        below("lib/*.c", "programs/*.c", but="lz4_file.c"),
        ("-I{tree}/lib", "-I{tree}/programs", "-DXXH_NAMESPACE=LZ4_"),
    ),
    "xxhash": Source("xxhash", below("cli/*.c", "xxhash.c")),
    "brotli": Source("brotli", below("c/*/*.c"), ("-I{tree}/c/include",), ("-lm",)),
    "zstd": Source(
        "libzstd",
        below("lib/common/*.c", "lib/compress/*.c", "lib/decompress/*.c", "lib/dictBuilder/*.c",
               "programs/*.c"),
        ("-I{tree}/lib", "-I{tree}/lib/common", "-DXXH_NAMESPACE=ZSTD_", "-DZSTD_DISABLE_ASM=1"),
        ("-lpthread",),
    ),
    "yaml-cpp": Source(
        "yaml-cpp", below("src/*.cpp", "src/contrib/*.cpp", "util/parse.cpp"),
        ("-std=c++17", "-I{tree}/include"), language="C++",
    ),
    "git": Source("git", lambda tree: ()),
}  # fmt: skip
GIT = (
    "NO_GETTEXT", "NO_OPENSSL", "NO_CURL", "NO_EXPAT", "NO_PERL", "NO_PYTHON", "NO_TCLTK",
)  # fmt: skip
"""What git is built without."""
ONE_PIECE = ("sqlite", "git")
"""Programs of one object, or linked by their own Makefile: the order of linking is theirs."""
SOURCES = {name: PROGRAMS[name] for name in ("bzip2", "zlib", "lua", "sqlite")} | MORE
UTILITIES = ("true", "ls", "sort", "cp", "diff", "cmp", "find", "xargs")
TUNED = ("bzip2", "zlib", "lua", "sqlite", "ls")
"""Programs that were looked at while features were chosen; the others are held out."""
WAYS = {
    "O0 ↔ O2": (("gcc", "O0"), ("gcc", "O2")),
    "O2 ↔ O3": (("gcc", "O2"), ("gcc", "O3")),
    "gcc ↔ clang": (("gcc", "O2"), ("clang", "O2")),
    "versions": (("gcc", "O2"), ("gcc", "O2")),
    "O1 ↔ O2": (("gcc", "O1"), ("gcc", "O2")),
    "O0 ↔ O3": (("gcc", "O0"), ("gcc", "O3")),
    "O0 ↔ O2, shuffled": (("gcc", "O0"), ("gcc", "O2")),
    "O2 ↔ O3, shuffled": (("gcc", "O2"), ("gcc", "O3")),
}
"""Kind of a pair → compiler and level of A and of B."""


@dataclass(frozen=True)
class Built:
    """One program, built in one way."""

    name: str
    bare: Path
    debug: Path
    source: Path


@dataclass(frozen=True)
class Pair:
    """Two programs that are compared."""

    program: str
    kind: str
    a: Built
    b: Built

    @property
    def held_out(self) -> bool:
        """Whether nothing was chosen on it."""
        return self.program not in TUNED


@dataclass
class Pairs:
    """The pairs that could be built, and why others could not."""

    pairs: list[Pair] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def build(
    cache: Path, name: str, compiler: str, level: str, *, suite: str = "", shuffled: bool = False
) -> Built:
    """Return a program, compiled and linked where it is not there yet."""
    source, folder = SOURCES[name], cache / "diffing"
    for part in ("programs", "debug", "sources"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    tree = fetch(source.package, folder / "sources", suite or release())
    version = (tree / ".version").read_text().strip()
    made = f"{name}-{version}-{compiler}-{level}{'-shuffled' if shuffled else ''}"
    out, bare = folder / "debug" / made, folder / "programs" / made
    if not out.exists():
        part = out.with_name(f"{made}.new")
        own = folder / "objects" / f"{name}-{version}-{compiler}-{level}"
        if name == "git":
            _make_git(tree, own, compiler, level, part)
        else:
            objects = _compiled(source, tree, own, compiler, level)
            if shuffled:
                random.Random(SEED).shuffle(objects)
            run(command_of(compiler, source.language), "-o", part, *objects, *source.libraries)
        part.rename(out)
    return Built(made, strip(out, bare), out, tree)


def _compiled(source: Source, tree: Path, folder: Path, compiler: str, level: str) -> list[Path]:
    """Return the objects of a program, in the order of their sources; what is there is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [flag.format(tree=tree) for flag in source.flags]
    objects = []
    for number, path in enumerate(sorted(source.files(tree))):
        out = folder / f"{number}-{path.stem}.o"
        if not out.exists():
            part = out.with_suffix(".new")
            command = (command_of(compiler, source.language), f"-{level}", "-g", "-w", *flags)
            run(*command, "-c", "-o", part, path)
            part.rename(out)
        objects.append(out)
    return objects


def _make_git(tree: Path, work: Path, compiler: str, level: str, out: Path) -> None:
    """Build git in a copy of its tree; what it says of its sources names the tree."""
    if not (work / ".copied").exists():
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(tree, work, symlinks=True)
        (work / ".copied").touch()
    places = f"-ffile-prefix-map={work.resolve()}={tree.resolve()}"
    without = [f"{name}=1" for name in GIT]
    flags = f"CFLAGS=-{level} -g -w {places}"
    run("make", "-s", "git", f"CC={compiler}", flags, *without, cwd=work)
    shutil.copy(work / "git", out)
    shutil.rmtree(work)


def utilities(cache: Path, names: Sequence[str] = UTILITIES) -> Pairs:
    """Return pairs of the utilities that `make pairs` built, where it did."""
    folder = cache / "pairs"
    if not (folder / "pairs.toml").exists():
        return Pairs(missing=["utilities of GNU: `make pairs` builds them"])
    found = Pairs()
    listed = tomllib.loads((folder / "pairs.toml").read_text())["options"]["pair"]
    for both in listed:
        (project_a, way_a, name), (project_b, way_b, _) = (
            one.split("/") for one in both.split(":")
        )
        ways = tuple(tuple(way.split("-")) for way in (way_a, way_b))
        kinds = [kind for kind, own in WAYS.items() if own == ways]
        if name not in names or not kinds:
            continue
        kind = "versions" if project_a != project_b else kinds[0]
        a, b = (
            Built(
                "-".join((name, project, way)),
                folder / "programs" / project / way / name,
                folder / "debug" / project / way / name,
                folder / "sources" / project,
            )
            for project, way in ((project_a, way_a), (project_b, way_b))
        )
        found.pairs.append(Pair(name, kind, a, b))
    # One version of each is enough where both have the same levels.
    found.pairs = list({(one.program, one.kind): one for one in found.pairs}.values())
    return found


def make(cache: Path, names: Sequence[str] = (), kinds: Sequence[str] = ()) -> Pairs:
    """Build what is missing; return the pairs in the order of `SOURCES` and `WAYS`.

    Without names all of them, and the utilities that are there; without kinds all of `WAYS`.
    """
    found = utilities(cache, [name for name in UTILITIES if not names or name in names])
    found.pairs = [one for one in found.pairs if not kinds or one.kind in kinds]
    for name in [name for name in SOURCES if not names or name in names]:
        for kind, (one, other) in WAYS.items():
            shuffled = kind.endswith("shuffled")
            if (shuffled and name in ONE_PIECE) or (kinds and kind not in kinds):
                continue
            newer = SUITES[release()] if kind == "versions" else ""
            try:
                a = build(cache, name, *one)
                b = build(cache, name, *other, suite=newer, shuffled=shuffled)
            except Failed as error:
                found.missing.append(f"{name}, {kind}: {error}")
                continue
            if a.debug == b.debug:
                found.missing.append(f"{name}, {kind}: both releases have the same version")
                continue
            found.pairs.append(Pair(name, kind, a, b))
    return found
