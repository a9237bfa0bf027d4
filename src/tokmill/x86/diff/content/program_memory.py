"""The data of a program, as a diff looks at it: what lies where, its names and its bytes."""

import bisect

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import distinct, member

LONGEST = 4096
"""Bytes of a string that are compared."""


class Memory:
    """The data of a program: where it ends, its names and its bytes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.word = graph.bits // 8
        self.begin = graph.data_address
        self._begins: list[int] = graph.data_address.tolist()
        sizes = np.asarray([len(one) for one in graph.data], np.uint64)
        self.end = self.begin + sizes
        self.linker = np.asarray(
            [name.startswith((".got", ".plt")) for name in graph.data_name], bool
        )
        symbol = np.flatnonzero(~member(graph.symbol_address, graph.function_address))
        # Of several names at one address those without a size are labels of a linker.
        order = (graph.symbol_size[symbol] == 0, graph.symbol_address[symbol])
        self.symbol = symbol[np.lexsort(order)]
        self.starts = graph.symbol_address[self.symbol]
        self.code = distinct(graph.block_address)
        tables = graph.table_address + graph.table_size.astype(np.uint64)
        self.bounds = distinct(
            self.begin, self.end, self.starts, graph.table_address, tables, graph.pointer_target
        )
        """u8, ascending: where something else may begin."""

    def section(self, address: Array) -> Array:
        """Return the numbers of the sections that hold some addresses; -1: none."""
        if not len(self.begin):
            return np.full(len(address), -1, np.int64)
        at = np.searchsorted(self.begin, address, side="right") - 1
        return np.where((at >= 0) & (address < self.end[at]), at, -1)

    def linked_at(self, address: Array) -> Array:
        """Return which addresses lie in what a linker fills in an order of its own: bool."""
        at = self.section(address)
        return (at >= 0) & self.linker[at] if len(self.linker) else np.zeros(len(at), bool)

    def describes_at(self, address: Array) -> Array:
        """Return which addresses lie in unwind tables or the table of the loader: bool."""
        tables = [name.startswith((".eh_frame", ".dynamic")) for name in self.graph.data_name]
        return np.asarray([*tables, False])[self.section(address)]

    def holds(self, address: Array) -> Array:
        """Return which addresses are data, also of what is not in the file: bool.

        That lies behind a section of data, before the code that comes next.
        """
        if not len(self.begin):
            return np.zeros(len(address), bool)
        at = np.searchsorted(self.begin, address, side="right") - 1
        place = np.searchsorted(self.code, address, side="right") - 1
        nearest = self.code[place] if len(self.code) else np.zeros(len(address), np.uint64)
        code = (place >= 0) & (nearest > self.begin[at])
        inside: Array = (at >= 0) & ~(code & (address >= self.end[at]))
        return inside & ~self.linked_at(address)

    def values(self, address: Array, width: Array) -> tuple[Array, Array]:
        """Return the numbers (u8) of 1 to 8 bytes at addresses, and which are in the file."""
        numbers, there = np.zeros(len(address), np.uint64), np.zeros(len(address), bool)
        section = self.section(address)
        for number in distinct(section[section >= 0]).tolist():
            content = self.graph.data[number]
            rows = np.flatnonzero(section == number)
            place = (address[rows] - self.begin[number]).astype(np.int64)
            there[rows] = place + width[rows] <= len(content)
            cells = content[np.minimum(place[:, None] + np.arange(8), len(content) - 1)]
            cells[np.arange(8) >= width[rows][:, None]] = 0
            numbers[rows] = cells.view("<u8")[:, 0]
        return numbers, there

    def names(self, address: Array) -> tuple[Array, Array]:
        """Return the symbol (i8, -1: none) that each address is in, and how far (i8)."""
        if not len(self.starts):
            return np.full(len(address), -1, np.int64), np.zeros(len(address), np.int64)
        first = np.searchsorted(self.starts, address, side="right") - 1
        first = np.searchsorted(self.starts, self.starts[np.maximum(first, 0)])
        symbol = self.symbol[first]
        inside = (address - self.starts[first]).astype(np.int64)
        size = self.graph.symbol_size[symbol].astype(np.int64)
        there = (address >= self.starts[first]) & (inside < np.maximum(size, 1))
        return np.where(there, symbol, -1), inside

    def extent(self, address: Array) -> tuple[Array, Array]:
        """Return how many bytes lie at addresses before something else may begin: (n,) i8.

        And for which a symbol says it: bool.
        """
        at = np.searchsorted(self.bounds, address, side="right")
        bound = np.append(self.bounds, np.uint64((1 << 64) - 1))[at]
        symbol, inside = self.names(address)
        size = self.graph.symbol_size[symbol].astype(np.int64) if len(self.starts) else inside
        exact = (symbol >= 0) & (size > inside)
        return np.where(exact, size - inside, (bound - address).astype(np.int64)), exact

    def read(self, address: int, size: int) -> Array:
        """Return up to so many bytes at an address; none where none are in the file."""
        number = bisect.bisect_right(self._begins, address) - 1
        if number < 0:
            return np.zeros(0, np.uint8)
        place = address - self._begins[number]
        return self.graph.data[number][place : place + size]

    def strings(self, addresses: Array) -> list[bytes] | None:
        """Return the strings of ASCII at addresses; None where a string begins not at all of them.

        One begins behind a zero.
        """
        section = self.section(addresses)
        number = int(section[0])
        if number < 0 or not (section == number).all() or not self.graph.data_constant[number]:
            return None
        data = self.graph.data[number]
        place = (addresses - self.begin[number]).astype(np.int64)
        if (place < 1).any() or data[place - 1].any():
            return None
        if ((data[place] < 0x20) | (data[place] >= 0x7F)).any():
            return None
        return [data[at : at + LONGEST].tobytes().partition(b"\0")[0] for at in place.tolist()]
