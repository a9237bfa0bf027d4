"""The source `bbv`: executions as sequences of (block, instructions), a record an interval."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.inflate import MAGIC
from tokmill.base.progress import human_share
from tokmill.bbv.join import BEGINS, INSIDE, NO_ADDRESS, REASONS, Joined, join, spread
from tokmill.bbv.store_blocks import open_blocks
from tokmill.bbv.traces.addresses import Addresses, read_addresses, read_maps
from tokmill.bbv.traces.block_vectors import BlockVectors, row_sums
from tokmill.bbv.traces.cpi import RATES, Measures, check_measures, read_measures
from tokmill.bbv.traces.read import SIDECARS, Sidecars, pieces, stem_of, thread_of, without_sidecars
from tokmill.builds.scan import FolderOptions, find_files
from tokmill.builds.source import Item, WholeFiles
from tokmill.store.manifest import OtherFile, Reference
from tokmill.store.references import reference_to
from tokmill.store.schema import Array, Column, Records, Schema, Strings, id_dtype, ranges

EXPANDS = 2
SUFFIXES = tuple(f".bb{packing}" for packing in ("", *MAGIC))
REFERENCE = "blocks"
BLOCKS_HINT = "--blocks STORE; tokmill build x86 PROGRAM LIBRARY… --unit block -o STORE makes one"


class BbvConfig(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of execution profiles."""

    blocks: tuple[str, ...] = ()
    """Store of basic blocks (`tokmill build x86 … --unit block`) of the programs and libraries that
    ran; without it blocks have their ids in the trace."""
    shared_ids: bool = False
    """Without blocks: the ids of all traces mean the same blocks."""
    pc: tuple[str, ...] = ()
    """File with the address of each block (a pc file), for all traces; without it the one beside
    each trace (TRACE.pc)."""
    map: tuple[str, ...] = ()
    """Where programs were mapped: a copy of /proc/PID/maps. Without it the one beside each trace
    (TRACE.map); without one it is found from the addresses."""
    cpi: tuple[str, ...] = ()
    """CSV or JSON with the cycles per instruction of each interval; without it the one beside each
    trace (TRACE.intervals.csv)."""
    program: str = ""
    """Name of the program; by default that of the trace."""
    min_joined: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Smallest share of a trace's instructions that must be found in the store of blocks."""


