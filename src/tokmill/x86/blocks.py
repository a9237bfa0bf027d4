"""What was reached, cut into blocks with their edges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.decode import DIRECT, FALLS, Flow
from tokmill.x86.graph import Edge
from tokmill.x86.ranges import distinct, expand, member

if TYPE_CHECKING:
    from tokmill.x86.cfg import Lifter

EDGE = np.zeros(len(Flow), np.uint8)
"""Flow of a block's last instruction → the kind of its edge beside `FALL`."""
EDGE[[Flow.JUMP, Flow.BRANCH, Flow.CALL]] = Edge.JUMP, Edge.BRANCH, Edge.CALL
EDGE[[Flow.JUMP_INDIRECT, Flow.CALL_INDIRECT, Flow.RETURN]] = (
    Edge.INDIRECT, Edge.INDIRECT, Edge.RETURN
)  # fmt: skip
LEADS = np.isin(np.arange(len(Flow)), (Flow.NEXT, Flow.STOP, Flow.INVALID), invert=True)


class Blocks:
    """The blocks that were reached, sorted by offset, and their edges; B blocks, E edges."""

    def __init__(self, lifter: Lifter) -> None:
        self.lifter, self.ways = lifter, lifter.ways
        ways = self.ways
        instructions, self.code = lifter.instructions, lifter.code
        rows = ways.all_reached()
        self.broken = rows[instructions.flow[rows] == Flow.INVALID]
        """i8, rows of what was reached and is no instruction."""
        rows = rows[instructions.flow[rows] != Flow.INVALID]
        start = instructions.start[rows]
        end = start + instructions.length[rows]
        # Ways from code that was not reached cut nothing.
        targets = ways.target[ways.reached(ways.source)]
        leaders = np.concatenate(
            [lifter.starts, ways.called, lifter.roots, instructions.start[targets]]
        )
        begins = member(start, distinct(leaders)) | np.isin(start, self.code.edge)
        begins[:1] = True
        begins[1:] |= (instructions.flow[rows[:-1]] != Flow.NEXT) | (end[:-1] != start[1:])
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(rows))[: len(first)] - 1
        self.start, self.end = start[first].astype(np.int64), end[last].astype(np.int64)
        """(B,) i8, offsets."""
        self.first, self.count = first, last - first + 1
        """(B,) i8, first of `lengths`, and how many."""
        self.lengths = instructions.length[rows]
        """(I,) u1, of the instructions that were reached."""
        self.last_row = rows[last]
        """(B,) i8, the row of the last instruction."""
        self.flow = instructions.flow[self.last_row]
        self._set_edges()

    def _set_edges(self) -> None:
        instructions, flow = self.lifter.instructions, self.flow
        row = np.searchsorted(instructions.transfer, self.last_row)
        named = np.append(instructions.target, np.uint64(0))[row]
        jumps, table_targets = self.lifter.jump_tables()
        order = np.argsort(jumps, kind="stable")
        jumps, table_targets = jumps[order], table_targets[order]
        at = instructions.start[self.last_row].astype(np.int64)
        low, high = np.searchsorted(jumps, at), np.searchsorted(jumps, at, side="right")
        tables = np.where(flow == Flow.JUMP_INDIRECT, high - low, 0)
        plain = np.flatnonzero(LEADS[flow] & (tables == 0))
        through = np.repeat(np.arange(len(flow)), tables)
        falls = FALLS[flow] & ~member(self.last_row, self.ways.silent)
        falls &= ~np.isin(self.end, self.code.edge)
        fall = np.flatnonzero(falls)
        block = np.concatenate([plain, through, fall])
        target = np.concatenate(
            [
                np.where(DIRECT[flow[plain]], named[plain], np.uint64(0)),
                self.code.address(table_targets[expand(low, tables)]),
                self.code.address(self.end[fall]),
            ]
        )
        kinds = (EDGE[flow[plain]], np.full(len(through), Edge.INDIRECT), np.full(len(fall), 0))
        order = np.argsort(block, kind="stable")
        self.edge_block = block[order]
        """(E,) i8, ascending; the edge `FALL` of a block is its last one."""
        self.edge_target = target[order]
        """(E,) u8."""
        self.edge_kind = np.concatenate(kinds).astype(np.uint8)[order]
        """(E,) u1."""
        self.lost = np.flatnonzero((flow == Flow.JUMP_INDIRECT) & (tables == 0))
        """i8, blocks that end in an indirect jump to nowhere known."""
        self.named = named
        """(B,) u8, the address in the last instruction; where the pointer lies if indirect."""

    def at(self, offsets: Array) -> Array:
        """Return the blocks that begin at offsets, or -1."""
        if not len(self.start):
            return np.full(len(offsets), -1, np.int64)
        found = np.minimum(np.searchsorted(self.start, offsets), len(self.start) - 1)
        return np.where(self.start[found] == offsets, found, -1)

    def unresolved(self) -> list[tuple[int, str]]:
        """Return address and reason of what could not be followed, by address."""
        instructions, program = self.lifter.instructions, self.lifter.program
        at = instructions.start[self.last_row].astype(np.int64)
        calls = np.flatnonzero(self.flow == Flow.CALL_INDIRECT)
        imported = member(self.named, program.slot_address)
        found: list[tuple[Array, str]] = [
            (at[self.lost[~imported[self.lost]]], "indirect jump"),
            (at[calls[~imported[calls]]], "indirect call"),
            (instructions.start[self.broken].astype(np.int64), "no instruction"),
        ]
        direct = (self.edge_kind <= Edge.CALL) & ~member(self.edge_target, program.import_address)
        for section in program.sections:
            if section.stubs:
                inside = self.edge_target - np.uint64(section.address)
                direct &= inside >= np.uint64(len(section.data))
        offset = self.code.offset(self.edge_target)
        lost = direct & (self.at(offset) < 0)
        found.append((distinct(at[self.edge_block[lost]]), "leads out of the code"))
        listed = [
            (address, reason)
            for offsets, reason in found
            for address in self.code.address(offsets).tolist()
        ]
        return sorted(listed)
