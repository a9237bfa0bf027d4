"""The instructions of a program in columns: offsets, lengths, flow and targets.

iced-x86 gives only the length of each instruction, because an object of each is slow. The flow is
read from the opcodes in columns (Intel SDM volume 2, appendix A).
"""

import enum
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import iced_x86 as iced
import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import distinct, member, numbers_at
from tokmill.x86.lift.code import (
    CALL,
    Code,
    leaving_returns,
    local_calls,
    register_calls,
    retpolines,
)

LONGEST = 15
"""Bytes of the longest instruction."""
BATCH = 1 << 18
"""Instructions decoded at a time, so that lists of them stay small."""
INVALID_BIT = 16
# iced's kinds of flow: direct jumps, branches and calls; and those after which control may go on.
LEADS, GOES_ON = (1, 3, 5), (0, 3, 5, 6, 7, 8)


class Flow(enum.IntEnum):
    """Where control goes after an instruction."""

    NEXT = 0
    JUMP = 1
    BRANCH = 2
    CALL = 3
    JUMP_INDIRECT = 4
    CALL_INDIRECT = 5
    RETURN = 6
    STOP = 7
    """Control ends: UD2, HLT, INT3."""
    INVALID = 8
    """Not an instruction."""
    CALL_LOCAL = 9
    """A call within the same function, after which control goes on (see `code`)."""


FLOWS = np.arange(len(Flow))
FALLS = np.isin(FLOWS, (Flow.NEXT, Flow.BRANCH, Flow.CALL, Flow.CALL_INDIRECT, Flow.CALL_LOCAL))
"""Flow → whether control may go on after the instruction."""
DIRECT = np.isin(FLOWS, (Flow.JUMP, Flow.BRANCH, Flow.CALL, Flow.CALL_LOCAL))
INDIRECT = np.isin(FLOWS, (Flow.JUMP_INDIRECT, Flow.CALL_INDIRECT))


