"""The control flow of one program, as columns: what a lifter makes and all that follows reads."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from tokmill.store.schema import Array


class Edge(enum.IntEnum):
    """Why control may go on at the target.

    A block ends at a call: it has an edge `CALL` to the callee and, where the call returns, an edge
    `FALL` to the block behind it. A call or jump through the slot of an import leads to the slot.
    `INDIRECT` is a target of a jump table (one edge each), or an
    indirect jump or call whose target is unknown (one edge to 0).
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
    stands under each of them.
    """

    program: str
    """Name of the program, as it was given."""
    bits: int
    """64 or 32."""
    function_address: Array
    """(F,) u8, ascending."""
    function_name: list[str]
    """(F), raw symbol name; "" where there is none (writers show `sub_401000`)."""
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
    """(E,) u8, address; 0 where a return or an unresolved indirect jump goes."""
    edge_kind: Array
    """(E,) u1, an `Edge`."""
    unresolved: list[tuple[int, str]]
    """Address and reason of what could not be followed."""
    compiler: str = ""
    """What made the program, such as gcc-12.2.0; "" where that is not known."""
    cut_short: tuple[str, ...] = ()
    """What was not looked for to the end, and why; nothing for almost all programs."""
    level: str = ""
    """At which level of optimisation, such as O2; "" where that is not known."""
    facts: bool = False
    """Whether imports, strings and constants were looked for; without, their columns are empty."""
    import_address: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(M,) u8, ascending: where calls and jumps of imports lead. That is a stub, the slot that a
    call through memory reads, the made-up place of an undefined symbol of an object file, or a
    function of the graph that does nothing but jump through a slot."""
    import_name: list[str] = field(default_factory=list)
    """(M), raw symbol name; of PE files `library!name`, of an ordinal `library!#7`. A shared
    library calls its own functions through stubs, too."""
    block_strings: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(B + 1,) i8 into `string`."""
    string: Array = field(default_factory=lambda: np.zeros(0, np.uint32))
    """(R,) u4, numbers of `strings` that instructions refer to, in order of instructions."""
    strings: list[str] = field(default_factory=list)
    """Different ones, in the order in which blocks refer to them (see `image.strings`)."""
    block_constants: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(B + 1,) i8 into `constant`."""
    constant: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(K,) i8, in order of instructions: immediates and displacements that are no addresses of the
    program, no targets of branches and no offsets in the stack; displacements of 0 left out."""

    def __post_init__(self) -> None:
        for name in ("block_strings", "block_constants"):
            if not len(getattr(self, name)):
                setattr(self, name, np.zeros(len(self.block_address) + 1, np.int64))
