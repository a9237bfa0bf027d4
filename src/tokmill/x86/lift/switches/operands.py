"""Numbers in instructions: displacements and immediates, read from their bytes in columns.

How long an instruction is must be known: what lies between the operand forms and its end is the
immediate (Intel SDM volume 2, chapter 2 and appendix A; AMD APM volume 3 for XOP).
"""

from dataclasses import dataclass

import iced_x86 as iced
import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import numbers_at
from tokmill.x86.lift.decode import LONGEST, PREFIX

NO_REGISTER, EBX = 0xFF, 3
STACK, FRAME = 4, 5
"""Numbers of RSP and RBP."""
# How the opcode is given: by itself and after 0F, or by one of these prefixes.
LEGACY, VEX, EVEX, XOP = 0, 1, 2, 3
SIZES = (1, 2, 4, 8)
"""Bytes of an immediate; others are two numbers (ENTER) or a far pointer."""


def _with_form() -> tuple[Array, Array]:
    """Return which opcodes have a byte that gives the form of their operands: (256,) bool each.

    The first of one byte, the second after 0F.
    """
    one, two = np.zeros(256, bool), np.ones(256, bool)
    one[:0x40] = np.arange(0x40) % 8 < 4
    one[[0x62, 0x63, 0x69, 0x6B, *range(0x80, 0x90), 0xC0, 0xC1, *range(0xC4, 0xC8)]] = True
    one[[*range(0xD0, 0xD4), *range(0xD8, 0xE0), 0xF6, 0xF7, 0xFE, 0xFF]] = True
    two[[*range(4, 12), 0x0E, *range(0x30, 0x38), 0x77, *range(0x80, 0x90)]] = False
    two[[*range(0xA0, 0xA3), *range(0xA8, 0xAB), *range(0xC8, 0xD0)]] = False
    return one, two


def _no_constants() -> tuple[Array, Array, Array]:
    """Return the opcodes whose last bytes are no constant: (256,) bool each.

    The first of one byte (branches, returns that take arguments off the stack, ENTER, far ones),
    the second after 0F (branches; the opcodes of 3DNow!), the third of the third VEX map, whose
    last byte names a register.
    """
    one, two, three = np.zeros(256, bool), np.zeros(256, bool), np.zeros(256, bool)
    one[[*range(0x70, 0x80), 0x9A, 0xC2, 0xC8, 0xCA, *range(0xE0, 0xE4)]] = True
    one[0xE8:0xEC] = True
    two[[0x0F, *range(0x80, 0x90)]] = True
    three[[*range(0x48, 0x4D), *range(0x5C, 0x60), *range(0x68, 0x70), *range(0x78, 0x80)]] = True
    return one, two, three


_FORM_ONE, _FORM_TWO = _with_form()
_NONE_ONE, _NONE_TWO, _NONE_THREE = _no_constants()
NOP = 0x1F
"""Behind 0F: an instruction that does nothing, whatever its operands are."""
MOFFS = range(0xA0, 0xA4)
"""MOV of the accumulator and an absolute address."""


@dataclass(slots=True)
class Operands:
    """The numbers in n instructions."""

    displacement: Array
    """(n,) i8, of the memory operand; 0 where there is none."""
    size: Array
    """(n,) i8, bytes of the displacement: 0, 1, 4, of an absolute address also 8."""
    base: Array
    """(n,) u1, number of the base register of the memory operand; `NO_REGISTER`: none."""
    indexed: Array
    """(n,) bool: the memory operand has an index register."""
    thread: Array
    """(n,) bool: the memory operand counts from the thread pointer of Linux: FS, in 32 bits GS."""
    relative: Array
    """(n,) bool: the displacement counts from the end of the instruction."""
    immediate: Array
    """(n,) i8, with the sign that its bytes give it; 0 where there is none."""
    immediate_size: Array
    """(n,) i8, bytes of the immediate; 0 where there is none, and for targets of branches."""
    map: Array
    """(n,) u1, 0: opcodes of one byte; 1: those after 0F; …"""
    opcode: Array
    """(n,) u1."""
    form: Array
    """(n,) u1: the byte ModRM; 0 where there is none."""
    first: Array
    """(n,) u1, the register in the form's middle, with its extension."""
    second: Array
    """(n,) u1, the register that the form names; `NO_REGISTER` where that is memory."""


