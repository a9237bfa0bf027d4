"""The control flow of one program as columns: lifters make it, and all later steps read it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from tokmill.store.schema import Array


class Edge(enum.IntEnum):
    """How control gets to the target.

    A call ends a block: it has an edge `CALL` to the callee and, if the call returns, an edge
    `FALL` to the next block. A call or jump through the slot of an import leads to the slot.
    `INDIRECT` leads to a target of a jump table (one edge for each target), or to 0 from an
    indirect jump or call whose target is unknown.
    """

    FALL = 0
    JUMP = 1
    BRANCH = 2
    CALL = 3
    INDIRECT = 4
    RETURN = 5


@dataclass(slots=True)
class Graph:
    """Functions, blocks, instructions and edges of one program, as columns.

    F functions, B blocks, I instructions, E edges, M imports. A block that several functions share
    is listed in each of them.
    """

    program: str
    """Name of the program, as it was given."""
    bits: int
    """64 or 32."""
    function_address: Array
    """(F,) u8, ascending."""
    function_name: list[str]
    """(F), raw symbol name; "" if there is none (writers show `sub_401000`)."""
    function_blocks: Array
    """(F + 1,) i8: blocks of function i are [i] to [i + 1], sorted by address."""
    block_address: Array
    """(B,) u8."""
    block_bytes: Array
    """(B + 1,) i8 into `code`."""
    code: Array
    """u1, the raw bytes of all blocks end to end."""
    block_instructions: Array
    """(B + 1,) i8 into `lengths`."""
    lengths: Array
    """(I,) u1, bytes of each instruction."""
    block_edges: Array
    """(B + 1,) i8 into the edge columns."""
    edge_target: Array
    """(E,) u8, address of the successor; 0 for a return or an unresolved indirect jump."""
    edge_kind: Array
    """(E,) u1, an `Edge`."""
    unresolved: list[tuple[int, str]]
    """Address and reason of what could not be followed."""
    compiler: str = ""
    """Compiler of the program, such as gcc-12.2.0; "" if it is not known."""
    cut_short: tuple[str, ...] = ()
    """Searches that ended before they were complete, with the reason; empty for most programs."""
    level: str = ""
    """Optimisation level, such as O2; "" if it is not known."""
    facts: bool = False
    """Whether imports, strings, constants, references and pointers were looked for; if not, their
    columns are empty."""
    import_address: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(M,) u8, ascending: the addresses to which calls and jumps of imports lead. Such an address
    is a stub, the slot that a call through memory reads, the invented address of an undefined
    symbol of an object file, or a function of the graph that only jumps through a slot."""
    import_name: list[str] = field(default_factory=list)
    """(M), raw symbol name; in PE files `library!name`, for an ordinal `library!#7`. A shared
    library calls its own functions through stubs too."""
    block_strings: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(B + 1,) i8 into `string`."""
    string: Array = field(default_factory=lambda: np.zeros(0, np.uint32))
    """(R,) u4, numbers of `strings` that instructions refer to, in order of instructions."""
    strings: list[str] = field(default_factory=list)
    """The different strings, in the order in which blocks refer to them (see `image.strings`)."""
    block_constants: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(B + 1,) i8 into `constant`."""
    constant: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(K,) i8, in order of instructions: immediates and displacements, except addresses of the
    program, targets of branches, offsets in the stack, and displacements of 0."""
    block_references: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(B + 1,) i8 into `reference`."""
    reference: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(N,) u8, in order of instructions: addresses of data, except of strings, and of functions
    whose address is taken."""
    pointer_address: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(P,) u8, ascending: words in data that hold an address of data, or that of a function."""
    pointer_target: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(P,) u8, the addresses that they hold."""
    pointer_text: list[str] = field(default_factory=list)
    """(P), the strings that lie at these addresses; "" if there is none."""

    def __post_init__(self) -> None:
        for name in ("block_strings", "block_constants", "block_references"):
            if not len(getattr(self, name)):
                setattr(self, name, np.zeros(len(self.block_address) + 1, np.int64))
