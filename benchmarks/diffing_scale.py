"""Diffing of large programs: 4,000 functions against 4,000, and 50,000 against 50,000.

The first are two programs of the machine's git that share most of their functions, and SQLite at
two levels. The last are made of copies of git at -O2 and at -O3 (`diffing_programs.py` builds it):
each copy has strings and large constants of its own, and all else in common with the others, so
only these, callers, callees and the order of the functions tell copies apart. Symbols say which
functions are the same; nothing else sees them.

    python benchmarks/diffing_scale.py CACHE [--large]

Each pair is compared in a process of its own, from graph files, several times (the large one once).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import diffing_programs as programs
from function_truth import Score
from measure import highest
from symbol_truth import read_truth
from tokmill.store.schema import Array
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import read_graph, write_graph
from tokmill.x86.lift.cfg import lift

SMALL = (Path("/usr/lib/git-core/scalar"), Path("/usr/lib/git-core/git-shell"))
MANY = 50_000
"""Functions of the large pair, at least, on each side."""
LARGE_CONSTANT = 4_096
"""Constants from here on differ between copies: below are sizes, flags and places in structs."""
ODD = 0x9E3779B97F4A7C15
ROUNDS = 5


# ---- a program of many copies --------------------------------------------------------------------


def copies(graph: Graph, count: int) -> Graph:
    """Return a program of so many copies of a graph, one behind the other."""
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
                     "block_strings", "block_constants", "block_references")
    }  # fmt: skip
    made |= {
        name: moved(getattr(graph, name))
        for name in ("function_address", "block_address", "edge_target", "import_address",
                     "reference", "pointer_address", "pointer_target")
    }  # fmt: skip
    made |= {
        name: np.tile(getattr(graph, name), count) for name in ("code", "lengths", "edge_kind")
    }
    shift = np.arange(count, dtype=np.uint32)[:, None] * np.uint32(len(graph.strings))
    numbers = range(count)
    return dataclasses.replace(
        graph,
        **made,
        function_name=[""] * (count * len(graph.function_name)),
        unresolved=[],
        import_name=graph.import_name * count,
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
    f1 = None
    if truth != "-":
        with np.load(truth) as kept:
            f1 = judge((kept["a"], kept["b"]), diff.function_a, diff.function_b).f1
    sizes = [
        (len(one.function_address), len(one.block_address), len(one.lengths)) for one in (a, b)
    ]
    print(json.dumps({
        "sizes": sizes, "reading": reading, "seconds": seconds, "cpu": busy, "peak": peak, "f1": f1
    }))  # fmt: skip


def row(title: str, files: Sequence[Path], rounds: int, truth: Path | None = None) -> str:
    """Return the row of a pair, compared in a child."""
    words = [sys.executable, __file__, "--measure", *files, rounds, truth or "-"]
    done = subprocess.run(
        [str(word) for word in words], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    cells = [
        " and ".join(f"{side[place]:,}" for side in found["sizes"]) for place in range(2)
    ]  # fmt: skip
    f1 = "–" if found["f1"] is None else f"{found['f1']:.3f}"
    return (
        f"| {title} | {' | '.join(cells)} | {np.median(found['seconds']):,.2f} "
        f"| {np.median(found['cpu']):,.2f} | {found['reading']:,.2f} "
        f"| {found['peak'] / 2**20:,.0f} | {f1} |"
    )


def sides(
    folder: Path, bare: Sequence[Path], debug: Sequence[Path], count: int = 1
) -> tuple[list[Path], Path | None]:
    """Write graphs of so many copies, and who is whose partner if there are symbols."""
    folder.mkdir(parents=True, exist_ok=True)
    graphs = [lift(path, facts=True) for path in bare]
    truth = None
    if debug:
        truth = folder / f"{bare[0].name}-{count}.npz"
        both = [names_of(path, graph) for path, graph in zip(debug, graphs, strict=True)]
        own = labels(both[0], both[1], count)
        np.savez(truth, a=own[0], b=own[1])
    files = []
    for path, graph in zip(bare, graphs, strict=True):
        files.append(folder / f"{path.name}-{count}.parquet")
        write_graph(copies(graph, count) if count > 1 else graph, files[-1])
    return files, truth


def main(cache: Path, large: bool) -> list[str]:
    """Measure; return the table."""
    folder = cache / "diffing" / "scale"
    lines = [
        "| pair | functions | blocks | seconds | CPU seconds | reading the files, seconds "
        "| peak MiB | F1 of functions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    if not large:
        if all(path.exists() for path in SMALL):
            files, _ = sides(folder, SMALL, ())
            lines.append(row("`scalar`, `git-shell`", files, ROUNDS))
        a, b = (programs.build(cache, "sqlite", "gcc", level) for level in ("O0", "O2"))
        files, truth = sides(folder, (a.bare, b.bare), (a.debug, b.debug))
        return [*lines, row("sqlite O0 ↔ O2", files, ROUNDS, truth)]
    a, b = (programs.build(cache, "git", "gcc", level) for level in ("O2", "O3"))
    least = min(len(lift(one.bare).function_address) for one in (a, b))
    count = -(-MANY // least)
    files, truth = sides(folder, (a.bare, b.bare), (a.debug, b.debug), count)
    return [*lines, row(f"{count} copies of git O2 ↔ O3", files, 1, truth)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
        parser.add_argument("cache", type=Path)
        parser.add_argument("--large", action="store_true", help="50,000 functions alone")
        asked = parser.parse_args()
        print("\n".join(main(asked.cache, asked.large)))
