"""Stores of intervals: weighted sets of blocks of another store, as `build bbv` makes them."""

from pathlib import Path

import numpy as np

from entry_stores import lay
from making import write_store
from tokmill.store.references import reference_to, written_in
from tokmill.store.schema import Column, Schema
from tokmill.store.store import Store
from toy import make_store

WIDTH = 6
SCHEMA: Schema = {
    "block": Column("u2", ref="blocks"),
    "count": Column("u8"),
    "phase": Column("u4", per="record"),
    "interval": Column("u8", per="record"),
    "cpi": Column("f4", per="record"),
}


def blocks_store(path: Path, blocks: int = 60, seed: int = 0) -> Path:
    """A store of blocks with vectors, of which one number is what a block costs."""
    random = np.random.default_rng(seed)
    make_store(path, [np.ones(1 + i % 4, np.int64) for i in range(blocks)])
    vectors = random.normal(size=(blocks, WIDTH)).astype(np.float32)
    lay(path, "vectors", {"embedding": vectors})
    return path


def intervals_store(path: Path, blocks: Path, count: int = 40, seed: int = 0) -> Path:
    """Intervals of four phases, with a CPI that follows from their blocks; of one it is not known.

    Overlay `entries`: a triplet for each, of its phase and of another.
    """
    random, program = np.random.default_rng(seed), np.random.default_rng(7)
    vectors = Store(blocks, ["vectors"]).column("embedding")
    cost = 1 + np.abs(vectors[:, 0])
    share = program.gamma(0.2, size=(4, len(vectors)))
    phase = np.arange(count) % 4
    rows = []
    for number, kind in enumerate(phase.tolist()):
        executed = random.poisson(1e6 * share[kind] * random.gamma(8, 1 / 8, len(vectors)))
        ran = np.flatnonzero(executed)
        cpi = float((cost[ran] * executed[ran]).sum() / executed[ran].sum())
        cells = {"block": ran.tolist(), "count": executed[ran].tolist(), "phase": kind}
        rows.append({**cells, "interval": number, "cpi": np.nan if number == 5 else cpi})
    path.mkdir(parents=True)
    references = written_in(path, {"blocks": reference_to(blocks)})
    write_store(path, SCHEMA, [rows[: count // 2], rows[count // 2 :]], references=references)
    near = [random.choice(np.flatnonzero((phase == k) & (np.arange(count) != i))) for i, k in
            enumerate(phase)]  # fmt: skip
    far = [random.choice(np.flatnonzero(phase != k)) for k in phase]
    named = {"anchor": np.arange(count), "positive": np.asarray(near), "negative": np.asarray(far)}
    lay(path, "entries", {n: v.astype(np.uint32) for n, v in named.items()}, path)
    return path
