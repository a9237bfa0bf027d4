"""Numbers in instructions: what is read in columns is what iced-x86 reads."""

import random

import numpy as np
import pytest
from iced_x86 import Decoder, EncodingKind, Instruction, Mnemonic, OpKind, Register, RegisterExt

from tokmill.x86.lift.decode import LONGEST
from tokmill.x86.lift.switches.operands import NO_REGISTER, operands

IMMEDIATES = {
    OpKind.IMMEDIATE8: 1, OpKind.IMMEDIATE16: 2, OpKind.IMMEDIATE32: 4, OpKind.IMMEDIATE64: 8,
    OpKind.IMMEDIATE8TO16: 1, OpKind.IMMEDIATE8TO32: 1, OpKind.IMMEDIATE8TO64: 1,
    OpKind.IMMEDIATE32TO64: 4,
}  # fmt: skip
SMALL = (Register.BX, Register.BP, Register.SI, Register.DI)
# What takes arguments off the stack, sets up a frame, or does nothing has no constant here. XLAT
# has its memory operand without a form.
LEFT_OUT = (
    Mnemonic.RET, Mnemonic.RETF, Mnemonic.ENTER, Mnemonic.NOP, Mnemonic.XLATB, Mnemonic.EXTRQ,
    Mnemonic.INSERTQ, Mnemonic.RESERVEDNOP, Mnemonic.VPERMIL2PS, Mnemonic.VPERMIL2PD,
)  # fmt: skip
SHIFTS_BY_ONE = (0xD0, 0xD1)


def signed(value: int, size: int) -> int:
    value &= (1 << 8 * size) - 1
    return value - (1 << 8 * size) if value >> (8 * size - 1) else value


def expected(one: Instruction, bits: int) -> tuple[int, int, int] | None:
    """Return displacement, number of the base register and immediate by iced; None: left out."""
    kinds = [one.op_kind(i) for i in range(one.op_count)]
    small = one.memory_base in SMALL or one.memory_index in SMALL or one.memory_displ_size == 2
    if one.mnemonic in LEFT_OUT or (small and OpKind.MEMORY in kinds):
        return None
    displacement, base, immediate = 0, NO_REGISTER, 0
    if OpKind.MEMORY in kinds:
        raw = one.memory_displacement
        if one.is_ip_rel_memory_operand:
            raw -= one.next_ip
        narrow = {8: 8, 4: 4}.get(one.memory_displ_size, 4 if bits == 32 else 8)
        if RegisterExt.is_gpr32(one.memory_base) or RegisterExt.is_gpr32(one.memory_index):
            narrow = 4
        displacement = signed(raw, narrow)
        if one.memory_base not in (Register.NONE, Register.RIP, Register.EIP):
            base = RegisterExt.number(one.memory_base)
        if one.memory_index_scale == 1 and one.encoding == EncodingKind.LEGACY and bits == 32:
            # The order of two registers does not matter; that of the global offset table is first.
            if one.memory_index == Register.EBX and base < 4:
                base = 3
            elif one.memory_base == Register.NONE and one.memory_index:
                base = RegisterExt.number(one.memory_index)
    numbers = [i for i, kind in enumerate(kinds) if kind in IMMEDIATES]
    if numbers:
        immediate = signed(one.immediate(numbers[-1]), IMMEDIATES[kinds[numbers[-1]]])
    return displacement, base, immediate


def compared(code: bytes, bits: int) -> int:
    """Compare all sound instructions in some code; return how many were compared."""
    found = [one for one in Decoder(bits, code, ip=0x1000) if not one.is_invalid]
    start = np.array([one.ip - 0x1000 for one in found], np.int64)
    length = np.array([len(one) for one in found], np.uint8)
    mine = operands(np.frombuffer(code + bytes(LONGEST + 1), np.uint8), start, length, bits)
    count = 0
    for i, one in enumerate(found):
        wanted = expected(one, bits)
        if wanted is None:
            continue
        got = (int(mine.displacement[i]), int(mine.base[i]), int(mine.immediate[i]))
        if got != wanted and mine.map[i] == 0 and mine.opcode[i] in SHIFTS_BY_ONE:
            # A shift by one has no byte that says so.
            wanted = (*wanted[:2], 0)
        raw = code[int(start[i]) : int(start[i]) + len(one)].hex()
        assert got == wanted, f"{one} {raw} in {bits}-bit code"
        count += 1
    return count


@pytest.mark.parametrize("bits", [64, 32])
def test_random_bytes(bits: int) -> None:
    assert compared(random.Random(bits).randbytes(60_000), bits) > 12_000


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("first", ["c5", "c4", "62", "8f", "0f", "0f38", "0f3a", "66", "f2", "41"])
def test_every_way_to_give_an_opcode(bits: int, first: str) -> None:
    generator, prefix = random.Random(first), bytes.fromhex(first)
    # Vector prefixes are sound only with some bits in them.
    parts = []
    for _ in range(800):
        rest = bytearray(generator.randbytes(14 - len(prefix)))
        if first == "62":
            rest[0] = (
                rest[0] & 0xF0 | generator.choice((1, 2, 3, 5, 6)) | (0xC0 if bits == 32 else 0)
            )
            rest[1] |= 4
        elif first in ("c4", "8f"):
            low = (8, 9, 10) if first == "8f" else (1, 2, 3)
            rest[0] = rest[0] & 0xE0 | generator.choice(low) | (0xC0 if bits == 32 else 0)
        parts.append(prefix + bytes(rest))
    assert sum(compared(part, bits) for part in parts) > 1500


def test_the_scale_of_short_displacements_of_evex() -> None:
    # vmovups zmm0, [rax + 0x40] and [rax - 0x80]; vaddps zmm1, zmm2, [rax + 4] broadcast.
    code = bytes.fromhex("62f17c48104001 62f17c481040fe 62f16c58584801")
    mine = operands(
        np.frombuffer(code + bytes(LONGEST + 1), np.uint8),
        np.array([0, 7, 14]),
        np.array([7, 7, 7], np.uint8),
        64,
    )
    assert mine.displacement.tolist() == [0x40, -0x80, 4]
