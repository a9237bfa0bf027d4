"""Cuts the reached instructions into blocks with their edges."""

import iced_x86 as iced
import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Edge
from tokmill.x86.image.image import distinct, expand, find, member, numbers_at, without
from tokmill.x86.lift.decode import DIRECT, FALLS, INDIRECT, Flow, Instructions
from tokmill.x86.lift.findings import Findings

EDGE = np.zeros(len(Flow), np.uint8)
"""Flow of a block's last instruction → the kind of its edge besides `FALL`."""
EDGE[[Flow.JUMP, Flow.BRANCH, Flow.CALL]] = Edge.JUMP, Edge.BRANCH, Edge.CALL
EDGE[Flow.CALL_LOCAL] = Edge.JUMP
EDGE[[Flow.JUMP_INDIRECT, Flow.CALL_INDIRECT, Flow.RETURN]] = (
    Edge.INDIRECT, Edge.INDIRECT, Edge.RETURN
)  # fmt: skip
PART = 1 << 20
"""Edges that are processed at a time: temporary arrays take many times their memory."""
LEADS = np.isin(np.arange(len(Flow)), (Flow.NEXT, Flow.STOP, Flow.INVALID), invert=True)
BACK = 8
"""Instructions before the call in which its register is looked for."""


class Blocks:
    """The blocks that were reached, sorted by offset, and their edges; B blocks, E edges."""

    def __init__(self, findings: Findings) -> None:
        self.findings, self.code = findings, findings.code
        self._cut()
        self._set_edges()
        self._find_targets()
        self._set_slots()

    def _cut(self) -> None:
        ways, instructions = self.findings.ways, self.findings.instructions
        reached = ways.all_reached()
        self.broken = np.flatnonzero(reached & (instructions.flow == Flow.INVALID))
        """i8, rows of reached bytes that are not an instruction."""
        reached[self.broken] = False
        start, length = instructions.start[reached], instructions.length[reached]
        end = start + length
        # Ways from code that was not reached do not begin blocks, and neither does going on over
        # bytes that only the sweep took for the beginning of another instruction.
        count = np.cumsum(reached, dtype=np.int32)
        straight = instructions.flow[ways.source] == Flow.NEXT
        straight &= count[ways.target] == count[ways.source] + 1
        targets = ways.target[reached[ways.source] & ~straight]
        found = (self.findings.starts, ways.called, self.findings.roots, self.code.edge)
        begins = instructions.marks(np.concatenate([*found, instructions.start[targets]]))[reached]
        begins[:1] = True
        begins[1:] |= (instructions.flow[reached][:-1] != Flow.NEXT) | (end[:-1] != start[1:])
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(start))[: len(first)] - 1
        self.start, self.end = start[first].astype(np.int64), end[last].astype(np.int64)
        """(B,) i8, offsets."""
        self.first, self.count = first, last - first + 1
        """(B,) i8, first of `lengths`, and how many."""
        self.lengths = length
        """(I,) u1, of the instructions that were reached."""
        self.last_row = np.flatnonzero(reached)[last]
        """(B,) i8, the row of the last instruction."""
        self.flow = instructions.flow[self.last_row]

    def _set_edges(self) -> None:
        instructions, flow = self.findings.instructions, self.flow
        jumps, table_targets = self.findings.jump_tables()
        order = np.argsort(jumps, kind="stable")
        jumps, table_targets = jumps[order], table_targets[order]
        gates = member(self.last_row, instructions.gates)
        through = np.flatnonzero((flow == Flow.JUMP_INDIRECT) | gates)
        at = instructions.start[self.last_row[through]].astype(np.int64)
        low, high = np.searchsorted(jumps, at), np.searchsorted(jumps, at, side="right")
        self.lost = through[(low == high) & ~gates[through]]
        """i8, blocks that end in an indirect jump with unknown targets."""
        plain = LEADS[flow]
        plain[through[low < high]] = False
        falls = FALLS[flow] & ~member(self.last_row, self.findings.ways.no_return)
        falls &= ~member(self.end, self.code.edge)
        # The edges of a block follow one another, `FALL` is the last one.
        count = plain.astype(np.int8) + falls
        begin = np.zeros(len(flow) + 1, np.int64)
        sizes = count.astype(np.int32)
        sizes[through] += (high - low).astype(np.int32)
        np.cumsum(sizes, out=begin[1:])
        self.edge_begin = begin
        """(B + 1,) i8, where the edges of each block begin."""
        self.edge_target = np.zeros(int(begin[-1]), np.uint64)
        """(E,) u8."""
        self.edge_kind = np.zeros(len(self.edge_target), np.uint8)
        """(E,) u1."""
        direct = np.flatnonzero(DIRECT[flow])
        row = np.searchsorted(instructions.transfer, self.last_row[direct])
        self.edge_target[begin[direct]] = instructions.target[row]
        self.edge_kind[begin[:-1][plain]] = EDGE[flow[plain]]
        places = expand(begin[through], high - low)
        self.edge_target[places] = self.code.address(table_targets[expand(low, high - low)])
        self.edge_kind[places] = Edge.INDIRECT
        fall = np.flatnonzero(falls)
        self.edge_target[begin[fall + 1] - 1] = self.code.address(self.end[fall])
        self.edge_kind[begin[fall + 1] - 1] = Edge.FALL

    def _find_targets(self) -> None:
        self.edge_to = np.empty(len(self.edge_target), np.int32)
        """(E,) i4, the block that each edge leads to, or -1."""
        for begin in range(0, len(self.edge_to), PART):
            part = slice(begin, begin + PART)
            self.edge_to[part] = self.at(self.code.offset(self.edge_target[part]))

    def _set_slots(self) -> None:
        begin, slots = self.edge_begin[:-1], self.findings.program.slot_address
        through = np.flatnonzero(INDIRECT[self.flow] & (self.edge_begin[1:] > begin))
        edge, slot = begin[through], self.named(through)
        rows = self.last_row[through]
        loaded, address = slot_calls(
            self.findings.instructions, rows, self._straight(rows, self.count[through] - 1), slots
        )
        slot[loaded] = address
        has_slot = (self.edge_target[edge] == 0) & member(slot, slots)
        self.through_slots = through[has_slot]
        """i8, ascending: blocks that end in a call or jump through a slot."""
        self.edge_target[edge[has_slot]] = slot[has_slot]
        calls = self.flow[through[has_slot]] == Flow.CALL_INDIRECT
        self.edge_kind[edge[has_slot]] = np.where(calls, Edge.CALL, Edge.JUMP)

    def _straight(self, rows: Array, most: Array) -> Array:
        """Return how many instructions before each row run straight on to it, at most `most`."""
        instructions = self.findings.instructions
        result = np.zeros(len(rows), np.int64)
        going = np.arange(len(rows))
        for step in range(1, BACK + 1):
            going = going[most[going] >= step]
            before = rows[going] - step
            end = instructions.start[before] + instructions.length[before]
            going = going[end == instructions.start[before + 1]]
            result[going] = step
        return result

    def named(self, blocks: Array) -> Array:
        """Return the address (u8) in the last instruction of blocks that end in a transfer.

        For an indirect transfer it is the address of the pointer, or 0.
        """
        instructions = self.findings.instructions
        row = np.searchsorted(instructions.transfer, self.last_row[blocks])
        return instructions.target[row]

    def at(self, offsets: Array) -> Array:
        """Return the blocks that begin at offsets; -1: none."""
        number, there = find(self.start, offsets)
        return np.where(there, number, -1)

    def unresolved(self) -> list[tuple[int, str]]:
        """Return (address, reason) of instructions that could not be followed, by address."""
        instructions, program = self.findings.instructions, self.findings.program
        calls = np.flatnonzero(self.flow == Flow.CALL_INDIRECT)
        slots = program.slot_address
        # Calls of stubs and of the artificial addresses of imports leave the program on purpose.
        lost = np.flatnonzero((self.edge_to < 0) & (self.edge_kind <= Edge.CALL))
        target = self.edge_target[lost]
        broken = self.code.address(instructions.start[self.broken].astype(np.int64))
        wanted = ~member(target, program.import_address) & ~member(target, slots)
        wanted &= ~member(target, np.sort(broken))
        for section in program.sections:
            if section.stubs:
                wanted &= target - np.uint64(section.address) >= np.uint64(len(section.data))
        blocks = np.searchsorted(self.edge_begin, lost[wanted], side="right") - 1
        rows: list[tuple[Array, str]] = [
            (self.last_row[without(self.lost, self.through_slots)], "indirect jump"),
            (self.last_row[without(calls, self.through_slots)], "indirect call"),
            (self.broken, "no instruction"),
            (self.last_row[distinct(blocks)], "leads out of the code"),
        ]
        return sorted(
            (address, reason)
            for part, reason in rows
            for address in self.code.address(instructions.start[part].astype(np.int64)).tolist()
        )


