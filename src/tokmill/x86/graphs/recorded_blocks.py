"""Graphs from blocks that another tool recorded: addresses, bytes and successors."""

from array import array
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import Program, Section, expand, member, offsets
from tokmill.x86.lift.blocks import EDGE, LEADS
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.decode import DIRECT, Flow, Instructions

LEAVES = np.isin(np.arange(len(Flow)), (Flow.JUMP, Flow.JUMP_INDIRECT, Flow.RETURN))
"""Flow → whether control never continues at the next instruction."""


class Recorded:
    """Recorded functions, collected in any order; `graph` makes columns of them.

    Edges are read from the instructions. A recorded successor that the last instruction does not
    name is the next block (`FALL`) or a target of a jump table (`INDIRECT`). Blocks are cut after
    calls, and after all other instructions that end a block of a graph.
    """

    def __init__(self, bits: Literal[32, 64] = 64) -> None:
        self.bits = bits
        self.names: list[str] = []
        self._functions, self._blocks = array("Q"), array("q", [0])
        self._address, self._size = array("Q"), array("q")
        self._target, self._ways = array("Q"), array("q", [0])
        self._code = bytearray()
        self._without: list[int] = []

    def __len__(self) -> int:
        return len(self.names)

    def add(
        self, name: str, address: int, blocks: Sequence[tuple[int, bytes, Sequence[int]]]
    ) -> None:
        """Add a function; blocks are (address, bytes, addresses of successors), in any order."""
        self.names.append(name)
        self._functions.append(address)
        for start, code, targets in sorted(blocks, key=lambda one: (one[0] < address, one[0])):
            if not code:
                self._without.append(start)
                continue
            self._address.append(start)
            self._size.append(len(code))
            self._code += code
            self._target.extend(sorted(targets))
            self._ways.append(len(self._target))
        self._blocks.append(len(self._address))

    def graph(self, program: str) -> Graph:
        """Return the graph, its functions sorted by address; those without code are left out."""
        functions = _column(self._functions, np.uint64)
        order = np.argsort(functions, kind="stable")
        begins = _column(self._blocks, np.int64)
        counts = np.diff(begins)[order]
        block = expand(begins[:-1][order], counts)
        size = _column(self._size, np.int64)
        place = offsets(size)
        code = b"".join(
            memoryview(self._code)[place[begins[i]] : place[begins[i + 1]]] for i in order
        )
        ways = _column(self._ways, np.int64)
        ways_of = np.diff(ways)[block]
        cut = _Cut(
            self.bits,
            _column(self._address, np.uint64)[block],
            size[block],
            np.frombuffer(code, np.uint8),
            np.repeat(np.arange(len(counts)), counts),
        )
        cut.add_edges(
            np.repeat(np.arange(len(block)), ways_of),
            _column(self._target, np.uint64)[expand(ways[:-1][block], ways_of)],
        )
        blocks = np.bincount(cut.function, minlength=len(order))
        kept = np.flatnonzero(blocks)
        return Graph(
            program=program,
            bits=self.bits,
            function_address=functions[order][kept],
            function_name=[self.names[i] for i in order[kept]],
            function_blocks=offsets(blocks[kept]),
            block_address=cut.address,
            block_bytes=cut.bytes,
            code=cut.code,
            block_instructions=offsets(cut.count),
            lengths=cut.lengths,
            block_edges=offsets(np.bincount(cut.edge_block, minlength=len(cut.address))),
            edge_target=cut.edge_target,
            edge_kind=cut.edge_kind,
            unresolved=sorted([*cut.unresolved(), *((at, "no bytes") for at in self._without)]),
        )