class BbvSource(WholeFiles):
    """Basic block vectors as text, of which each file is an item and each interval a record.

    Tokens are the blocks that ran, by their numbers in the store of blocks and each once: `block`
    (a reference) and `count`, the instructions that were executed in it. A record has `program`,
    `thread`, `interval` (from 0), `instructions` (all, also those of blocks that are not in the
    store), `cpi` with `cpi_kind`, and events per 1,000 instructions (NaN where nothing is known).
    Without a store of blocks `block` is the id in the trace, and records with an equal `trace`, a
    digest of the file, have ids in common; it is 0 where the ids of all traces mean the same.
    """

    Config: ClassVar[type[msgspec.Struct]] = BbvConfig
    version: ClassVar[int] = 4
    has_tokenizer: ClassVar[bool] = False
    places = "row"
    config: BbvConfig

    def prepare(self) -> None:
        config = self.config
        for name in ("blocks", *SIDECARS):
            if len(getattr(config, name)) > 1:
                raise UsageError(
                    f"--{name} names {len(getattr(config, name))} files or stores",
                    hint=f"merge them: tokmill build select {' '.join(config.blocks)} -o ALL"
                    if name == "blocks"
                    else "one for all traces; the default is the file next to each trace: "
                    f"its name with {SIDECARS[name]}",
                )
        for name in ("shared_ids",) if config.blocks else ("pc", "map", "min_joined"):
            if getattr(config, name) != getattr(BbvConfig(), name):
                raise UsageError(
                    f"--{name.replace('_', '-')} does nothing with{'' if config.blocks else 'out'} "
                    "--blocks",
                    hint="leave it out: the programs of a store share its blocks"
                    if config.blocks
                    else BLOCKS_HINT,
                )
        self.is_bounded = not config.blocks
        places = {
            name: tuple(map(os.path.abspath, getattr(config, name)))
            for name in ("blocks", *SIDECARS)
        }
        self.config = msgspec.structs.replace(config, **places)
        self._sidecars = Sidecars(places, SIDECARS if config.blocks else ("cpi",))

    @cached_property
    def schema(self) -> Schema:
        if self.config.blocks:
            records = self.references()[REFERENCE].records
            block, trace = Column(id_dtype(max(records, 1)), ref=REFERENCE), {}
        else:
            block, trace = Column("u8"), {"trace": Column("u8", per="record")}
        return {
            "block": block,
            "count": Column("u8"),
            **trace,
            "program": Column("utf8", per="record"),
            "thread": Column("u4", per="record"),
            "interval": Column("u8", per="record"),
            "instructions": Column("u8", per="record"),
            "cpi": Column("f4", per="record"),
            "cpi_kind": Column("utf8", per="record"),
            **{name: Column("f4", per="record") for name in RATES},
        }

    def identity(self) -> dict[str, Any]:
        """Return nothing for files: plan and reference have them by content."""
        shared = self.config.shared_ids or None
        return {**dict.fromkeys(("blocks", *SIDECARS, "min_joined")), "shared_ids": shared}

    def references(self) -> dict[str, Reference]:
        return {REFERENCE: self._reference} if self.config.blocks else {}

    @cached_property
    def _reference(self) -> Reference:
        return reference_to(self.config.blocks[0])

    def items(self) -> Iterator[Item]:
        listing = find_files(self.inputs, SUFFIXES, choice=self.config)
        traces = [file.path for file in listing.files]
        self.left_out = without_sidecars(listing.left_out, traces, self.inputs)
        for file in listing.files:
            sidecars = self._sidecars.of(file.path)
            yield Item(
                file.name, str(file.path.absolute()), 0, file.size, file.digest, EXPANDS,
                others=tuple(OtherFile(path, digest) for path, digest in sidecars),
            )  # fmt: skip

    def batches(self, item: Item) -> Iterator[Records]:
        paths = self._sidecars.roles(Path(item.path), (other.path for other in item.others))
        addresses, joined = self._join(item, paths) if self.config.blocks else (None, None)
        measures = read_measures(paths["cpi"]) if "cpi" in paths else None
        counted, noted = Counter[str](), Counter[str]()
        done = 0
        if measures is not None:
            sums = np.concatenate([piece.instructions for piece in pieces(item.path)])
            check_measures(measures, sums, paths["cpi"], item.path)
        program = self.config.program or stem_of(Path(item.name)).as_posix()
        trace = 0 if self.config.shared_ids else int(item.digest[:16], 16)
        thread, batch, shares = thread_of(item.path), None, [0.0]
        for piece in pieces(item.path, tell=shares.append):
            # What the file declares is known only at its end, so the last batch is held back.
            if batch is not None:
                yield batch
            piece = replace(piece, declared=piece.declared._replace(thread=thread))
            counted["intervals"] += len(piece)
            counted["entries"] += piece.entries
            counted["instructions"] += int(piece.instructions.sum())
            rows = np.repeat(np.arange(len(piece)), np.diff(piece.indptr))
            if joined is None or addresses is None:
                # Some producers list blocks that did not run.
                ran = piece.counts > 0
                blocks = rows[ran], piece.ids[ran], piece.counts[ran]
            else:
                blocks = in_store(piece, rows, addresses.find(piece.ids), joined, counted)
            batch = self._records(piece, blocks, measures, done, program, trace)
            batch.done = shares[-1]
            # Each batch has the notes of its own intervals: a build may end after any.
            batch.notes = dict(counted - noted) | (_of_trace(joined) if not done else {})
            noted = counted.copy()
            done += len(piece)
        assert batch is not None
        share = counted["instructions joined"] / max(1, counted["instructions"])
        if joined is not None and share < self.config.min_joined:
            raise self._too_few(item, share, counted, joined)
        # What the trace says at its end.
        counts = {
            "repetitions of REP instructions that are not counted": piece.declared.repetitions or 0,
            "traces whose last line does not end": int(piece.torn),
            "lines that begin with neither T nor #": piece.other_lines,
        }
        batch.notes |= {name: number for name, number in counts.items() if number}
        yield batch

    def _join(self, item: Item, paths: Mapping[str, str]) -> tuple[Addresses, Joined]:
        if "pc" not in paths:
            raise TokmillError(
                "the trace has no pc file, so the addresses of its blocks are unknown",
                where=item.path,
                hint="--pc FILE; valgrind --tool=exp-bbv --pc-out-file=FILE writes it. Without "
                "--blocks a block is called by its id",
            )
        addresses = read_addresses(paths["pc"])
        mapped = read_maps(paths["map"]) if "map" in paths else []
        return addresses, join(addresses, open_blocks(self.config.blocks[0]), mapped)

    def _records(
        self,
        piece: BlockVectors,
        blocks: tuple[Array, Array, Array],
        measures: Measures | None,
        first: int,
        program: str,
        trace: int,
    ) -> Records:
        """Return the intervals of a piece; `blocks`: row, block and count of each entry."""
        offsets, block, count = merged(*blocks, len(piece))
        n = len(piece)
        here = slice(first, first + n)
        nothing = np.full(n, np.nan)
        kind = measures.kind if measures else ""
        cpi = measures.cpi[kind][here] if measures and kind else nothing
        kinds = [kind if value == value else "" for value in cpi.tolist()]
        columns: dict[str, Array | Strings] = {
            "block": block,
            "count": count,
            "trace": np.full(n, trace, np.uint64),
            "program": Strings.constant(program, n),
            "thread": np.full(n, piece.declared.thread or 1),
            "interval": np.arange(first, first + n),
            "instructions": piece.instructions.astype(np.uint64),
            "cpi": cpi,
            "cpi_kind": Strings.of(kinds),
        }
        for name in RATES:
            rates = measures.rates.get(name) if measures else None
            columns[name] = nothing if rates is None else rates[here]
        for name, column in self.schema.items():
            values = columns[name]
            if not isinstance(values, Strings):
                columns[name] = values.astype(column.numpy())
        columns = {name: columns[name] for name in self.schema}
        return Records(offsets, columns, np.arange(first, first + n))

    def _too_few(
        self, item: Item, share: float, counted: Counter[str], joined: Joined
    ) -> TokmillError:
        why = max(REASONS.values(), key=lambda why: counted[f"instructions not joined: {why}"])
        missing = f" (not in the store: {', '.join(joined.missing[:5])})" if joined.missing else ""
        return TokmillError(
            f"{human_share(share)} of the instructions are in blocks of the store: {why}{missing}",
            where=item.path,
            hint="build the store of blocks of the programs that ran, the libraries and the "
            "dynamic loader included; or lower --min-joined",
        )


