"""The matches of functions and blocks of two programs, as columns.

Numbers are rows of the columns of the two graphs (`tokmill.x86.graph`): A is the old program, B the
new one.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from tokmill.store.schema import Array


class Reason(enum.IntEnum):
    """The strongest evidence for a match."""

    CODE = 0
    """The same instructions, numbers and calls, which no other function or block has."""
    NAME = 1
    """The same symbol name."""
    STRINGS = 2
    CONSTANTS = 3
    IMPORTS = 4
    CALLS = 5
    """The functions that they call, and that call them, are matched or similar."""
    LAYOUT = 6
    """The functions before and after them are matched or similar."""
    INSTRUCTIONS = 7
    STRUCTURE = 8
    """Counts of blocks, edges, loops and calls."""
    FLOW = 9
    """Blocks only: control comes from, or continues at, blocks that are matched."""
    TABLES = 10
    """Places in tables of pointers, and the strings beside them."""


class References(NamedTuple):
    """K operands of matched blocks with the same instructions that refer to something else."""

    match: Array
    """(K,) i8, ascending: the match of their functions."""
    block: Array
    """(K,) i8: the pair of blocks."""
    a: Array
    """(K,) u8: address of the instruction in A."""
    b: Array
    old: list[str]
    """What it refers to in A, in words."""
    new: list[str]


class DataChange(msgspec.Struct, frozen=True):
    """Data that is not the same in both programs."""

    name: str
    """"" if there is none."""
    a: int
    """Address."""
    b: int
    size_a: int
    """Bytes; of data without a name as many as are read at once, or lie before what is next."""
    size_b: int
    first: int
    """Where the first difference is, in bytes from its beginning."""
    old: str
    """Some bytes from there on, hexadecimal."""
    new: str


class ProgramChanges(msgspec.Struct, frozen=True):
    """What changed outside of functions."""

    data: list[DataChange] = []
    """Data in the file that has a name, and constants that matched functions use."""
    imports_deleted: list[str] = []
    imports_inserted: list[str] = []
    exports_deleted: list[str] = []
    exports_inserted: list[str] = []

    @property
    def any(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)


def _no_references() -> References:
    none = np.zeros(0, np.int64)
    return References(none, none, none.astype(np.uint64), none.astype(np.uint64), [], [])


@dataclass(slots=True)
class Diff:
    """The matches of two programs.

    M matched functions (ascending in A; each function is in one match at most), N pairs of matched
    blocks in them.
    """

    function_a: Array
    """(M,) i8, functions of A."""
    function_b: Array
    """(M,) i8, their partners in B."""
    similarity: Array
    """(M,) f4 from 0 to 1: share of the instructions that are equal or similar. 1 only if nothing
    changed: the same instructions, numbers and control flow in the same order, and operands that
    refer to the same."""
    confidence: Array
    """(M,) f4 from 0 to 1: how sure the match is."""
    reason: Array
    """(M,) u1, a `Reason`."""
    match_blocks: Array
    """(M + 1,) i8: the pairs of blocks of match i are [i] to [i + 1] of the three columns below."""
    block_a: Array
    """(N,) i8, blocks of A, ascending within a match."""
    block_b: Array
    """(N,) i8, their partners in B."""
    block_similarity: Array
    """(N,) f4 from 0 to 1; 1: the same instructions and numbers, which refer to the same."""
    block_reason: Array
    """(N,) u1, a `Reason`."""
    deleted: Array
    """i8, ascending: functions of A without a partner."""
    inserted: Array
    """i8, ascending: functions of B without a partner."""
    deleted_blocks: Array
    """i8, ascending: blocks of matched functions of A without a partner."""
    inserted_blocks: Array
    """i8, ascending: blocks of matched functions of B without a partner."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Kind of what was not compared, in words that begin with a plural → number."""
    references_only: Array = field(default_factory=lambda: np.zeros(0, bool))
    """(M,) bool: the instructions of both are the same, but not all that they refer to."""
    references: References = field(default_factory=_no_references)
    """What matched functions refer to in one program, and in the other."""
    other: ProgramChanges = field(default_factory=ProgramChanges)

    def __post_init__(self) -> None:
        if len(self.references_only) != len(self.function_a):
            self.references_only = np.zeros(len(self.function_a), bool)

    @property
    def changed(self) -> Array:
        """(M,) bool: which matches are not identical, `references_only` too."""
        return self.similarity < 1

    @property
    def same(self) -> bool:
        """Whether no function was deleted, inserted or changed; see also `other`."""
        return not (len(self.deleted) or len(self.inserted) or bool(self.changed.any()))


def unmatched(count: int, matched: Array) -> Array:
    """Return the numbers below `count` that are not among `matched`: i8, ascending."""
    free = np.ones(count, bool)
    free[matched] = False
    return np.flatnonzero(free).astype(np.int64)
