"""The programs of `diffing.py`: each built in several ways from Debian's sources, in pairs.

Objects are linked in the order of the names of their sources, or in one that a seed shuffles.
Below CACHE/diffing lie `programs/NAME` (stripped: what is compared), `debug/NAME` (the same with
symbols and debug information) and `sources` (what the line tables name).
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from programs import PROGRAMS, Failed, Source, fetch, release, run, strip

SEED = 1
SUITES = {"bullseye": "bookworm", "bookworm": "trixie", "trixie": "forky"}
"""Debian's release → the next one, whose version is the newer one of a pair."""


def below(*patterns: str, but: str = "") -> Callable[[Path], list[Path]]:
    def files(tree: Path) -> list[Path]:
        found = [path for pattern in patterns for path in tree.glob(pattern)]
        return [path for path in found if path.name not in but.split()]

    return files


MORE = {
    "lz4": Source(
        "lz4",
        below("lib/*.c", "programs/*.c", but="lz4_file.c"),
        ("-I{tree}/lib", "-I{tree}/programs", "-DXXH_NAMESPACE=LZ4_"),
    ),
    "brotli": Source("brotli", below("c/*/*.c"), ("-I{tree}/c/include",), ("-lm",)),
    "zstd": Source(
        "zstd",
        below("lib/common/*.c", "lib/compress/*.c", "lib/decompress/*.c", "lib/dictBuilder/*.c",
               "programs/*.c"),
        ("-I{tree}/lib", "-I{tree}/lib/common", "-DXXH_NAMESPACE=ZSTD_", "-DZSTD_DISABLE_ASM=1"),
        ("-lpthread",),
    ),
}  # fmt: skip
SOURCES = {name: PROGRAMS[name] for name in ("bzip2", "zlib", "lua", "sqlite")} | MORE
UTILITIES = ("true", "ls", "sort", "cp", "diff", "cmp", "find", "xargs")
TUNED = ("bzip2", "zlib", "lua", "sqlite")
"""Programs that were looked at while features were chosen; the others are held out."""
WAYS = {
    "O0 ↔ O2": (("gcc", "O0"), ("gcc", "O2")),
    "O2 ↔ O3": (("gcc", "O2"), ("gcc", "O3")),
    "gcc ↔ clang": (("gcc", "O2"), ("clang", "O2")),
    "versions": (("gcc", "O2"), ("gcc", "O2")),
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
        files = sorted(source.files(tree))
        if shuffled:
            random.Random(SEED).shuffle(files)
        flags = [flag.format(tree=tree) for flag in source.flags]
        part = out.with_name(f"{made}.new")
        run(compiler, f"-{level}", "-g", "-w", *flags, "-o", part, *files, *source.libraries)
        part.rename(out)
    return Built(made, strip(out, bare), out, tree)


def utilities(cache: Path, names: Sequence[str] = UTILITIES) -> Pairs:
    """Return pairs of the utilities that `make pairs` built, where it did."""
    folder = cache / "pairs"
    if not (folder / "pairs.toml").exists():
        return Pairs(missing=["utilities of GNU: `make pairs` builds them"])
    found = Pairs()
    listed = tomllib.loads((folder / "pairs.toml").read_text())["pairs"]
    for both in listed:
        (project_a, way_a, name), (project_b, way_b, _) = (one.split("/") for one in both)
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


def make(cache: Path, names: Sequence[str] = ()) -> Pairs:
    """Build what is missing; return the pairs in the order of `SOURCES` and `WAYS`.

    Without names all of them, and the utilities that are there.
    """
    found = utilities(cache, [name for name in UTILITIES if not names or name in names])
    for name in [name for name in SOURCES if not names or name in names]:
        for kind, (one, other) in WAYS.items():
            shuffled = kind.endswith("shuffled")
            if shuffled and name == "sqlite":
                continue  # Nearly all of it is one object.
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
