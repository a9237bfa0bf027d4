"""Programs that `diff_evidence.py` learns from and is measured on, and their pairs.

Beside projects of `similarity_projects.py` there are some more in C++. All lie below CACHE/diffing,
as those of `similarity_programs.py` lie below CACHE/similarity. What is there is kept, as is what
the matcher is given of a pair, in CACHE/evidence.
"""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from debug_info import read_debug_info
from diffing_programs import SUITES
from function_truth import INLINED, FunctionTruth, function_truth
from program_pairs import Made
from programs import PROGRAMS, Failed, below, release
from similarity_programs import build, sources
from similarity_projects import PROJECTS, Project
from tokmill.store.schema import Array
from tokmill.x86.diff import program_diff
from tokmill.x86.diff.evidence import Weighted
from tokmill.x86.lift.cfg import lift


def _cpp(
    package: str,
    files: str,
    *flags: str,
    but: str = "$^",
    made: Mapping[str, str] | None = None,
    library: bool = True,
) -> Project:
    """Describe a project in C++; files whose names match `but` are left out."""
    found = below(*files.split())

    def sources(tree: Path) -> list[Path]:
        return [path for path in found(tree) if not re.search(but, path.name)]

    return Project(package, sources, ("-I{made}", *flags), (), "C++", made or {}, library)


MORE = {
    "double-conversion": Project(
        "double-conversion", below("double-conversion/*.cc"), ("-I{tree}",), language="C++",
        library=True,
    ),
    "soundtouch": Project(
        "soundtouch", below("source/SoundTouch/*.cpp"), ("-I{made}", "-I{tree}/include"), (),
        "C++", {"soundtouch_config.h": ""}, True,
    ),
    "jsoncpp": Project(
        "libjsoncpp", below("src/lib_json/*.cpp"), ("-I{tree}/include",), (), "C++", library=True
    ),
    "ninja": Project(**vars(PROGRAMS["ninja"])),
    "muparser": _cpp(
        "muparser", "src/*.cpp", "-I{tree}/include", but="DLL|Test"
    ),
    "hunspell": _cpp(
        "hunspell", "src/hunspell/*.cxx", "-I{tree}/src/hunspell", "-DHUNSPELL_STATIC"
    ),
    "box2d": _cpp("box2d", "src/*/*.cpp", "-I{tree}/include", "-I{tree}/src"),
    "polyclipping": _cpp("libpolyclipping", "cpp/clipper.cpp", "-I{tree}/cpp"),
    "googletest": _cpp(
        "googletest", "googletest/src/gtest-all.cc", "-I{tree}/googletest",
        "-I{tree}/googletest/include",
    ),
    "fmt": _cpp("fmtlib", "src/format.cc src/os.cc", "-I{tree}/include"),
    "gperf": _cpp(
        "gperf", "src/*.cc lib/*.cc lib/getopt.c lib/getopt1.c", "-I{tree}/lib", "-I{tree}/src",
        made={"config.h": ""}, library=False,
    ),
    "simplecpp": _cpp("cppcheck", "externals/simplecpp/simplecpp.cpp"),
    "libebml": _cpp(
        "libebml", "src/*.cpp", "-I{tree}", "-I{tree}/ebml",
        made={"ebml_export.h": "#define EBML_DLL_API\n"},
    ),
    "leveldb": _cpp(
        "leveldb", "db/*.cc table/*.cc util/*.cc helpers/memenv/memenv.cc", "-I{tree}",
        "-I{tree}/include", "-DLEVELDB_PLATFORM_POSIX=1", but="test|bench|windows", library=False,
        made={"port/port_config.h": "#define HAVE_FDATASYNC 1\n#define HAVE_O_CLOEXEC 1\n"
              "#define HAVE_CRC32C 0\n#define HAVE_SNAPPY 0\n"},
    ),
}  # fmt: skip
"""Projects that `make similarity` has not."""
TRAIN = (
    "libcsv", "http-parser", "cjson", "ncompress", "nanopb", "libogg", "md4c", "yajl", "ed",
    "lzlib", "giflib", "tinyscheme", "figlet", "zopfli", "tree", "jhead", "unzip", "speexdsp",
    "mujs", "chipmunk", "lcms2", "lzip", "pugixml", "double-conversion", "hunspell", "box2d",
    "polyclipping", "googletest", "fmt", "gperf", "simplecpp", "libebml", "leveldb",
)  # fmt: skip
STOP = ("libyaml", "lmdb", "libdeflate", "soundtouch", "muparser")
"""Projects that say when to stop."""
FIGURES = (
    "expat", "hiredis", "lua", "jansson", "cmark", "bzip2", "zlib", "lz4", "xxhash", "tinyxml2",
    "jsoncpp", "ninja",
)  # fmt: skip
"""Projects that figures are of: nothing is chosen on them."""
KINDS = {
    "gcc O0 ↔ O2": ("gcc-O0", "gcc-O2"),
    "gcc O0 ↔ O3": ("gcc-O0", "gcc-O3"),
    "gcc O2 ↔ O3": ("gcc-O2", "gcc-O3"),
    "clang O0 ↔ O2": ("clang-O0", "clang-O2"),
    "gcc ↔ clang, O2": ("gcc-O2", "clang-O2"),
    "versions": ("gcc-O2", "gcc-O2"),
}
"""Kind of a pair → compiler and level of A and of B."""
EQUAL = {
    "itself, O0": ("gcc-O0", "gcc-O0"),
    "itself, O2": ("gcc-O2", "gcc-O2"),
    "itself, clang": ("clang-O2", "clang-O2"),
}
"""Pairs that are only learned from."""
SHUFFLED = {
    "gcc O0 ↔ O2": 20, "gcc O2 ↔ O3": 20, "gcc ↔ clang, O2": 20, "versions": 5,
    **dict.fromkeys(EQUAL, 2),
}  # fmt: skip
"""Kinds of which there are pairs with the functions of B in another order too → how many functions
stay together, on average."""


