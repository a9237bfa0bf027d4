"""Stores of intervals: programs that run through phases, each with blocks of its own."""

from pathlib import Path

import numpy as np

from making import rec, token_store, write_store
from tokmill.store.references import reference_to
from tokmill.store.schema import Array, Column
from tokmill.store.store import Store

BLOCKS = 120


def counts_of(intervals: int, seed: int = 0, phases: int = 5) -> Array:
    """Instructions by interval and block of one program, (intervals, BLOCKS) int64.

    Phase after phase; a third of the intervals repeats the one before exactly.
    """
    draw = np.random.default_rng(seed)
    shapes = draw.random((phases, BLOCKS)) * (draw.random((phases, BLOCKS)) < 0.3)
    found = np.zeros((intervals, BLOCKS), np.int64)
    for row in range(intervals):
        if row and draw.random() < 0.33:
            found[row] = found[row - 1]
            continue
        shape = shapes[(row // 7) % phases] * (1 + 0.5 * draw.random(BLOCKS))
        found[row] = shape * 1_000_000
    return found


def write_intervals(path: Path, programs: int = 3, intervals: int = 90, shards: int = 4) -> Store:
    """Write a store of the columns of `tokmill build bbv`.

    Its last intervals have no blocks; every tenth has no CPI.
    """
    blocks = token_store(path.parent / f"{path.name}-blocks", [[[i] for i in range(BLOCKS)]])
    schema = {
        "block": Column("u1", ref="blocks"),
        "count": Column("u8"),
        "program": Column("utf8", per="record"),
        "interval": Column("u8", per="record"),
        "instructions": Column("u8", per="record"),
        "cpi": Column("f4", per="record"),
    }
    rows = []
    for program in range(programs):
        for number, counts in enumerate(counts_of(intervals, seed=program)):
            block = np.flatnonzero(counts) if number < intervals - 1 else np.zeros(0, int)
            cpi = np.nan if number % 10 == 3 else 1 + block.sum() / 1000
            rows.append(
                {**rec(), "block": block.tolist(), "count": counts[block].tolist(),
                 "program": f"program {program}", "interval": number,
                 "instructions": int(counts[block].sum()), "cpi": cpi}
            )  # fmt: skip
    size = -(-len(rows) // shards)
    cut = [rows[i : i + size] for i in range(0, len(rows), size)]
    return write_store(path, schema, cut, references={"blocks": reference_to(blocks.path)})
