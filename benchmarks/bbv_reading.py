"""A basic block vector file of 1 GB: read in pieces, against line-by-line regular expressions."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tokmill.bbv.read import pieces

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
    best: dict[str, tuple[float, int, str]] = {}
    for _ in range(rounds):
        for what in READERS:
            found = alone(what, path)
            best[what] = min(best.get(what, found), found)
    results = {found[2] for found in best.values()}
    if len(results) > 1:
        raise SystemExit(f"the readers disagree: {results}")
    slow = best["regular expressions"][0]
    lines = [
        f"A file of {size / 1e9:.2f} GB as valgrind's exp-bbv writes it; all give equal sums. CPU "
        "seconds of one process, which a busy machine changes least.",
        "",
        "| reader | CPU seconds | MB/s | peak memory | ratio |",
        "|---|---|---|---|---|",
    ]
    for what, (seconds, memory, _) in best.items():
        lines.append(
            f"| {what} | {seconds:.1f} | {size / 1e6 / seconds:.0f} | {memory / 2**20:.0f} MiB "
            f"| {slow / seconds:.1f} × |"
        )
    return lines


READERS = {"tokmill": by_pieces, "regular expressions": by_expression}

if __name__ == "__main__":
    begun = time.process_time()
    counted = READERS[sys.argv[1]](Path(sys.argv[2]))
    taken = time.process_time() - begun
    print(taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, *counted)
