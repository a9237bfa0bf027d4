"""The programs that lifters are measured on: built here from source packages, and the machine's.

Sources are the upstream archives of Debian source packages, fetched by apt into the cache with a
list of its own (no root, the lists of the system stay as they are). What cannot be fetched or built
is left out and named.
"""

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("bzip2", "zlib", "lua5.4", "sqlite3", "ninja-build")
RELEASE = "/etc/os-release"
SOURCES = """\
Types: deb-src
URIs: http://deb.debian.org/debian
Suites: {release}
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
PLUS = {"gcc": "g++", "clang": "clang++"}
LEVELS = ("O0", "O1", "O2", "O3", "Os")
JUNK = 32
"""Random bytes between two functions: 1 to so many."""
SYSTEM = (
    "bin/ls", "bin/bash", "bin/git", "lib/x86_64-linux-gnu/libcrypto.so.*"
)  # fmt: skip
"""Programs of the machine below /usr, without symbols."""
FUNCTION = re.compile(
    # What is moved out of a function begins in the middle of its unwind information.
    r"^((?:\t\.(?:p2align|globl|weak|hidden)[ \t].*\n)*)(\t\.type\t(?!\S*\.cold)\S+, ?@function)$",
    re.MULTILINE,
)
"""In assembler output: alignment and binding of a function, and its type."""
UNWIND = (".eh_frame", ".eh_frame_hdr")


class Failed(Exception):
    """A tool failed; the message says what it said."""


@dataclass(frozen=True)
class Source:
    """How one program is compiled: files below the unpacked archive, flags, libraries."""

    package: str
    files: Callable[[Path], Iterable[Path]]
    flags: Sequence[str] = ()
    libraries: Sequence[str] = ()
    language: str = "C"


@dataclass
class Case:
    """A program: as it was built, without symbols, and without unwind tables too."""

    name: str
    kind: str
    """C, C++, junk, PE or system."""
    stripped: Path
    whole: Path | None = None
    """With symbols; None for a system program."""
    bare: Path | None = None
    """Stripped, `.eh_frame` cut off; None where that makes no sense."""
    compiler: str = ""
    level: str = ""


@dataclass
class Programs:
    """What could be built, and what could not."""

    cases: list[Case] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def _bzip2(tree: Path) -> list[Path]:
    names = "blocksort huffman crctable randtable compress decompress bzlib bzip2"
    return [tree / f"{name}.c" for name in names.split()]


def below(*patterns: str, but: str = "") -> Callable[[Path], list[Path]]:
    def files(tree: Path) -> list[Path]:
        found = [path for pattern in patterns for path in tree.glob(pattern)]
        return [path for path in found if path.name not in but.split()]

    return files


def _ninja(tree: Path) -> list[Path]:
    others = re.compile(r"test|win32|msvc|perftest|browse|hash_collision|minidump|\.in\.cc$")
    return [path for path in (tree / "src").glob("*.cc") if not others.search(path.name)]


PROGRAMS = {
    "bzip2": Source("bzip2", _bzip2),
    "zlib": Source(
        "zlib",
        below("*.c", "test/minigzip.c"),
        ("-DHAVE_UNISTD_H", "-D_LARGEFILE64_SOURCE=1", "-I{tree}"),
    ),
    "lua": Source("lua5.4", below("src/*.c", but="luac.c"), ("-DLUA_USE_LINUX",), ("-lm", "-ldl")),
    "sqlite": Source("sqlite3", below("sqlite3.c", "shell.c"), (), ("-lm", "-ldl", "-lpthread")),
    "ninja": Source("ninja-build", _ninja, ("-std=c++11",), ("-lpthread",), "C++"),
}
MINGW = {"zlib": ("-I{tree}",), "lua": ()}
"""Programs that are built for Windows, and their flags there."""


def matrix() -> list[tuple[str, str, str, str]]:
    """Return (program, kind, compiler, level) of what is built, the quick ones first."""
    found = []
    for compiler in ("gcc", "clang"):
        found += [("zlib", "C", compiler, level) for level in LEVELS]
        found += [("bzip2", "C", compiler, level) for level in ("O0", "O2", "Os")]
    found += [("lua", "C", "gcc", level) for level in ("O0", "O1", "O2", "O3", "Os")]
    found += [("lua", "C", "clang", level) for level in ("O1", "O2", "Os")]
    found += [("zlib", "junk", "gcc", "Os"), ("bzip2", "junk", "gcc", "O2")]
    found += [("lua", "junk", "gcc", "O2"), ("lua", "junk", "clang", "O2")]
    found += [("zlib", "PE", "mingw", "O2")]
    found += [("lua", "PE", "mingw", level) for level in ("O0", "O2")]
    found += [("ninja", "C++", "gcc", level) for level in ("O0", "O2", "Os")]
    found += [("ninja", "C++", "clang", level) for level in ("O0", "O2")]
    found += [("sqlite", "C", "gcc", "O2"), ("sqlite", "C", "clang", "O0")]
    return found


def run(*command: str | Path, cwd: Path | None = None, log: Path | None = None, **more: Any) -> str:
    """Run a tool and return what it prints; `Failed` with the end of what it says if it fails.

    All that it says then is written to `log`, which the message names.
    """
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            **more,
        )
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        where = ""
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("".join((*map("{} ".format, command), "\n", done.stdout, done.stderr)))
            where = f" ({log})"
        raise Failed(f"{Path(command[0]).name}: {said[-1] if said else done.returncode}{where}")
    return done.stdout


def release() -> str:
    for line in Path(RELEASE).read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise Failed(f"{RELEASE} names no release")


def fetch(package: str, folder: Path, suite: str = "") -> Path:
    """Return the unpacked upstream archive of a Debian source package; `.version` is its version.

    It is of the release of this machine, or of the one that is named.
    """
    tree = folder / (f"{package}-{suite}" if suite else package)
    if (tree / ".done").exists():
        return tree
    folder = folder.resolve()
    lists, archives = folder / f"apt{suite}", folder / f"{tree.name}-archive"
    for path in (lists / "partial", archives):
        path.mkdir(parents=True, exist_ok=True)
    listed = folder / f"apt{suite}.sources"
    options = [
        "-o", f"Dir::Etc::sourcelist={listed}", "-o", "Dir::Etc::sourceparts=/dev/null",
        "-o", f"Dir::State::Lists={lists}", "-o", "Dir::Cache::srcpkgcache=", "-o",
        "Dir::Cache::pkgcache=", "-o", "APT::Sandbox::User=",
    ]  # fmt: skip
    if not listed.exists():
        text = SOURCES.format(release=suite or release())
        listed.write_text(text)
        try:
            run("apt-get", "update", *options)
        except Failed:
            listed.unlink()
            raise
    # The archive alone: mirrors may lack signatures, and its digest stands in the signed list.
    one = ("--download-only", "--tar-only", "-qq")
    run("apt-get", "source", *one, *options, package, cwd=archives)
    archive = next(iter(archives.glob("*.orig.tar.*[!c]")), None)
    if archive is None:
        raise Failed(f"{package} has no upstream archive")
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    run("tar", "--strip-components=1", "-xf", archive, "-C", tree)
    if package == "sqlite3":
        # Its one large file is made by its own scripts.
        run("./configure", "--disable-tcl", cwd=tree)
        run("make", "sqlite3.c", "shell.c", cwd=tree)
    (tree / ".version").write_text(archive.name.partition("_")[2].partition(".orig")[0])
    (tree / ".done").touch()
    return tree


def add_junk(assembler: str, seed: str) -> str:
    """Return assembler output with random bytes between functions.

    They lie behind the function before or, where the aligned place looks most like a function, in
    front of the next one.
    """
    numbers = random.Random(seed)

    def before(match: re.Match[str]) -> str:
        data = numbers.randbytes(numbers.randint(1, JUNK))
        line = f"\t.byte {','.join(map(str, data))}\n"
        return f"{line}{match[0]}" if numbers.random() < 0.5 else f"{match[1]}{line}{match[2]}"

    return FUNCTION.sub(before, assembler)


def command_of(compiler: str, language: str) -> str:
    """Return the command that compiles a language; an older compiler has its version behind."""
    if language == "C":
        return compiler
    family, dash, version = compiler.partition("-")
    return f"{PLUS[family]}{dash}{version}"


def build(out: Path, source: Source, tree: Path, kind: str, compiler: str, level: str) -> None:
    """Compile one program with debug information."""
    if compiler == "mingw":
        command, flags, libraries = "x86_64-w64-mingw32-gcc", MINGW[out.name.split("-")[0]], ()
    else:
        command = command_of(compiler, source.language)
        flags, libraries = source.flags, source.libraries
    words = [f"-{level}", "-g", "-w", *(flag.format(tree=tree) for flag in flags)]
    files = sorted(source.files(tree))
    if kind == "junk":
        folder = out.with_name(out.name + "-assembler")
        folder.mkdir(exist_ok=True)
        made = []
        for path in files:
            made.append(folder / f"{path.stem}.s")
            run(command, *words, "-S", "-o", made[-1], path)
            made[-1].write_text(add_junk(made[-1].read_text(), f"{out.name} {path.name}"))
        files = made
        run(command, "-o", out, *files, *libraries)
        shutil.rmtree(folder)
    else:
        run(command, *words, "-o", out, *files, *libraries)


def strip(path: Path, out: Path, *sections: str) -> Path:
    """Write a copy without symbols and without some sections."""
    if not out.exists():
        remove = [word for section in sections for word in ("--remove-section", section)]
        run("objcopy", "--strip-all", *remove, path, out)
    return out


def _case(folder: Path, sources: Path, name: str, kind: str, compiler: str, level: str) -> Case:
    source = PROGRAMS[name]
    tree = fetch(source.package, sources)
    suffix = {"junk": "-junk", "PE": ".exe"}.get(kind, "")
    whole = folder / f"{name}-{compiler}-{level}{suffix}"
    if not whole.exists():
        made = whole.with_name(f"{whole.stem}.new")
        build(made, source, tree, kind, compiler, level)
        made.rename(whole)
    stripped = strip(whole, folder / "stripped" / whole.name)
    # A PE file has no such sections, and its header points at the table that it has.
    bare = None if kind == "PE" else strip(whole, folder / "bare" / whole.name, *UNWIND)
    return Case(whole.name, kind, stripped, whole, bare, compiler, level)


def system_programs() -> list[Path]:
    """Return programs of this machine that have no symbols."""
    found: list[Path] = []
    for pattern in SYSTEM:
        found += sorted(Path("/usr").glob(pattern))[:1]
    return found


def main(cache: Path) -> Programs:
    """Build what is missing in the cache; return the programs in the order of `matrix`."""
    folder, sources = cache / "programs", cache / "programs" / "sources"
    for path in (sources, folder / "stripped", folder / "bare"):
        path.mkdir(parents=True, exist_ok=True)
    found = Programs()
    lost = {}
    for package in PACKAGES:
        try:
            fetch(package, sources)
        except Failed as error:
            lost[package] = str(error)
            found.missing.append(f"source package {package}: {error}")
    wanted = [one for one in matrix() if PROGRAMS[one[0]].package not in lost]

    def make(one: tuple[str, str, str, str]) -> Case | str:
        try:
            return _case(folder, sources, *one)
        except Failed as error:
            return f"{'-'.join((one[0], *one[2:]))} ({one[1]}): {error}"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for made in pool.map(make, wanted):
            if isinstance(made, Case):
                found.cases.append(made)
            else:
                found.missing.append(made)
    for path in system_programs():
        bare = strip(path, folder / "bare" / path.name, *UNWIND)
        found.cases.append(Case(path.name, "system", path, None, bare))
    return found
