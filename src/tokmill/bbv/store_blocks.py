"""The blocks of a store that `tokmill build x86 --unit block` made, found by their addresses."""

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors
from tokmill.base.headers import loads_json, refused
from tokmill.store.references import reference_to
from tokmill.store.schema import PHRASE_BIT, Array, has_phrases
from tokmill.store.shards.shard import Shard
from tokmill.store.store import Store

LONGEST_INSTRUCTION = 15
"""Bytes of an x86 instruction at most."""

FLOW = re.compile(r"J[A-Z]+|CALL|RETF?|LOOP[A-Z]*|SYSCALL|SYSENTER|SYSRETQ?|SYSEXITQ?|INT[013]?|"
                  r"IRET[DQ]?|UD[012]|HLT|XBEGIN|XABORT")  # fmt: skip
"""Mnemonics (upper case) after which code does not simply go on, as far as a producer of basic
blocks is concerned."""


class Program(NamedTuple):
    """The blocks of a program, in the order of their addresses."""

    name: str
    starts: Array
    """Addresses in the program's file (int64), each once."""
    records: Array
    """The first record that begins at each (int64)."""
    instructions: Array
    """Instructions of that record (int64)."""
    shared: Array
    """Whether further records begin there: blocks of several functions."""
    falls: Array
    """Whether no jump or call ends the block, and the next row follows it (bool)."""

    def find(self, at: Array) -> tuple[Array, Array]:
        """Return the row of the block that holds each address, -1 for none, and whether it begins
        there.

        The store does not say how many bytes a block has. An address is taken to lie in the last
        block that begins before it if it is not further than the longest instructions reach.
        """
        rows = np.searchsorted(self.starts, at, side="right") - 1
        inside = rows >= 0
        ahead = at - self.starts[rows.clip(min=0)]
        inside &= ahead < LONGEST_INSTRUCTION * self.instructions[rows.clip(min=0)]
        return np.where(inside, rows, -1), inside & (ahead == 0)


class Blocks(NamedTuple):
    """The programs of a store of blocks."""

    store: Store
    programs: list[Program]


@lru_cache(maxsize=2)
def read_blocks(path: str, fingerprint: str) -> Blocks:
    """Return the blocks of a store; cached by the fingerprint, which it must have."""
    store = Store(path)
    if store.fingerprint != fingerprint:
        raise TokmillError(
            "the store of blocks has changed", where=path, hint="run the same command again"
        )
    schema = store.schema
    kinds = [(schema[name].dtype if name in schema else "") for name in ("address", "program")]
    if kinds != ["u8", "utf8"] or not has_phrases(schema):
        raise _no_blocks(path, "it has no instructions with an address and a program")
    names: dict[str, int] = {}
    numbers: list[Array] = []
    parts: list[Array] = []
    lengths: list[Array] = []
    falls: list[Array] = []
    flow = _flow(store)
    for number, entry in enumerate(store.shards):
        shard = store.shard(number)
        ends = shard["phrase_offsets"].astype(np.int64)
        ids = shard["phrase"]
        begun = int(np.count_nonzero(ids & PHRASE_BIT))
        if begun > entry.records:
            raise _no_blocks(path, f"{entry.records:,} records hold {begun:,} blocks")
        text = shard.text("program", 0, entry.records)
        rows, place = text.distinct()
        codes = [names.setdefault(row.decode("utf-8", "replace"), len(names)) for row in rows]
        numbers.append(np.asarray(codes, np.int64)[place])
        lengths.append(np.diff(ends))
        falls.append(_falls(shard, ends, ids, flow))
        later = shard["part"] > 0 if "part" in schema else np.zeros(entry.records, bool)
        parts.append(later)
    if not store.records:
        raise _no_blocks(path, "it is empty")
    program, length = np.concatenate(numbers), np.concatenate(lengths)
    later, fall = np.concatenate(parts), np.concatenate(falls)
    address = store.column("address")
    programs = []
    for name, number in names.items():
        own = np.flatnonzero((program == number) & ~later & (address < 1 << 62))
        starts, first, count = np.unique(address[own], return_index=True, return_counts=True)
        records = own[first]
        length_here = length[records]
        # The bytes of a block are not known; the next one is near enough to follow it.
        near = np.diff(starts.astype(np.int64), append=1 << 62) <= LONGEST_INSTRUCTION * length_here
        falling = fall[records] & near
        programs.append(
            Program(name, starts.astype(np.int64), records, length_here, count > 1, falling)
        )
    return Blocks(store, [program for program in programs if len(program.starts)])


def ends_flow(tokens: list[str]) -> Array:
    return np.array([FLOW.fullmatch(token) is not None for token in tokens], bool)


def _flow(store: Store) -> Array | None:
    """Return which ids of the column `mne` end a block; None where the store does not say."""
    if "mne" not in store.vocabularies or "mne" not in store.schema:
        return None
    path = store.vocabulary_file("mne")
    with machine_errors("read", path):
        raw = path.read_bytes()
    with refused(
        "the vocabulary cannot be read", path, hint="the same `tokmill build` makes it again"
    ):
        tokens = msgspec.convert(loads_json(raw), Mnemonics).tokens
    return ends_flow(tokens)


def _falls(shard: Shard, ends: Array, ids: Array, flow: Array | None) -> Array:
    """Return whether no jump or call is the last instruction of each record of a shard (bool)."""
    falls = np.zeros(len(ends) - 1, bool)
    filled = np.flatnonzero(np.diff(ends))
    if flow is None or not len(filled):
        return falls
    rows = (ids[ends[1:][filled] - 1] & ~PHRASE_BIT).astype(np.int64)
    mnemonics = shard["table.mne"][shard["table_offsets"][rows].astype(np.int64)]
    falls[filled] = ~flow[mnemonics.clip(max=len(flow) - 1)]
    return falls


class Mnemonics(msgspec.Struct):
    """What is read of the vocabulary of a column of mnemonics."""

    tokens: list[str]


def open_blocks(path: str) -> Blocks:
    reference = reference_to(path)
    return read_blocks(str(Path(path).resolve()), reference.fingerprint)


def _no_blocks(path: str, why: str) -> TokmillError:
    return TokmillError(
        f"this is not a store of basic blocks: {why}",
        where=path,
        hint="tokmill build x86 PROGRAM LIBRARY… --unit block -o STORE makes one",
    )
