"""Diffing of large programs: SQLite at two levels, and 50,000 functions against 50,000.

The last are made of copies of git at -O2 and at -O3, which is built by its own Makefile:
each copy has strings and large constants of its own, and all else in common with the others, so
only these, callers, callees and the order of the functions tell copies apart. Symbols say which
functions are the same; nothing else sees them.

    python benchmarks/diffing_scale.py CACHE [--large]

Each pair is compared in a process of its own, from graph files, several times (the large one once).
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from function_truth import Score
from measure import highest, markdown
from program_pairs import Made, Tree, done, keep
from programs import run
from similarity_programs import PROJECTS, build, sources
from similarity_projects import Project
from symbol_truth import read_truth
from tokmill.store.schema import Array
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.graph import PLACES, Graph
from tokmill.x86.graphs.graph_files import read_graph, write_graph
from tokmill.x86.lift.cfg import lift

MANY = 50_000
"""Functions of the large pair, at least, on each side."""
LARGE_CONSTANT = 4_096
"""Constants from here on differ between copies: below are sizes, flags and places in structs."""
GIT = (
    "NO_GETTEXT", "NO_OPENSSL", "NO_CURL", "NO_EXPAT", "NO_PERL", "NO_PYTHON", "NO_TCLTK",
)  # fmt: skip
"""What git is built without."""
ODD = 0x9E3779B97F4A7C15
ROUNDS = 5


def built(cache: Path, name: str, level: str) -> tuple[Path, Path]:
    """Return a program of gcc, stripped and with debug information, made where it is not there."""
    PROJECTS["git"] = Project("git", lambda tree: ())
    made = Made(cache.resolve() / "diffing")
    (made.folder / "fetched").mkdir(parents=True, exist_ok=True)
    tree = sources(name, made)
    if name == "git":
        make_git(tree, level, made)
    else:
        build(tree, "gcc", level, made)
    place = f"{tree.name}/gcc-{level}/{name}"
    return made.folder / "programs" / place, made.folder / "debug" / place


def make_git(tree: Tree, level: str, made: Made) -> None:
    """Build git in a copy of its tree."""
    if done(tree, "gcc", level, made).exists():
        return
    work = made.folder / "work" / f"git-{level}"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(tree.path, work, symlinks=True)
    without = [f"{name}=1" for name in GIT]
    run("make", "-s", "git", "CC=gcc", f"CFLAGS=-{level} -g -w", *without, cwd=work)
    keep([work / "git"], tree, "gcc", level, made)
    shutil.rmtree(work)


# ---- a program of many copies --------------------------------------------------------------------


def copies(graph: Graph, count: int) -> Graph:
    """Return a program of so many copies of a graph, one behind the other.

    Stack slots, jump tables, symbols and data are left out.
    """
    ends = [graph.function_address, graph.block_address, graph.import_address, graph.reference,
            graph.pointer_address, graph.pointer_target]  # fmt: skip
    span = 1 << int(max(int(one.max()) for one in ends if len(one))).bit_length()
    starts = np.arange(count, dtype=np.uint64) * np.uint64(span)
    large = np.abs(graph.constant) >= LARGE_CONSTANT

    def moved(addresses: Array) -> Array:
        found = addresses[None, :] + starts[:, None]
        # An edge without a known target stays one.
        return np.where(addresses == 0, addresses, found).reshape(-1)

    def own(copy: int) -> Array:
        change = np.uint64(copy * ODD % 2**64).astype(np.int64)
        return np.where(large, graph.constant ^ change, graph.constant)

    def offsets(one: Array) -> Array:
        return np.concatenate([[0], np.tile(np.diff(one), count).cumsum()]).astype(np.int64)

    made: dict[str, Any] = {
        name: offsets(getattr(graph, name))
        for name in ("function_blocks", "block_bytes", "block_instructions", "block_edges",
                     "block_strings", "block_constants")
    }  # fmt: skip
    made |= {
        name: moved(getattr(graph, name))
        for name in ("function_address", "block_address", "edge_target", "import_address",
                     "reference", "pointer_address", "pointer_target")
    }  # fmt: skip
    made |= {
        name: np.tile(getattr(graph, name), count) for name in ("code", "lengths", "edge_kind")
    }
    made |= {
        each.name: each.default_factory()
        for each in dataclasses.fields(graph)
        if each.name.startswith(("slot", "table", "import_slot", "symbol", "exports", "data"))
    }
    shift = np.arange(count, dtype=np.uint32)[:, None] * np.uint32(len(graph.strings))
    rows = np.arange(count)[:, None] * len(graph.lengths)
    numbers = range(count)
    return dataclasses.replace(
        graph,
        **made,
        function_name=[""] * (count * len(graph.function_name)),
        unresolved=[],
        import_name=graph.import_name * count,
        reference_place=(graph.reference_place[None, :] + PLACES * rows).reshape(-1),
        constant=np.concatenate([own(copy) for copy in numbers]),
        string=(graph.string[None, :] + shift).reshape(-1),
        strings=[f"{copy} {text}" for copy in numbers for text in graph.strings],
        pointer_text=[
            f"{copy} {text}" if text else "" for copy in numbers for text in graph.pointer_text
        ],
    )


# ---- which functions are the same ----------------------------------------------------------------


def names_of(debug: Path, graph: Graph) -> list[str]:
    """Return the names of the functions of a graph by the symbols of a file; "" for none."""
    truth = read_truth(debug)
    known = dict(zip(truth.start.tolist(), truth.name, strict=True))
    return [known.get(at, "").partition(".")[0] for at in graph.function_address.tolist()]


def labels(a: Sequence[str], b: Sequence[str], count: int) -> tuple[Array, Array]:
    """Return a number for each function of all copies; -1 for those without a partner.

    Names that a program has twice are left out.
    """
    once = [{name for name, number in Counter(side).items() if number == 1} for side in (a, b)]
    number = {name: row for row, name in enumerate(sorted(once[0] & once[1] - {""}))}
    found = []
    for side in (a, b):
        one = np.asarray([number.get(name, -1) for name in side], np.int64)
        each = one[None, :] + np.arange(count)[:, None] * len(number)
        found.append(np.where(one < 0, -1, each).reshape(-1))
    return found[0], found[1]


def judge(own: tuple[Array, Array], i: Array, j: Array) -> Score:
    """Return how many matches are right, wrong and lost, as benchmarks/diffing-protocol.md says."""
    one, other = own[0][i], own[1][j]
    right = int(((one == other) & (one >= 0)).sum())
    judged = int(((one >= 0) | (other >= 0)).sum())
    return Score(right, judged - right, int((own[0] >= 0).sum()) - right)


# ---- measuring -----------------------------------------------------------------------------------


def measure(first: str, second: str, rounds: str, truth: str) -> None:
    """Compare two graph files; print seconds, CPU seconds, the peak of memory and F1 (a child)."""
    started = time.perf_counter()
    a, b = read_graph(first), read_graph(second)
    reading = time.perf_counter() - started
    seconds, busy = [], []
    for _ in range(int(rounds)):
        began = time.perf_counter(), time.process_time()
        diff = diff_graphs(a, b, names=False)
        seconds.append(time.perf_counter() - began[0])
        busy.append(time.process_time() - began[1])
    peak = highest()
    with np.load(truth) as kept:
        f1 = judge((kept["a"], kept["b"]), diff.function_a, diff.function_b).f1
    sizes = [
        (len(one.function_address), len(one.block_address), len(one.lengths)) for one in (a, b)
    ]
    print(json.dumps({
        "sizes": sizes, "reading": reading, "seconds": seconds, "cpu": busy, "peak": peak, "f1": f1
    }))  # fmt: skip


def row(
    cache: Path, title: str, name: str, levels: Sequence[str], least: int, rounds: int
) -> list[str]:
    """Return the row of a program at two levels, in copies of at least so many functions.

    Graphs are written to files, and compared in a child.
    """
    folder = cache / "diffing" / "scale"
    folder.mkdir(parents=True, exist_ok=True)
    bare, debug = zip(*(built(cache, name, level) for level in levels), strict=True)
    graphs = [lift(path, facts=True) for path in bare]
    count = -(-least // min(len(graph.function_address) for graph in graphs))
    names = [names_of(path, graph) for path, graph in zip(debug, graphs, strict=True)]
    a, b = labels(names[0], names[1], count)
    truth = folder / f"{name}-{count}.npz"
    np.savez(truth, a=a, b=b)
    files = [folder / f"{name}-{level}-{count}.parquet" for level in levels]
    for graph, file in zip(graphs, files, strict=True):
        write_graph(copies(graph, count) if count > 1 else graph, file)
    words = [sys.executable, __file__, "--measure", *files, rounds, truth]
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    cells = [" and ".join(f"{side[place]:,}" for side in found["sizes"]) for place in range(2)]
    times = np.median(found["seconds"]), np.median(found["cpu"]), found["reading"]
    cells += [f"{one:,.2f}" for one in times]
    return [title.format(count), *cells, f"{found['peak'] / 2**20:,.0f}", f"{found['f1']:.3f}"]


def main(cache: Path, large: bool) -> list[str]:
    head = [
        "pair", "functions", "blocks", "seconds", "CPU seconds", "reading the files, seconds",
        "peak MiB", "F1 of functions",
    ]  # fmt: skip
    if large:
        one = row(cache, "{} copies of git O2 ↔ O3", "git", ("O2", "O3"), MANY, 1)
    else:
        one = row(cache, "sqlite O0 ↔ O2", "sqlite", ("O0", "O2"), 1, ROUNDS)
    return markdown(head, [one])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
        parser.add_argument("cache", type=Path)
        parser.add_argument("--large", action="store_true", help="50,000 functions alone")
        asked = parser.parse_args()
        print("\n".join(main(asked.cache, asked.large)))
