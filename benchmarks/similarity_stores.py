"""Stores of the programs of `similarity_programs.py`, split by project and frozen.

Below CACHE/similarity come to lie

    graphs/       of the stripped programs, functions named by the debug information
    functions/    a store of all functions
    train/ val/ test/ unseen/    of the projects of each split, by gcc and clang
    older/        of the held-out projects, by an older compiler that no other split saw
    frozen.json   the fingerprint of each store, and what made it

The splits are made once. Afterwards a store that is not what was frozen is an error, so nothing
that is trained or measured later can have another split; `--freeze` makes them anew.

    python benchmarks/similarity_stores.py CACHE [--small] [--freeze]
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokmill
from debug_info import names_of, read_debug_info
from program_pairs import LAYOUT, compilers
from similarity_programs import COMPILERS, OLDER, splits
from tokmill.base.errors import TokmillError
from tokmill.builds.plan import Amount, How
from tokmill.store.store import Store
from tokmill.x86.graphs.graph_files import read_about, read_graph, write_graph
from tokmill.x86.graphs.lifting import lift_files

NAMED = "function ~ ^(?!sub_[0-9a-f]+$)"
"""Functions of the sources; import stubs and what starts a program have no name."""
STORES = ("train", "val", "test", "unseen", "older")


def select(folder: Path, split: str, projects: Sequence[str]) -> Store | None:
    """Make the store of a split; None where nothing of it was built.

    What is in `train` too, token by token, is left out of the others: library code under whatever
    name.
    """
    shutil.rmtree(folder / split, ignore_errors=True)
    older = split == "older"
    if not any(
        path.parts[-3].rpartition("-")[0] in projects and (OLDER in path.parts[-2]) == older
        for path in (folder / "programs").glob("*/*/*")
    ):
        return None
    wanted = "|".join(map(re.escape, projects))
    compiler = f"compiler {'=' if older else '!='} {OLDER}"
    not_in = () if split == "train" else (str(folder / "train"),)
    store = tokmill.build(
        "select", folder / "functions", folder / split, how=How(quiet=True),
        where=(f"project ~ ^({wanted})$", compiler, NAMED), not_in=not_in,
    )  # fmt: skip
    skipped = store.manifest.skipped
    unnamed, shared = skipped.get(f"not {NAMED}", 0), skipped.get("in another store", 0)
    print(
        f"{split}: {len(store):,} functions; left out: {unnamed:,} without a name, "
        f"{shared:,} that train has too",
        flush=True,
    )
    return store


def projects_of(split: str) -> list[str]:
    """Return the projects whose functions are in a store."""
    known = splits()
    return [*known["test"], *known["unseen"]] if split == "older" else known[split]


def name_functions(folder: Path) -> None:
    """Name the functions in the graphs of stripped programs by their debug information."""
    graphs = folder / "graphs"
    for path in sorted(graphs.rglob("*.parquet")):
        graph, about = read_graph(path), read_about(path)
        if about is not None:
            names = names_of(read_debug_info(folder / "debug" / graph.program))
            graph.function_name = [names.get(at, "") for at in graph.function_address.tolist()]
            write_graph(graph, path, about.digest, about.lifter)


def make(folder: Path) -> dict[str, Any]:
    """Make graphs and stores; return what is frozen of them."""
    report = lift_files([str(folder / "programs")], folder / "graphs", workers=1, quiet=False)
    print(f"graphs: {report.made:,} made, {report.kept:,} kept, {len(report.refusals)} refused")
    for one in report.refusals:
        print(f"  {one.program}: {one.refused}")
    name_functions(folder)
    tokmill.build(
        "x86", folder / "graphs", folder / "functions", layout=LAYOUT,
        how=How(yes=True, amount=Amount(workers=1)),
    )  # fmt: skip
    stores = {split: select(folder, split, projects_of(split)) for split in STORES}
    return {
        "programs": report.made + report.kept,
        "compilers": compilers((*COMPILERS, OLDER)),
        "splits": splits(),
        "stores": {
            split: {"fingerprint": store.fingerprint, "functions": len(store)}
            for split, store in stores.items()
            if store is not None
        },
    }


def check(folder: Path, frozen: dict[str, Any]) -> list[str]:
    """Return what is not as it was frozen, a line each."""
    wrong = []
    if frozen["splits"] != splits():
        wrong.append("similarity_splits.toml has changed")
    for split, facts in frozen["stores"].items():
        try:
            fingerprint = Store(folder / split).fingerprint
        except TokmillError as error:
            wrong.append(f"{split}: {error.what}")
            continue
        if fingerprint != facts["fingerprint"]:
            wrong.append(f"{split}: has the fingerprint {fingerprint}, not {facts['fingerprint']}")
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Make and freeze the stores, or check those that are frozen; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--freeze", action="store_true", help="make the splits anew")
    chosen = parser.parse_args(arguments)
    folder = chosen.cache.resolve() / ("similarity-small" if chosen.small else "similarity")
    list_file = folder / "frozen.json"
    if list_file.exists() and not chosen.freeze:
        frozen = json.loads(list_file.read_text())
        wrong = check(folder, frozen)
        for line in wrong:
            print(f"error: {line}", file=sys.stderr)
        if wrong:
            print(f"hint: --freeze makes the splits anew ({list_file})", file=sys.stderr)
            return 1
        programs = sum(1 for path in (folder / "programs").glob("*/*/*"))
        print(f"{folder}: {len(frozen['stores'])} stores are as they were frozen")
        if programs > frozen["programs"]:
            print(f"{programs - frozen['programs']} programs are newer: --freeze takes them in")
        return 0
    try:
        frozen = make(folder)
    except TokmillError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    list_file.write_text(json.dumps(frozen, indent=1) + "\n")
    print(f"{list_file}: {len(frozen['stores'])} stores frozen")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