def in_store(
    piece: BlockVectors, rows: Array, places: Array, joined: Joined, counted: Counter[str]
) -> tuple[Array, Array, Array]:
    """Return row, record and count of entries that are in a store of blocks; count all others.

    `rows` and `places`: the interval of each entry, and its row of the pc file, or -1.
    """
    how = np.where(places < 0, NO_ADDRESS, joined.how[places])
    reasons = {value: f"not joined: {why}" for value, why in REASONS.items()}
    for value, name in {BEGINS: "joined", INSIDE: "joined", **reasons}.items():
        chosen = how == value
        counted[f"entries {name}"] += int(chosen.sum())
        counted[f"instructions {name}"] += int(piece.counts[chosen].sum())
    inside, shared = how == INSIDE, (how <= INSIDE) & joined.shared[places]
    counted["instructions in the middle of a block"] += int(piece.counts[inside].sum())
    counted["instructions in blocks of several functions"] += int(piece.counts[shared].sum())
    kept = (how <= INSIDE) & (piece.counts > 0)
    chains, chosen = joined.chains, places[kept]
    begins = chains.offsets[chosen]
    lengths = chains.offsets[chosen + 1] - begins
    parts = ranges(begins, lengths)
    ends = np.append(0, np.cumsum(lengths))
    further = int(piece.counts[kept][lengths > 1].sum())
    counted["instructions divided among blocks that follow each other"] += further
    counts = spread(piece.counts[kept], ends, chains.weights[parts])
    return np.repeat(rows[kept], lengths), chains.records[parts], counts


def _of_trace(joined: Joined | None) -> dict[str, int]:
    """Return notes on where the programs of a trace lie; its first batch has them."""
    if joined is None:
        return {"traces whose blocks are called by their own ids": 1}
    notes = {"traces": 1}
    if joined.placed:
        notes["programs and libraries that ran"] = len(joined.placed)
    for path in joined.missing:
        notes[f"traces that ran {Path(path).name}, which the store of blocks does not have"] = 1
    return notes


def merged(rows: Array, records: Array, counts: Array, length: int) -> tuple[Array, Array, Array]:
    """Return (offsets, record, count) of rows with each record once, ascending."""
    order = np.lexsort((records, rows))
    rows, records, counts = rows[order], records[order], counts[order]
    new = np.ones(len(rows), bool)
    new[1:] = (rows[1:] != rows[:-1]) | (records[1:] != records[:-1])
    begins = np.flatnonzero(new)
    sums = row_sums(counts, np.append(begins, len(rows)))
    offsets = np.searchsorted(rows[begins], np.arange(length + 1)).astype(np.int64)
    return offsets, records[begins], sums.astype(np.uint64)