class _Cut:
    """Recorded blocks, decoded and cut; R recorded blocks, B blocks, E edges."""

    def __init__(
        self, bits: Literal[32, 64], address: Array, size: Array, code: Array, function: Array
    ) -> None:
        place = offsets(size)
        instructions = _decode(bits, address, size, code, function)
        flow, start = instructions.flow, instructions.start.astype(np.int64)
        end = start + instructions.length
        self.broken = _at(address, place, start[flow == Flow.INVALID])
        keep = flow != Flow.INVALID
        flow, start, end, rows = flow[keep], start[keep], end[keep], np.flatnonzero(keep)
        begins = member(start, place[:-1])
        begins[:1] = True
        begins[1:] |= (flow[:-1] != Flow.NEXT) | (end[:-1] != start[1:])
        first = np.flatnonzero(begins)
        self.count = np.diff(np.append(first, len(rows)))
        """(B,) i8, instructions."""
        self.lengths = instructions.length[rows]
        last = first + self.count - 1
        self.flow = flow[last]
        self.recorded = np.searchsorted(place, start[first], side="right") - 1
        """(B,) i8, the recorded block that each block is a part of."""
        self.function = function[self.recorded]
        self.address = _at(address, place, start[first])
        self.behind = self.address + (end[last] - start[first]).astype(np.uint64)
        """(B,) u8, the address at which the block ends."""
        self.jump = _at(address, place, start[last])
        """(B,) u8, address of the last instruction."""
        transfer = np.searchsorted(instructions.transfer, rows[last])
        named = np.append(instructions.target, np.uint64(0))[transfer]
        self.named = np.where(DIRECT[self.flow], named, np.uint64(0))
        self.ends = end[last] == place[self.recorded + 1]
        """(B,) bool: the last part of its recorded block."""
        self.bytes = offsets(end[last] - start[first])
        self.code = code
        if not keep.all():
            self.code = code[expand(start[first], end[last] - start[first])]

    def add_edges(self, source: Array, target: Array) -> None:
        """Set the edges; successors are pairs of a recorded block, ascending, and an address."""
        part = np.flatnonzero(self.ends)
        # The last part of each recorded block, or -1 if it does not end with an instruction.
        last = np.full(int(self.recorded[-1]) + 2 if len(part) else 1, -1, np.int64)
        last[self.recorded[part]] = part
        block = last[np.minimum(source, len(last) - 1)]
        block, target = block[block >= 0], target[block >= 0]
        falls = (target == self.behind[block]) & ~LEAVES[self.flow[block]]
        more = ~falls & (target != self.named[block])
        through = np.unique(block[more & (self.flow[block] == Flow.JUMP_INDIRECT)])
        self.lost = np.setdiff1d(np.flatnonzero(self.flow == Flow.JUMP_INDIRECT), through)
        plain = LEADS[self.flow]
        plain[through] = False
        plain_block = np.flatnonzero(plain)
        # Within a recorded block control continues at the next part.
        inner = np.zeros(len(self.flow), bool)
        inner[:-1] = (self.recorded[:-1] == self.recorded[1:]) & (
            self.behind[:-1] == self.address[1:]
        )
        fall_block = np.union1d(np.flatnonzero(inner), block[falls])
        blocks = np.concatenate([plain_block, block[more], fall_block])
        targets = np.concatenate([self.named[plain_block], target[more], self.behind[fall_block]])
        kinds = np.concatenate(
            [
                EDGE[self.flow[plain_block]],
                np.full(int(more.sum()), Edge.INDIRECT, np.uint8),
                np.full(len(fall_block), Edge.FALL, np.uint8),
            ]
        )
        order = np.argsort(blocks, kind="stable")
        self.edge_block, self.edge_target = blocks[order], targets[order]
        self.edge_kind = kinds[order]

    def unresolved(self) -> list[tuple[int, str]]:
        calls = self.jump[self.flow == Flow.CALL_INDIRECT]
        groups = [(self.jump[self.lost], "indirect jump"), (calls, "indirect call")]
        groups.append((self.broken, "no instruction"))
        return [(address, why) for addresses, why in groups for address in addresses.tolist()]


def _decode(
    bits: Literal[32, 64], address: Array, size: Array, code: Array, function: Array
) -> Instructions:
    """Return the instructions of blocks that are stored end to end in `code`.

    Blocks that are also adjacent in memory are decoded in one call, unless an instruction crosses
    the border between two of them.
    """
    place = offsets(size)
    apart = np.ones(len(address), bool)
    apart[1:] = (address[1:] != (address + size.astype(np.uint64))[:-1]) | (
        function[1:] != function[:-1]
    )
    for begins in (np.flatnonzero(apart), np.arange(len(address))):
        edges = np.append(place[begins], place[-1])
        sections = [
            Section("", start, code[low:high], code[low:high], execute=True)
            for start, low, high in zip(
                address[begins].tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True
            )
        ]
        program = Program("", "ELF", "shared", bits, bits // 8, sections)
        instructions = Instructions(Code(program))
        if sections:
            instructions.sweep()
        if (instructions.row(place[:-1]) >= 0).all():
            break
    return instructions


def _at(address: Array, place: Array, offset: Array) -> Array:
    """Return the addresses (u8) of offsets into blocks that are stored end to end."""
    block = np.searchsorted(place, offset, side="right") - 1
    return address[block] + (offset - place[block]).astype(np.uint64)


def _column(values: "array[int]", dtype: type[np.generic]) -> Array:
    return np.frombuffer(values, dtype) if len(values) else np.zeros(0, dtype)
