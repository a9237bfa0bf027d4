"""Intervals of many programs, as a store of `tokmill build bbv` holds them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.bbv.points import simpoint
from tokmill.bbv.points.clusters import Floats, Ints
from tokmill.bbv.points.simpoint import PROJECTION_SEED, Matrix
from tokmill.bbv.traces.block_vectors import BlockVectors
from tokmill.bbv.traces.cpi import RATES
from tokmill.builds.mining.interval_vectors import BITS, projection_rows
from tokmill.builds.mining.intervals import check_intervals
from tokmill.store.checks.hashes import mix
from tokmill.store.store import Store


@dataclass(frozen=True, eq=False)
class Population:
    """The intervals of one program that have instructions."""

    intervals: Ints
    """(N,) their numbers in the program, rising."""
    shares: Floats
    """(N,) of the program's instructions, above 0; sum to 1."""
    features: Floats
    """(N, dimensions) projected block vectors, beside them memory vectors."""

    def __len__(self) -> int:
        return len(self.intervals)


def block_vectors(store: Store) -> BlockVectors:
    """Return the block vectors of the intervals in a store.

    A block is its record in the store of blocks, or its id. If blocks are called by the ids of
    several traces, it is a hash of its id and its trace: no two traces have a block in common.
    """
    check_intervals(store)
    shards = [store.shard(number) for number in range(len(store.shards))]
    blocks = [np.zeros(0, np.int64), *(shard["block"].astype(np.int64) for shard in shards)]
    counts = [np.zeros(0, np.uint64), *(shard["count"].astype(np.uint64) for shard in shards)]
    indptr, ids = np.append(0, store.ends()).astype(np.int64), np.concatenate(blocks)
    least, largest = store.manifest.ranges.get("trace", (0, 0))
    if least != largest:
        ids ^= np.repeat(mix(store.column("trace")).view(np.int64), np.diff(indptr))
    return BlockVectors(indptr, ids, np.concatenate(counts))


def as_matrix(vectors: BlockVectors) -> tuple[Matrix, Ints]:
    """Return block vectors as a CSR matrix of float64, and the block of each column."""
    sparse = plugins.require("scipy.sparse")
    blocks, columns = np.unique(vectors.ids, return_inverse=True)
    shape = len(vectors), max(len(blocks), 1)
    index = np.int32 if vectors.entries < 2**31 else np.int64
    matrix = sparse.csr_matrix(
        (vectors.counts.astype(np.float64), columns.astype(index), vectors.indptr.astype(index)),
        shape,
    )
    return matrix, blocks if len(blocks) else np.zeros(1, np.int64)


def population(
    vectors: Matrix,
    ids: Any,
    memory: dict[str, Floats] | None = None,
    *,
    dimensions: int = 0,
) -> Population:
    """Return what is known of a program's intervals.

    Args:
        vectors: (intervals, blocks) CSR, counts of instructions.
        ids: (blocks,) ids of the columns.
        memory: name → (intervals,) rates of each interval.
        dimensions: of the random projection; 0: 15.
    """
    weights = simpoint.instructions(vectors)
    filled = np.flatnonzero(weights > 0)
    rates = rates_of(memory)
    rates = None if rates is None else rates[filled]
    features = simpoint.features(vectors[filled], ids, dimensions or simpoint.DIMENSIONS, rates)
    return Population(filled, weights[filled] / weights.sum(), features)


def rates_of(memory: dict[str, Floats] | None) -> Floats | None:
    """Return memory vectors, (intervals, rates), of their columns; None if there are none."""
    if not memory:
        return None
    rates = np.stack(list(memory.values()), axis=1)
    if not np.isfinite(rates).all():
        raise UsageError("a rate is not finite", hint="every interval needs every rate")
    return rates


MIX_DIMENSIONS = 30
"""To which the mix of mnemonics is projected."""
MNEMONIC = "mne"