def slot_calls(
    instructions: Instructions, rows: Array, before: Array, slots: Array
) -> tuple[Array, Array]:
    """Return which calls go through a slot, and which one: (n,) i8 into `rows`, (n,) u8.

    Args:
        rows: (m,) i8, rows of calls and jumps through registers or memory.
        before: (m,) i8, how many instructions of the same block lie before each.
        slots: u8, ascending, where pointers to imports lie.
    """
    code, data = instructions.code, instructions.code.linked
    calls, address = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    at = instructions.start[rows].astype(np.int64)
    extended = (data[at] == 0x41) & (code.bits == 64)
    at += extended
    form = data[at + 1]
    # FF /2 and FF /4 of a register.
    call = np.flatnonzero(
        (data[at] == 0xFF) & np.isin(form & 0xF8, (0xD0, 0xE0)) & (len(slots) > 0)
    )
    register = (form[call] & 7) | extended[call].astype(np.uint8) << 3
    for step in range(1, BACK + 1):
        inside = before[call] >= step
        call, register = call[inside], register[inside]
        load = rows[call] - step
        place = instructions.start[load].astype(np.int64)
        number, slot = _loads(instructions, load, place)
        hit = (number == register) & member(slot, slots)
        sure = [
            row
            for row in np.flatnonzero(hit).tolist()
            if not _written(instructions, int(load[row]), step, int(register[row]))
        ]
        calls.append(call[sure])
        address.append(slot[sure])
        call, register = call[~hit], register[~hit]
    return np.concatenate(calls), np.concatenate(address)


