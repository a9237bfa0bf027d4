"""The control flow of one program as columns: lifters make it, and all later steps read it."""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import find, numbered, owners


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


PLACES = 8
"""Numbers of `Graph.reference_place` for each instruction."""
IMMEDIATE, TEXT, DIRECT = 1, 2, 4
"""Parts of these numbers: the address is an immediate; a string lies there; it is the place of the
memory operand, to which no register is added."""


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
    """(F + 1,) i8: blocks of function i are [i] to [i + 1]: from its address on, then those at
    lower addresses, where compilers put rare code; both ascending."""
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
    reference: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(N,) u8, in order of instructions: the addresses that immediates and displacements name, but
    not targets of calls and jumps."""
    reference_place: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(N,) i8: `PLACES` · row of the instruction, ascending, + `IMMEDIATE`, `TEXT` and `DIRECT`.
    The text is the next of `string`."""
    slot: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(L,) i8, in order of instructions: the place on the stack of an operand, in bytes from where
    the stack pointer is at the function's entry. Arguments and the return address are at 0 and
    above."""
    slot_place: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(L,) i8, ascending, rows of instructions."""
    slot_size: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(L,) i8, bytes to the next place that the function uses, where the address is taken or
    indexed; 0 for an operand that is read or written there."""
    table_address: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(J,) u8, ascending: jump tables."""
    table_size: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """(J,) i8, their bytes."""
    table_entries: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    """(J + 1,) i8 into `table_target`."""
    table_target: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """u8, the address in each entry, in order."""
    import_slot: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """u8, ascending: words that hold the address of what another program defines."""
    import_slot_name: list[str] = field(default_factory=list)
    symbol_address: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(Y,) u8, ascending: all names of functions and of data; one address may have several."""
    symbol_size: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(Y,) u8; 0 where it is not known."""
    symbol_name: list[str] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)
    """Names that other programs can use, sorted."""
    data: list[Array] = field(default_factory=list)
    """(D), u1 each, by address: what is loaded beside the code, with known relocations applied."""
    data_address: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(D,) u8."""
    data_name: list[str] = field(default_factory=list)
    """(D), of the section; "" if there is none."""
    data_constant: Array = field(default_factory=lambda: np.zeros(0, bool))
    """(D,) bool: cannot be written, or only while the program is loaded."""
    pointer_address: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(P,) u8, ascending: words in data that hold an address of data, or that of a function."""
    pointer_target: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(P,) u8, the addresses that they hold."""
    pointer_text: list[str] = field(default_factory=list)
    """(P), the strings that lie at these addresses; "" if there is none."""

    def __post_init__(self) -> None:
        for name in ("block_strings", "block_constants"):
            if not len(getattr(self, name)):
                setattr(self, name, np.zeros(len(self.block_address) + 1, np.int64))

    def names(self, functions: Iterable[int]) -> list[str]:
        """Return the names of some functions; one without a symbol is called `sub_401000`."""
        names, addresses = self.function_name, self.function_address
        return [names[one] or f"sub_{int(addresses[one]):x}" for one in functions]

    def check_entries(self) -> None:
        """Raise `ValueError` if the block at the address of a function is not its first."""
        function = owners(self.function_blocks)
        entry = self.block_address == self.function_address[function]
        late = entry & ~entry[self.function_blocks[function]]
        for at in self.block_address[late]:
            raise ValueError(f"function {at:#x} begins with another block")

    def portions(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of functions with up to so many instructions, or of one function."""
        ends = self.block_instructions[self.function_blocks[1:]]
        first = 0
        while True:
            done = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, done + most, side="right")), first + 1)
            last = min(last, len(ends))
            yield first, last
            if last == len(ends):
                return
            first = last


class BlockPlaces:
    """Finds the blocks of functions by their addresses: several functions may share an address."""

    def __init__(self, graph: Graph) -> None:
        self.function = owners(graph.function_blocks)
        """(B,) i8, the function of each block."""
        self.addresses, rank = numbered(graph.block_address)
        key = self._key(self.function, rank)
        order = np.argsort(key, kind="stable")
        self.keys, self.order = key[order], np.append(order, 0)

    def _key(self, function: Array, rank: Array) -> Array:
        return function * max(len(self.addresses), 1) + rank

    def find(self, function: Array, address: Array) -> tuple[Array, Array]:
        """Return the blocks of functions at some addresses, and which there are."""
        rank, there = find(self.addresses, address)
        place, there = find(self.keys, np.where(there, self._key(function, rank), -1))
        return self.order[place], there
