"""What is learned from projects in C, on projects of other authors and on projects in C++.

Fewer and smaller programs than those of `make similarity`. Below CACHE/similarity-languages lie

    programs/ debug/      as of `similarity_programs.py`
    graphs/ functions/    as of `similarity_stores.py`
    learn/ evaluated/     functions that are learned from, and those that are compared
    SEED/                 a run, by recipes/x86/similarity-bag.toml
    by-project/ by-language/    what `tokmill similarity eval` says of each run

What is there is kept. At the end all that was found is printed.

    python benchmarks/similarity_languages.py CACHE [--seed 0 …]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import tokmill
from diff_evidence_programs import MORE
from program_pairs import LAYOUT, Made
from programs import Failed
from similarity_learned import LEAST, POOLS, ROWS, evaluate, of_projects, select, table, train
from similarity_programs import build, sources
from similarity_projects import PROJECTS
from similarity_stores import NAMED, name_functions
from tokmill.builds.plan import How
from tokmill.similarity.evaluation import Choice
from tokmill.store.store import Store
from tokmill.x86.graphs.lifting import lift_files

LEARNED = (
    "bzip2", "libcsv", "http-parser", "cjson", "xxhash", "ncompress", "nanopb", "libogg", "md4c",
    "yajl", "ed", "lzlib", "giflib", "tinyscheme", "figlet", "zopfli", "tree", "jhead", "unzip",
    "speexdsp", "mujs", "chipmunk", "lcms2",
)  # fmt: skip
VAL = ("zlib", "lmdb", "libyaml", "libdeflate")
ASKED = {
    "by-project": ("lua", "expat", "cmark", "lz4", "jansson", "hiredis"),
    "by-language": (
        "tinyxml2", "jsoncpp", "ninja", "pugixml", "soundtouch", "double-conversion", "lzip",
    ),
}  # fmt: skip
"""Nothing was chosen by these."""
WAYS = (("gcc", "O0"), ("gcc", "O2"), ("gcc", "O3"), ("clang", "O0"), ("clang", "O2"))


def compile_all(folder: Path) -> None:
    """Compile what is missing, and name what cannot be compiled."""
    made = Made(folder)
    (folder / "fetched").mkdir(parents=True, exist_ok=True)
    PROJECTS.update(MORE)
    for name in (*LEARNED, *VAL, *ASKED["by-project"], *ASKED["by-language"]):
        try:
            tree = sources(name, made)
            for compiler, level in WAYS:
                build(tree, compiler, level, made)
        except Failed as error:
            print(f"left out: {name}: {error}", flush=True)


def store_of_functions(folder: Path) -> Path:
    """Return a store of the functions of all programs, which it makes where there is none."""
    path = folder / "functions"
    if not path.exists():
        compile_all(folder)
        lift_files([str(folder / "programs")], folder / "graphs", workers=1, quiet=False)
        name_functions(folder)
        tokmill.build("x86", folder / "graphs", path, layout=LAYOUT, how=How(yes=True))
    return path


def main(arguments: Sequence[str]) -> int:
    """Learn with each seed, and print recall@1 on both splits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--seed", type=int, action="append")
    chosen = parser.parse_args(arguments)
    folder, seeds = chosen.cache.resolve() / "similarity-languages", chosen.seed or [0, 1, 2]
    functions = store_of_functions(folder)
    select(functions, folder / "learn", of_projects(LEARNED), NAMED, f"length >= {LEAST}")
    select(functions, folder / "val", of_projects(VAL), NAMED)
    select(functions, folder / "evaluated", "compiler ~ ^gcc")
    for seed in seeds:
        train(folder / "learn", folder / "val", folder / str(seed), seed)
    choices = {
        folder / split: Choice(rows=ROWS, projects=projects, pools=POOLS)
        for split, projects in ASKED.items()
    }
    evaluate(Store(folder / "evaluated"), folder / "graphs", folder, seeds, choices)
    for place in choices:
        print(place.name, *table(place), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