def operands(data: Array, start: Array, length: Array, bits: int) -> Operands:
    """Return the numbers in instructions that begin at places of code and are sound.

    Args:
        data: u1, with `LONGEST` bytes after the last instruction.
        start, length: (n,) i8 and u1, places in `data` and bytes of the instructions.
    """
    at, rex, small, thread = _skip_prefixes(data, start, bits)
    how, opmap, opcode, at, extend_first, extend_base = _opcodes(data, at, rex, bits)
    has_form = np.where(opmap == 0, _FORM_ONE[opcode], (opmap != 1) | _FORM_TWO[opcode])
    has_form |= (how != LEGACY) & ((opmap != 1) | (opcode != 0x77))
    form = np.where(has_form, data[at + 1], 0)
    mod, low = form >> 6, form & 7
    memory = has_form & (mod != 3)
    # Control and debug registers have no memory operand, whatever the form says.
    memory &= ~((how == LEGACY) & (opmap == 1) & (opcode >= 0x20) & (opcode < 0x24))
    has_sib = memory & (low == 4)
    base = np.where(has_sib, data[at + 2], form) & 7
    none = memory & (mod == 0) & (base == 5)
    # Code finds data by [ebx*1 + distance], [eax + ebx*1 + distance]: EBX is the base of both.
    index = data[at + 2] >> 3 & 7
    once = has_sib & (how == LEGACY) & (data[at + 2] < 0x40) & (bits == 32)
    alone = once & none & (index != STACK)
    base = np.where(alone | once & (index == EBX) & (base < STACK), index, base)
    place = at + 1 + has_form + has_sib
    size = np.where(none, 4, np.where(memory, np.array([0, 1, 4, 0])[mod], 0))
    absolute = (how == LEGACY) & (opmap == 0) & np.isin(opcode, MOFFS)
    size[absolute] = np.where(small, bits // 16, bits // 8)[absolute]
    rest = start + length - place - size
    skipped = (how == LEGACY) & (opmap == 0) & _NONE_ONE[opcode]
    # Two bytes after these are two numbers, of AMD's EXTRQ and INSERTQ.
    skipped |= (how == LEGACY) & (opmap == 1) & (_NONE_TWO[opcode] | (rest == 2))
    skipped |= (how == VEX) & (opmap == 3) & _NONE_THREE[opcode]
    skipped |= (how == XOP) & (opmap == 8) & (opcode < 0xC0)
    # XBEGIN: the number is a target.
    skipped |= (how == LEGACY) & (opmap == 0) & (opcode == 0xC7) & (form == 0xF8)
    nothing = (how == LEGACY) & (opmap == 1) & (opcode == NOP)
    # 16-bit addresses have forms of their own, and compilers do not use them.
    if bits == 32:
        nothing |= small & memory
    skipped |= nothing | ~np.isin(rest, SIZES)
    size[nothing] = 0
    result = Operands(
        displacement=_numbers(data, place, size),
        size=size,
        base=np.where(memory & (~none | alone), base | extend_base, NO_REGISTER).astype(np.uint8),
        indexed=has_sib & ~alone & ((data[at + 2] & 0x38 != 0x20) | (rex & 2 > 0)),
        thread=thread,
        relative=none & ~has_sib & (bits == 64) & ~nothing,
        immediate=_numbers(data, place + size, np.where(skipped, 0, rest)),
        immediate_size=np.where(skipped, 0, rest),
        map=opmap,
        opcode=opcode,
        form=form,
        first=(form >> 3 & 7 | extend_first).astype(np.uint8),
        second=np.where(has_form & (mod == 3), low | extend_base, NO_REGISTER).astype(np.uint8),
    )
    _scale(result, data, start, length, np.flatnonzero((how == EVEX) & (size == 1)), bits)
    return result


def _skip_prefixes(data: Array, start: Array, bits: int) -> tuple[Array, Array, Array, Array]:
    """Return where the opcodes begin (i8), the REX prefix or 0, and which addresses are small.

    And which count from the thread pointer: bool.
    """
    at = start.astype(np.int64)
    byte = data[at]
    rex, (small, thread) = np.zeros(len(at), np.uint8), np.zeros((2, len(at)), bool)
    rows = np.flatnonzero(PREFIX[bits][byte])
    for _ in range(LONGEST):
        if not len(rows):
            break
        here = data[at[rows]]
        # One that is not the last prefix has no effect.
        rex[rows] = np.where((here & 0xF0 == 0x40) & (bits == 64), here, 0)
        small[rows] |= here == 0x67
        thread[rows] |= here == (0x64 if bits == 64 else 0x65)
        at[rows] += 1
        rows = rows[PREFIX[bits][data[at[rows]]]]
    return at, rex, small, thread


def _opcodes(
    data: Array, at: Array, rex: Array, bits: int
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Return how opcodes are given, their map, they, their places, and the registers' extensions.

    The extensions (0 or 8) are of the register in the form's middle, and of base and last one.
    """
    byte, second = data[at], data[at + 1]
    how, opmap = np.zeros(len(at), np.uint8), np.zeros(len(at), np.uint8)
    first, base = (rex >> 2 & 1) << 3, (rex & 1) << 3
    where = at.copy()
    two = byte == 0x0F
    opmap[two] = 1
    where[two] += 1
    for value, number in ((0x38, 2), (0x3A, 3)):
        three = two & (second == value)
        opmap[three] = number
        where[three] += 1
    # In 32-bit code these bytes begin older instructions, unless the next one says otherwise.
    wide = (second & 0xC0 == 0xC0) | (bits == 64)
    for value, kind, size, mask in (
        (0xC5, VEX, 2, 0), (0xC4, VEX, 3, 31), (0x62, EVEX, 4, 7), (0x8F, XOP, 3, 31)
    ):  # fmt: skip
        rows = np.flatnonzero((byte == value) & (wide if kind != XOP else second & 31 >= 8))
        how[rows], where[rows] = kind, at[rows] + size
        opmap[rows] = second[rows] & mask if mask else 1
        # The extensions stand there the other way round.
        first[rows] = (~second[rows] >> 7 & 1) << 3
        base[rows] = (~second[rows] >> 5 & 1) << 3 if mask else 0
    if bits == 32:
        first[:], base[:] = 0, 0
    return how, opmap, data[where], where, first, base


def _numbers(data: Array, place: Array, size: Array) -> Array:
    """Return the signed little-endian numbers of 0, 1, 2, 4 or 8 bytes at some places (i8)."""
    result = np.zeros(len(place), np.int64)
    for width in SIZES:
        rows = np.flatnonzero(size == width)
        result[rows] = numbers_at(data, place[rows], f"<i{width}")
    return result


def _scale(ops: Operands, data: Array, start: Array, length: Array, rows: Array, bits: int) -> None:
    """Set the short displacements of EVEX, which count units that each opcode has of its own."""
    if not len(rows):
        return
    decoder = iced.Decoder
    cells = data[start[rows][:, None] + np.arange(LONGEST)]
    cells[np.arange(LONGEST) >= length[rows][:, None]] = 0
    different, number = np.unique(cells, axis=0, return_inverse=True)
    values = [decoder(bits, one.tobytes()).decode().memory_displacement for one in different]
    displacement = np.asarray(values, np.uint64).astype(np.int64)
    if bits == 32:
        displacement = displacement.astype(np.int32).astype(np.int64)
    ops.displacement[rows] = displacement[number.reshape(-1)]