@dataclass(frozen=True, eq=False)
class Executions:
    """Intervals with a CPI, of all programs of a store."""

    names: list[str]
    """Names of the programs."""
    program: Ints
    """(N,) the number of the name of each interval."""
    records: Ints
    """(N,) in the store."""
    instructions: Floats
    cpi: Floats
    kind: str
    """Kind of the CPI."""
    rates: Floats
    """(N, rates) events per 1,000 instructions; rates that some interval lacks are left out."""
    vectors: Matrix
    """(N, records of the store of blocks) CSR, counts of instructions."""
    left_out: int
    """Intervals without instructions or CPI."""

    def shares(self) -> Floats:
        """Return the share of each interval in its program's instructions, (N,)."""
        wholes = np.bincount(self.program, self.instructions)[self.program]
        return self.instructions / wholes

    def some(self, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> "Executions":
        """Return the intervals of which `chosen` (N,) is true, and their programs."""
        kept, program = np.unique(self.program[chosen], return_inverse=True)
        rows = ("records", "instructions", "cpi", "rates", "vectors")
        return replace(
            self,
            names=[self.names[number] for number in kept],
            program=program.astype(np.int64),
            **{name: getattr(self, name)[chosen] for name in rows},
        )


def read_executions(store: Store) -> Executions:
    """Read the intervals of a store; raises `TokmillError` for a store without a CPI."""
    vectors = block_vectors(store)
    if missing := sorted({"program", "instructions", "cpi", "cpi_kind"} - set(store.schema)):
        raise TokmillError(
            f"the store has no column {missing[0]!r}",
            where=str(store.path),
            hint="`tokmill build bbv` makes stores of executions",
        )
    names: list[str] = []
    kinds: list[str] = []
    for number, entry in enumerate(store.shards):
        shard = store.shard(number)
        names += shard.strings("program", 0, entry.records)
        kinds += shard.strings("cpi_kind", 0, entry.records)
    cpi = store.column("cpi").astype(np.float64)
    instructions = store.column("instructions").astype(np.float64)
    valid = (cpi > 0) & (instructions > 0)
    if not valid.any():
        raise TokmillError(
            "no interval has a CPI",
            where=str(store.path),
            hint="profile with --measured, or build with --cpi FILE",
        )
    programs, program = np.unique(np.asarray(names, object)[valid].astype(str), return_inverse=True)
    of_kind = sorted(set(np.asarray(kinds, object)[valid]))
    rates = {
        name: values
        for name in RATES
        if name in store.schema and np.isfinite(values := store.column(name)[valid]).all()
    }
    table = np.stack([*rates.values()], axis=1) if rates else np.zeros((int(valid.sum()), 0))
    columns = vectors.ids
    if store.schema["block"].ref is None:
        columns = np.unique(columns, return_inverse=True)[1]
    csr = plugins.require("scipy.sparse").csr_matrix(
        (vectors.counts.astype(np.float64), columns, vectors.indptr),
        (len(names), int(columns.max(initial=0)) + 1),
    )
    return Executions(
        programs.tolist(),
        program.astype(np.int64),
        np.flatnonzero(valid),
        instructions[valid],
        cpi[valid],
        " and ".join(of_kind),
        table.astype(np.float64),
        csr[valid],
        int((~valid).sum()),
    )


def untrained(store: Store, executions: Executions) -> Floats:
    """Return what intervals look like without any training: mix of mnemonics, rates of events.

    Shape (N, columns); both halves have the same total variance, a program counting as one.
    Raises `UsageError` where blocks are not those of a store.
    """
    if store.schema["block"].ref is None:
        raise UsageError(
            "the store does not say which instructions its blocks have",
            where=str(store.path),
            hint="build it with --blocks STORE, or name vectors: --signatures OVERLAY; "
            "`tokmill simpoint TRACE` chooses points of one program",
        )
    return with_rates(mnemonic_mix(store, executions), executions)


def with_rates(mix: Floats, executions: Executions) -> Floats:
    """Return a mix of mnemonics, and the rates beside it, as `untrained` has them."""
    weights = executions.shares() / len(executions.names)
    halves = [_scaled(mix, weights, whole=True)]
    if executions.rates.shape[1]:
        halves.append(_scaled(np.log1p(executions.rates), weights, whole=False))
    return np.hstack(halves)


def _scaled(points: Floats, weights: Floats, *, whole: bool) -> Floats:
    """Return points of variance 1 in all; unless `whole`, each column first gets the same."""
    centred = points - weights @ points
    spread = np.sqrt(weights @ centred**2)
    if whole:
        return centred / max(float(np.linalg.norm(spread)), 1e-300)
    kept = spread > 1e-12
    return centred[:, kept] / spread[kept] / np.sqrt(max(1, int(kept.sum())))


def mnemonic_mix(store: Store, executions: Executions) -> Floats:
    """Return the mix of mnemonics of each interval, projected, (N, `MIX_DIMENSIONS`).

    The root of a share is taken, so that rare mnemonics count (Hellinger's distance).
    """
    sparse = plugins.require("scipy.sparse")
    blocks = store.reference("block")
    column = MNEMONIC if MNEMONIC in blocks.schema else blocks.token_columns[0]
    used = np.flatnonzero(np.diff(executions.vectors.tocsc().indptr))
    rows, tokens, shares = [], [], []
    for number, record in enumerate(used.tolist()):
        ids, times = np.unique(np.asarray(blocks.record(record)[column]), return_counts=True)
        rows.append(np.full(len(ids), number))
        tokens.append(ids)
        shares.append(times / times.sum())
    width = int(max((one.max(initial=0) for one in tokens), default=0)) + 1
    of_blocks = sparse.csr_matrix(
        (np.concatenate(shares), (np.concatenate(rows), np.concatenate(tokens).astype(np.int64))),
        (len(used), width),
    )
    mix = (executions.vectors[:, used] @ of_blocks).tocsr()
    totals = np.asarray(mix.sum(axis=1)).reshape(-1)
    mix.data = np.sqrt(mix.data / np.repeat(np.maximum(totals, 1e-300), np.diff(mix.indptr)))
    rows_of = projection_rows(np.arange(width), MIX_DIMENSIONS, PROJECTION_SEED).astype(np.float64)
    return np.asarray(mix @ (rows_of / (1 << BITS)))
