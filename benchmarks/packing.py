"""Best-fit packing planned on the histogram of lengths, beside the algorithm piece by piece."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

import numpy as np

from tokmill.feed.pack import Patterns, best_fit, cut, rests
from tokmill.store.schema import Array

DOCUMENTS = (20_000, 200_000, 10**6, 10**9)
WINDOWS = (2048, 32_768)
PLAIN = 200_000
"""Documents up to which the plain algorithm runs too."""
LONGEST = 1_000_000


def histogram(documents: int, window: int) -> tuple[Array, Array]:
    """Return (lengths, counts) of the pieces of log-normal documents (median 493, sigma 1.2)."""
    lengths = np.arange(1, LONGEST)
    likely = np.exp(-((np.log(lengths) - 6.2) ** 2) / (2 * 1.2**2)) / lengths
    counts = np.random.default_rng(0).multinomial(documents, likely / likely.sum())
    _, rest = cut(lengths, window, 0)
    order = np.argsort(rest, kind="stable")
    pieces, counts, _ = rests(rest[order], counts[order])
    return pieces[counts > 0], counts[counts > 0]


def plain_best_fit(pieces: list[int], window: int) -> list[int]:
    """Return the room left in each bin, in rising order: each piece into the fullest that fits."""
    rooms: list[int] = []
    for piece in sorted(pieces, reverse=True):
        place = bisect_left(rooms, piece)
        insort(rooms, (rooms.pop(place) if place < len(rooms) else window) - piece)
    return rooms


def best_of(rounds: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least seconds of several rounds, and the result."""
    seconds, result = [], None
    for _ in range(rounds):
        started = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - started)
    return min(seconds), result


def main() -> list[str]:
    """Measure; return the section for RESULTS.md."""
    lines = [
        "| documents (log-normal) | window | patterns | packs | fill | plan, seconds "
        "| piece by piece, seconds | rooms left |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for window in WINDOWS:
        for documents in DOCUMENTS:
            lengths, counts = histogram(documents, window)
            seconds, patterns = best_of(5, lambda p=(lengths, counts, window): best_fit(*p))
            packs = int(patterns.repeats.sum())
            fill = int((lengths * counts).sum()) / (packs * window)
            plain, same = "-", "-"
            if documents <= PLAIN:
                pieces = np.repeat(lengths, counts).tolist()
                taken, rooms = best_of(2, lambda p=(pieces, window): plain_best_fit(*p))
                if rooms != rooms_left(patterns, window):
                    raise SystemExit(f"{documents} documents in {window}: other rooms are left")
                plain, same = f"{taken:.3f}", "equal"
            lines.append(
                f"| {documents:,} | {window:,} | {len(patterns.repeats):,} | {packs:,} "
                f"| {fill * 100:.4f} % | {seconds:.4f} | {plain} | {same} |"
            )
    return lines


def rooms_left(patterns: Patterns, window: int) -> list[int]:
    """Return the room left in each bin, in rising order."""
    used = np.add.reduceat(patterns.lengths * patterns.counts, patterns.offsets[:-1])
    return sorted(np.repeat(window - used, patterns.repeats).tolist())


if __name__ == "__main__":
    print("\n".join(main()))