def _loads(instructions: Instructions, rows: Array, at: Array) -> tuple[Array, Array]:
    """Return the register (i8) that instructions load from a known place, and the place (u8).

    -1 where an instruction is no such load.
    """
    code, data = instructions.code, instructions.code.linked
    length = instructions.length[rows].astype(np.int64)
    wide = code.bits == 64
    prefix = wide & ((data[at] & 0xFB) == 0x48)
    form = data[at + 1 + prefix]
    plain = (data[at + prefix] == 0x8B) & (length == 6 + prefix) & (prefix | (not wide))
    here = plain & ((form & 0xC7) == 0x05)
    based = plain & ((form & 0xC0) == 0x80) & (not wide) & code.based(form & 7, at)
    short = (data[at] == 0xA1) & (length == 5) & (not wide)
    end = at + length
    slot = numbers_at(data, np.maximum(end - 4, 0), "<i4").astype(np.uint64)
    if wide:
        slot = slot + code.address(end - 1) + np.uint64(1)
    else:
        slot = (slot + based * np.uint64(code.table)) & np.uint64(0xFFFFFFFF)
    number = (form >> 3 & 7) | (prefix & (data[at] == 0x4C)) << 3
    number = np.where(short, 0, number.astype(np.int64))
    return np.where(here | based | short, number, -1), slot


def _written(instructions: Instructions, load: int, step: int, register: int) -> bool:
    """Say whether what lies between a load and the call after it may write the register."""
    access, full = iced.OpAccess, iced.RegisterExt.full_register
    info = iced.InstructionInfoFactory()
    reads = (access.READ, access.COND_READ, access.NONE, access.NO_MEM_ACCESS)
    return any(
        full(used.register) == iced.Register.RAX + register and used.access not in reads
        for row in range(load + 1, load + step)
        for used in info.info(instructions.instruction(row)).used_registers()
    )