@dataclass(frozen=True)
class Pair:
    """Two programs: both as they are compared, and with debug information."""

    project: str
    kind: str
    bare: tuple[Path, Path]
    debug: tuple[Path, Path]

    @property
    def language(self) -> str:
        return (PROJECTS | MORE)[self.project].language


def pairs(cache: Path, names: tuple[str, ...], kinds: dict[str, tuple[str, str]]) -> Iterator[Pair]:
    """Build what is missing; yield the pairs of projects, and say what could not be built."""
    made = Made(cache.resolve() / "diffing")
    (made.folder / "fetched").mkdir(parents=True, exist_ok=True)
    PROJECTS.update(MORE)
    for name in names:
        for kind, ways in kinds.items():
            try:
                trees = [sources(name, made)] * 2
                if kind == "versions":
                    trees[1] = sources(name, made, SUITES[release()])
                    if trees[0].version == trees[1].version:
                        continue
                for tree, way in zip(trees, ways, strict=True):
                    build(tree, *way.split("-"), made)
            except Failed as error:
                print(f"left out: {name}, {kind}: {error}", flush=True)
                continue
            places = [f"{t.name}/{way}/{name}" for t, way in zip(trees, ways, strict=True)]
            bare, debug = (
                tuple(made.folder / part / place for place in places)
                for part in ("programs", "debug")
            )
            yield Pair(name, kind, (bare[0], bare[1]), (debug[0], debug[1]))


NONE, SKIPPED = -1, -2
"""Partners of functions: there is none; it is not known, or given."""


class Case(NamedTuple):
    """A pair of programs before its functions are matched."""

    pair: Pair
    arguments: tuple[Any, ...]
    """Of `match_functions`."""
    partner: tuple[Array, Array]
    """(F,) i8 of each program: the partner, `NONE` or `SKIPPED`."""
    truth: FunctionTruth
    order: Array | None = None
    """Functions of B in the order in which they are compared; None for that of its graph."""


class _Found(Exception):
    """Ends a diff before its functions are matched."""


def case_of(pair: Pair) -> Case:
    graphs = [lift(path, facts=True) for path in pair.bare]
    a, b = graphs
    truth = function_truth(a, b, *(read_debug_info(path) for path in pair.debug))
    with mock.patch.object(program_diff, "match_functions", side_effect=_Found) as call:
        try:
            program_diff.diff_graphs(a, b, names=False)
        except _Found:
            arguments = call.call_args.args
    if pair.bare[0] == pair.bare[1]:
        every = np.arange(len(a.function_address))
        return Case(pair, arguments, (every, every), truth)
    labels = truth.a.labels(), truth.b.labels()
    partner = []
    for own, other, side in ((*labels, truth.a), (*labels[::-1], truth.b)):
        places = {label: row for row, label in enumerate(other.tolist()) if label >= 0}
        why = side.reasons()
        partner.append(np.asarray([
            places.get(label, NONE) if label >= 0 else NONE if why[row] == INLINED else SKIPPED
            for row, label in enumerate(own.tolist())
        ], np.int64))  # fmt: skip
    return Case(pair, arguments, (partner[0], partner[1]), truth)


def cases(cache: Path, names: Sequence[str], kinds: dict[str, tuple[str, str]]) -> Iterator[Case]:
    """Yield what the matcher is given of all pairs of projects, kept."""
    (cache / "evidence").mkdir(parents=True, exist_ok=True)
    for pair in pairs(cache, tuple(names), kinds):
        kept = cache / "evidence" / f"{pair.project}-{pair.kind}.pkl".replace(" ", "_")
        if not kept.exists():
            new = kept.with_suffix(".new")
            new.write_bytes(pickle.dumps(tuple(case_of(pair))[1:]))
            new.rename(kept)
        case = Case(pair, *pickle.loads(kept.read_bytes()))  # noqa: S301, written here
        yield case
        if pair.kind in SHUFFLED:
            yield shuffled(case, SHUFFLED[pair.kind])


def shuffled(case: Case, together: int) -> Case:
    """Return a pair in which pieces of B, of so many functions on average, are in another order."""
    a, b, weighted, hashes, tables, given = case.arguments
    random = np.random.default_rng(len(b.shape))
    cuts = np.flatnonzero(random.random(len(b.shape)) * together < 1)
    pieces = np.split(np.arange(len(b.shape)), cuts)
    order = np.concatenate([pieces[n] for n in random.permutation(len(pieces))])
    place = np.argsort(order)
    b = replace(b, shape=b.shape[order], calls=b.calls[order][:, order])
    for matrix in (b.calls, *(found := {k: v[order] for k, v in weighted[1].of.items()}).values()):
        matrix.sort_indices()
    other = Weighted(found, {k: v[order] for k, v in weighted[1].total.items()})
    turned = replace(tables[1], function=place[tables[1].function], users=tables[1].users[order])
    arguments = (
        a, b, (weighted[0], other), (hashes[0], hashes[1][order]), (tables[0], turned),
        replace(given, j=place[given.j]),
    )  # fmt: skip
    there = case.partner[0] >= 0
    to = np.where(there, place[case.partner[0]], case.partner[0])
    kind = f"{case.pair.kind}, shuffled"
    return Case(
        replace(case.pair, kind=kind), arguments, (to, case.partner[1][order]), case.truth, order
    )