class Instructions:
    """The decoded instructions, sorted by offset; I instructions.

    Two instructions may overlap, if code jumps into the middle of one.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.start = np.zeros(0, np.int32)
        """(I,) i4, offsets."""
        self.length = np.zeros(0, np.uint8)
        self.flow = np.zeros(0, np.uint8)
        """(I,) u1, a `Flow`."""
        self.transfer = np.zeros(0, np.int64)
        """(T,) i8, rows of instructions that are not `NEXT`."""
        self.target = np.zeros(0, np.uint64)
        """(T,) u8, the address in these instructions: the target, or for indirect ones the address
        of the pointer; 0: none."""
        self.gates = np.zeros(0, np.int64)
        """i8, ascending: rows of jumps to retpolines, whose target is in a register."""
        self._words = np.zeros(code.size // 64 + 1, np.uint64)
        self._before = np.zeros(len(self._words), np.int32)
        self._waiting: dict[int, int] = {}
        self._edges, self._bases = code.edge.tolist(), code.base.tolist()
        decoder, data = iced.Decoder, code.linked
        self._decoders = [
            decoder(code.bits, data[int(a) : int(b)].tobytes(), ip=int(base))
            for a, b, base in zip(code.edge[:-1], code.edge[1:], code.base, strict=True)
        ]

    def sweep(self) -> None:
        """Decode all code from the beginning of each section to its end."""
        columns, parts, count = [self._columns(np.zeros(0, np.int32), np.zeros(0, np.uint8))], [], 0
        for part in self._swept():
            # Small sections are classified together: an object may have thousands.
            parts.append(part)
            count += len(part[0])
            if count >= BATCH:
                columns.append(self._columns(*map(np.concatenate, zip(*parts, strict=True))))
                parts, count = [], 0
        if parts:
            columns.append(self._columns(*map(np.concatenate, zip(*parts, strict=True))))
        self.start, self.length, self.flow, self.target = map(
            np.concatenate, zip(*columns, strict=True)
        )
        self._index()

    def _swept(self) -> Iterator[tuple[Array, Array]]:
        """Yield offsets and marks of instructions, at most `BATCH` of a section at a time."""
        for edge, decoder in zip(self.code.edge.tolist(), self._decoders, strict=False):
            instructions = iter(decoder)
            while read := bytes([len(i) | (not i) << 4 for i in islice(instructions, BATCH)]):
                marked = np.frombuffer(read, np.uint8)
                ends = edge + np.cumsum(marked & (INVALID_BIT - 1), dtype=np.int32)
                start = (ends - (marked & (INVALID_BIT - 1))).astype(np.int32)
                edge = int(ends[-1])
                yield start, marked

    def decode(self, offsets: Array) -> Array:
        """Decode from each offset and from targets of jumps and calls, up to known instructions.

        New instructions are kept until `settle`. Returns the offsets (i8) of the known instructions
        at which decoding ended.
        """
        joined: list[int] = []
        todo = offsets.tolist()
        while todo:
            offset = todo.pop()
            for instruction in self._from(offset):
                if offset in self._waiting:
                    break
                if self._has(offset):
                    joined.append(offset)
                    break
                self._waiting[offset] = instruction.len | instruction.is_invalid << 4
                if instruction.is_invalid:
                    break
                flow = instruction.flow_control
                if flow in LEADS:
                    target = self.code.offset(np.asarray([instruction.near_branch_target], "u8"))
                    todo += target[target >= 0].tolist()
                if flow not in GOES_ON:
                    break
                offset += instruction.len
        return np.asarray(joined, np.int64)

    def waits(self, offsets: Array) -> Array:
        return np.asarray([offset in self._waiting for offset in offsets.tolist()], bool)

    def settle(self) -> None:
        """Add the new instructions to the columns, which changes the rows."""
        count = len(self._waiting)
        start = np.fromiter(self._waiting, np.int32, count)
        marked = np.fromiter(self._waiting.values(), np.uint8, count)
        start, length, flow, target = self._columns(start, marked)
        self._waiting.clear()
        transfer = np.flatnonzero(flow)
        order, of_target = np.argsort(start), np.argsort(start[transfer])
        place = np.searchsorted(self.start, start[order])
        at = np.searchsorted(self.start[self.transfer], start[transfer[of_target]])
        self.target = np.insert(self.target, at, target[of_target])
        self.start = np.insert(self.start, place, start[order])
        self.length = np.insert(self.length, place, length[order])
        self.flow = np.insert(self.flow, place, flow[order])
        self._index()

    def instruction(self, row: int) -> Any:
        return self._from(int(self.start[row])).decode()

    def instructions_in(self, rows: Sequence[int]) -> list[Any]:
        """Return the instructions in some rows; successive ones mostly lie side by side."""
        result = []
        decoder, end = self._from(0), -1
        for start in self.start[rows].tolist():
            if start != end or not decoder.can_decode:
                decoder = self._from(start)
            result.append(decoder.decode())
            end = start + len(result[-1])
        return result

    def _from(self, offset: int) -> Any:
        part = bisect_right(self._edges, offset) - 1
        decoder, inside = self._decoders[part], offset - self._edges[part]
        decoder.position = inside
        decoder.ip = (self._bases[part] + inside) & ((1 << 64) - 1)
        return decoder

    def row(self, offset: Array) -> Array:
        """Return the rows (i8) of the instructions that begin at offsets; -1: none."""
        ok = (offset >= 0) & (offset < self.code.size)
        at = np.where(ok, offset, 0)
        word, bit = self._words[at >> 6], np.uint64(1) << (at & 63).astype(np.uint64)
        row = self._before[at >> 6] + np.bitwise_count(word & (bit - np.uint64(1)))
        return np.where(ok & ((word & bit) != 0), row.astype(np.int64), -1)

    def marks(self, offsets: Array) -> Array:
        """Return for each row whether its offset is among `offsets`: (I,) bool."""
        rows = self.row(offsets)
        result = np.zeros(len(self.start), bool)
        result[rows[rows >= 0]] = True
        return result

    def indirect_jumps(self) -> Array:
        """Return the rows (i8, ascending) of all indirect jumps, also through retpolines."""
        result: Array = self.transfer[self.flow[self.transfer] == Flow.JUMP_INDIRECT]
        return distinct(result, self.gates) if len(self.gates) else result

    def _has(self, offset: int) -> bool:
        return bool(int(self._words[offset >> 6]) >> (offset & 63) & 1)

    def _columns(self, start: Array, marked: Array) -> tuple[Array, Array, Array, Array]:
        length: Array = marked & (INVALID_BIT - 1)
        flow, target = classify(self.code, start, length)
        flow[(flow == Flow.STOP) & member(start, self.code.warnings)] = Flow.NEXT
        flow[marked >= INVALID_BIT] = Flow.INVALID
        through = np.flatnonzero(INDIRECT[flow] & (target > 0))
        through = through[member(target[through], self.code.slot)]
        target[through] = self.code.slot_target[np.searchsorted(self.code.slot, target[through])]
        flow[through] = np.where(flow[through] == Flow.JUMP_INDIRECT, Flow.JUMP, Flow.CALL)
        rows = np.flatnonzero(INDIRECT[flow] & (target == 0))
        rows, address = register_calls(self.code, start, length, flow, rows)
        flow[rows] = np.where(flow[rows] == Flow.JUMP_INDIRECT, Flow.JUMP, Flow.CALL)
        target[rows] = address
        self._set_return_addresses(start, length, flow, target)
        return start, length, flow, target[flow > 0]

    def _set_return_addresses(
        self, start: Array, length: Array, flow: Array, target: Array
    ) -> None:
        calls = np.flatnonzero((flow == Flow.CALL) & (self.code.linked[start] == CALL))
        at, size = start[calls].astype(np.int64), length[calls]
        local, gone = local_calls(self.code, at, size, self.code.offset(target[calls]))
        flow[calls[local]], flow[calls[gone]] = Flow.CALL_LOCAL, Flow.JUMP
        returns = np.flatnonzero(flow == Flow.RETURN)
        at = start[returns].astype(np.int64)
        flow[returns[leaving_returns(self.code, at)]] = Flow.JUMP_INDIRECT

    def _set_gates(self) -> None:
        flow = self.flow[self.transfer]
        calls = self.start[self.transfer[flow == Flow.CALL_LOCAL]].astype(np.int64)
        thunks = self.code.address(calls[retpolines(self.code, calls) >= 0])
        jumps = flow == Flow.JUMP
        self.gates = self.transfer[jumps][member(self.target[jumps], thunks)]

    def _index(self) -> None:
        self.transfer = np.flatnonzero(self.flow)
        self._set_gates()
        flags = np.zeros(len(self._words) * 64, np.uint8)
        flags[self.start] = 1
        self._words = np.packbits(flags, bitorder="little").view(np.uint64)
        counts = np.bitwise_count(self._words).astype(np.int32)
        self._before = np.cumsum(counts, dtype=np.int32) - counts


def classify(code: Code, start: Array, length: Array) -> tuple[Array, Array]:
    """Return the flow (u1) of instructions and the address (u8) in them, or 0.

    It is iced's `flow_control`, except: INT3, HLT and `int 29h` stop; system calls go on.
    """
    data = code.linked
    flow = np.zeros(len(start), np.uint8)
    first = data[start]
    # Most instructions are neither transfers nor begin with a prefix.
    rows = np.flatnonzero(_MAYBE[code.bits][first])
    at = start[rows].astype(np.int64)
    byte = first[rows]
    narrow, small, repeat = np.zeros((3, len(rows)), bool)
    for _ in range(LONGEST):
        prefix = PREFIX[code.bits][byte]
        if not prefix.any():
            break
        narrow |= prefix & (byte == 0x66)
        small |= prefix & (byte == 0x67)
        repeat |= prefix & ((byte & 0xFE) == 0xF2)
        at = at + prefix
        byte = np.where(prefix, data[at], byte)
    second, third = data[at + 1], data[at + 2]
    kind = _ONE_BYTE[code.bits][byte]
    wide = byte == 0x0F
    kind = np.where(wide, _TWO_BYTE[second], kind)
    # UIRET, ERETU and ERETS: one of their prefixes is part of the code.
    special = wide & repeat & (second == 0x01) & ((third == 0xCA) | (third == 0xEC))
    kind = np.where(special, Flow.RETURN, kind)
    group = second >> 3 & 7
    kind = np.where(byte == 0xFF, _GROUP_FIVE[group], kind)
    kind = np.where((byte == 0xC7) & (second == 0xF8), Flow.BRANCH, kind)
    kind = np.where((byte == 0xCD) & (second == 0x29), Flow.STOP, kind)
    flow[rows] = kind
    target = np.zeros(len(start), np.uint64)
    near, small = DIRECT[kind], rows[small & INDIRECT[kind]]
    rows, at, byte, wide, narrow = rows[near], at[near], byte[near], wide[near], narrow[near]
    end = start[rows].astype(np.int64) + length[rows]
    short = ((byte & 0xF0) == 0x70) | ((byte & 0xFC) == 0xE0) | (byte == 0xEB)
    short &= ~wide
    # In 64-bit code Intel's processors ignore the prefix for a 16-bit distance.
    half = narrow if code.bits == 32 else np.zeros(len(rows), bool)
    distance = numbers_at(data, np.maximum(end - 4, 0), "<i4").astype(np.int64)
    distance = np.where(half, distance >> 16, distance)
    # Short jumps have a distance of one byte.
    distance = np.where(short, data[end - 1].view(np.int8).astype(np.int64), distance)
    value = code.address(end - 1) + np.uint64(1) + distance.astype(np.uint64)
    if code.bits == 32:
        value = value & np.where(half, 0xFFFF, 0xFFFFFFFF).astype(np.uint64)
    target[rows] = value
    rows = np.flatnonzero(INDIRECT[flow])
    target[rows] = _slots(code, start[rows].astype(np.int64), length[rows])
    target[small] &= np.uint64(0xFFFFFFFF)
    return flow, target


def _slots(code: Code, start: Array, length: Array) -> Array:
    """Return the address of the pointer of `jmp [memory]` or `call [memory]`; 0: not known."""
    data, end = code.linked, start + length
    result = np.zeros(len(start), np.uint64)
    form = data[np.maximum(end - 5, 0)]
    opcode = data[np.maximum(end - 6, 0)]
    plain = (opcode == 0xFF) & (length >= 6)
    value = numbers_at(data, np.maximum(end - 4, 0), "<i4").astype(np.uint64)
    here = plain & ((form & 0xC7) == 0x05)
    if code.bits == 64:
        result[here] = (code.address(end - 1) + np.uint64(1) + value)[here]
        return result
    result[here] = value[here]
    here = plain & ((form & 0xC0) == 0x80) & code.based(form & 7, start)
    result[here] = value[here] + np.uint64(code.table)
    return result & np.uint64(0xFFFFFFFF)


def _tables() -> tuple[dict[int, Array], dict[int, Array], dict[int, Array], Array, Array]:
    prefix, one, maybe = {}, {}, {}
    two = np.zeros(256, np.uint8)
    two[0x80:0x90] = Flow.BRANCH
    two[[0x0B, 0xB9, 0xFF]] = Flow.STOP
    two[[0x07, 0x35, 0xAA]] = Flow.RETURN
    five = np.zeros(8, np.uint8)
    five[[2, 3]] = Flow.CALL_INDIRECT
    five[[4, 5]] = Flow.JUMP_INDIRECT
    for bits in (32, 64):
        prefixes = np.zeros(256, bool)
        prefixes[[0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x66, 0x67, 0xF0, 0xF2, 0xF3]] = True
        if bits == 64:
            prefixes[0x40:0x50] = True
        flow = np.zeros(256, np.uint8)
        flow[0x70:0x80] = flow[0xE0:0xE4] = Flow.BRANCH
        flow[0xE8] = Flow.CALL
        flow[[0xE9, 0xEB]] = Flow.JUMP
        flow[[0xC2, 0xC3, 0xCA, 0xCB, 0xCF]] = Flow.RETURN
        flow[[0xCC, 0xF1, 0xF4]] = Flow.STOP
        if bits == 32:
            flow[0x9A], flow[0xEA] = Flow.CALL_INDIRECT, Flow.JUMP_INDIRECT
        prefix[bits], one[bits] = prefixes, flow
        maybe[bits] = prefixes | (flow > 0)
        maybe[bits][[0x0F, 0xFF, 0xC7, 0xCD]] = True
    return prefix, one, maybe, two, five


PREFIX, _ONE_BYTE, _MAYBE, _TWO_BYTE, _GROUP_FIVE = _tables()
