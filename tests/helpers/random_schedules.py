"""Random schedules of modules that every generator writes: what came of them, by operation."""

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokmill.mlir import random_schedules as draws
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import generators, problem

QUICK = Settings(runs=2, most_seconds=0.5)
ALONE: dict[str, tuple[str, ...]] = {
    "matmul": ("64 32 48", "37 41 29", "63 45 35", "1 96 7"),
    "batch_matmul": ("4 32 32 16", "3 17 13 9", "5 32 21 24", "1 15 64 33"),
    "conv_2d_nchw": ("1 8 18 8 3", "1 3 17 5 3 2", "2 4 19 6 5 3", "1 7 9 5 1"),
    "conv_2d_nhwc": ("2 8 18 8 3 2", "1 3 17 5 3", "2 5 13 7 3 2", "1 16 9 8 1"),
    "pooling": ("1 8 18 3 1", "2 3 17 3 2", "1 5 15 2", "1 7 13 5 4"),
    "add": ("8 28 32", "37", "7 9 11", "3 1 5 4 3 2"),
    "relu": ("63 64", "31", "5 15 21", "3 7 1 9"),
    "exp": ("64 48", "29", "13 45", "3 5 7 8"),
    "reduce": ("64 96", "31 17", "9 5 35", "1 63"),
    "softmax": ("32 64", "17 31", "3 15 21", "1 45"),
}
"""Sizes for each generator alone, with one or more odd ones."""
CHAINS = (
    "matmul 37 21 15, relu",
    "softmax 15 33, matmul 16",
    "matmul 32 32 32, relu, matmul 16",
    "conv_2d_nchw 1 4 18 4 3, relu, pooling 2 2",
    "conv_2d_nhwc 1 3 15 4 3, relu, conv_2d_nhwc 5 3 2, add",
    "batch_matmul 3 17 15 9, exp, batch_matmul 8, reduce",
    "matmul 33 21 17, relu, matmul 13, add, softmax",
    "conv_2d_nchw 1 3 17 5 3 2, relu, pooling 3 1, conv_2d_nchw 4 2, relu",
    "pooling 1 4 17 3 2, relu, conv_2d_nchw 3 3, add, exp",
    "reduce 16 9 35, add, softmax, matmul 24, exp",
)
Counts = dict[str, Counter[str]]
"""Operation, or `chain of N` → how often each status came."""


def lines() -> list[str]:
    """Return the lines of all generators, and the chains; a generator without a line fails."""
    return [f"{name} {sizes}" for name in generators.GENERATORS for sizes in ALONE[name]] + [
        *CHAINS
    ]


def kind_of(line: str) -> str:
    """Return by what a line is counted."""
    parts = line.split(",")
    return line.split()[0] if len(parts) == 1 else f"chain of {len(parts)}"


def drawn(given: problem.Problem, line: str, number: int) -> Any:
    """Return a schedule of a line by its number."""
    return draws.draw(given, random.Random(f"{line} {number}"))


def result_of(given: problem.Problem, schedule: Any, child: Measurements) -> Result:
    """Measure a schedule; one that took too long once more, as the machine may have been busy."""
    result = child(given, schedule)
    return child(given, schedule, again=True) if result.status == "timeout" else result


def fuzzed(some: Iterable[str], each: int, child: Measurements) -> Counts:
    """Return what came of `each` random schedules of some lines; the same ones every time."""
    counts: Counts = {}
    for line in some:
        given = problem.of_line(line)
        for number in range(each):
            result = result_of(given, drawn(given, line, number), child)
            counts.setdefault(kind_of(line), Counter())[result.status] += 1
    return counts


def total(counts: Counts) -> Counter[str]:
    """Return how often each status came in all."""
    return sum(counts.values(), Counter())
