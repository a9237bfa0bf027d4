"""A basic block vector file of 1 GB: read in pieces, against line-by-line regular expressions."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tokmill.bbv.traces.read import pieces

ENTRY = re.compile(r":(\d+):(\d+)")
INTERVALS, BLOCKS, SEED = 30_000, 3_000, 5


def make(path: Path, size: int) -> Path:
    """Write about `size` bytes as valgrind's exp-bbv does, of blocks drawn as gzip runs them."""
    if path.exists() and abs(path.stat().st_size - size) < size / 10:
        return path
    draw = np.random.default_rng(SEED)
    with path.open("wb") as file:
        while file.tell() < size:
            ids = np.sort(draw.choice(9_000, BLOCKS, replace=False)) + 1
            counts = (draw.pareto(0.6, BLOCKS) * 3 + 1).clip(max=1e9).astype(np.int64)
            pairs = zip(ids.tolist(), counts.tolist(), strict=True)
            file.write(b"T" + b"".join(b":%d:%d   " % pair for pair in pairs) + b"\n")
    return path


def by_expression(path: Path) -> tuple[int, int, int]:
    """Read as SemanticBBV's preprocessing does: a regular expression a line, lists of integers."""
    rows = entries = total = 0
    with path.open() as file:
        for line in file:
            if line.startswith("T"):
                found = ENTRY.findall(line)
                ids, counts = [int(i) for i, _ in found], [int(c) for _, c in found]
                rows, entries, total = rows + 1, entries + len(ids), total + sum(counts)
    return rows, entries, total


def by_pieces(path: Path) -> tuple[int, int, int]:
    rows = entries = total = 0
    for piece in pieces(path):
        rows, entries = rows + len(piece), entries + piece.entries
        total += int(piece.instructions.sum())
    return rows, entries, total


def alone(what: str, path: Path) -> tuple[float, int, str]:
    """Return seconds, peak memory in bytes and the result of a reader in a process of its own."""
    code = [sys.executable, __file__, what, str(path)]
    seconds, memory, result = subprocess.run(
        code, check=True, capture_output=True, text=True
    ).stdout.split(maxsplit=2)
    return float(seconds), int(memory), result


def main(cache: Path, megabytes: int = 1000, rounds: int = 3) -> list[str]:
    """Return the lines of the section."""
    path = make(cache / f"bbv-{megabytes}.bb", megabytes * 10**6)
    size = path.stat().st_size
    found: dict[str, list[tuple[float, int, str]]] = {what: [] for what in READERS}
    for _ in range(rounds):
        for what, runs in found.items():
            runs.append(alone(what, path))
    results = {result for runs in found.values() for *_, result in runs}
    if len(results) > 1:
        raise SystemExit(f"the readers disagree: {results}")
    slow = [seconds for seconds, *_ in found["regular expressions"]]
    lines = [
        f"A file of {size / 1e9:.2f} GB as valgrind's exp-bbv writes it; all give equal sums. CPU "
        f"seconds of one process, the best of {rounds}. The readers take turns, and the ratio is "
        "the median of those of neighbours.",
        "",
        "| reader | CPU seconds | MB/s | peak memory | ratio |",
        "|---|---|---|---|---|",
    ]
    for what, runs in found.items():
        seconds, memory = min(run[0] for run in runs), max(run[1] for run in runs)
        ratio = np.median([other / run[0] for other, run in zip(slow, runs, strict=True)])
        lines.append(
            f"| {what} | {seconds:.1f} | {size / 1e6 / seconds:.0f} | {memory / 2**20:.0f} MiB "
            f"| {ratio:.1f} × |"
        )
    return lines


READERS = {"tokmill": by_pieces, "regular expressions": by_expression}

if __name__ == "__main__":
    begun = time.process_time()
    counted = READERS[sys.argv[1]](Path(sys.argv[2]))
    taken = time.process_time() - begun
    print(taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, *counted)
