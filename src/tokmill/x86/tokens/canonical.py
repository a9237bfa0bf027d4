"""Canonical code: instructions that differ only in a number get equal bytes, in bulk.

A displacement or immediate other than 0, 1 and -1 becomes 2 or -2, with the same size and sign. The
result is code of the same length, and by the contract of `tokmill.x86.tokens.rules.Rules` it has
the same tokens. But among a million instructions only some ten thousand are distinct. The places of
numbers follow from the bytes before them: prefixes, opcode, ModRM, SIB. Source: Intel 64 and IA-32
Architectures Software Developer's Manual, volume 2, chapter 2 and appendix A; EVEX, XOP and 3DNow!
as documented by Intel and AMD.
"""

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array

if TYPE_CHECKING:
    from iced_x86 import Instruction

FLAG_GROUPS = ("read", "written", "cleared", "set", "undefined")
FLAGS = ("OF", "SF", "ZF", "AF", "PF", "CF", "DF", "IF", "AC", "UIF", "C0", "C1", "C2", "C3")


@functools.cache
def names(enumeration: str) -> tuple[str, ...]:
    """Return the names of an enumeration of iced-x86 (such as `Register`), by value."""
    members = vars(getattr(plugins.require("iced_x86"), enumeration))
    values = {value: name for name, value in members.items() if name.isupper()}
    return tuple(values[value] for value in range(len(values)))


@functools.cache
def full_registers() -> tuple[int, ...]:
    """Return for each register the widest one that contains it (for AL and EAX: RAX), by value."""
    info = plugins.require("iced_x86").RegisterInfo
    return tuple(info(number).full_register for number in range(len(names("Register"))))


@functools.cache
def operand_kinds(code: Any) -> tuple[str, ...]:
    """Return the `OpCodeOperandKind` names of the five operands of a `Code` (`NONE`: absent)."""
    info = plugins.require("iced_x86").OpCodeInfo(code)
    return tuple(names("OpCodeOperandKind")[info.op_kind(place)] for place in range(5))


def flags(instruction: "Instruction") -> str:
    """Return the flags that an instruction reads and changes, such as `READ_CF,WRITTEN_ZF`.

    Groups are in the order of `FLAG_GROUPS`, flags within a group in that of `FLAGS`.
    """
    return _flags(
        instruction.rflags_read,
        instruction.rflags_written,
        instruction.rflags_cleared,
        instruction.rflags_set,
        instruction.rflags_undefined,
    )


@functools.cache
def _flags(*groups: int) -> str:
    bits = plugins.require("iced_x86").RflagsBits
    return ",".join(
        f"{group.upper()}_{flag}"
        for group, value in zip(FLAG_GROUPS, groups, strict=True)
        for flag in FLAGS
        if value & getattr(bits, flag)
    )


LONGEST = 15
"""Largest length of an instruction in bytes."""


def _set(*values: int) -> Array:
    table = np.zeros(256, bool)
    table[list(values)] = True
    return table


_LEGACY = (0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x66, 0x67, 0xF0, 0xF2, 0xF3)
_PREFIX = {32: _set(*_LEGACY), 64: _set(*_LEGACY, *range(0x40, 0x50))}
_MODRM = _set(
    *(opcode for opcode in range(0x40) if opcode & 7 < 4),
    *(0x62, 0x63, 0x69, 0x6B, *range(0x80, 0x90), 0xC0, 0xC1, 0xC4, 0xC5, 0xC6, 0xC7),
    *(*range(0xD0, 0xD4), *range(0xD8, 0xE0), 0xF6, 0xF7, 0xFE, 0xFF),
)
"""Opcodes of the one-byte map that have a ModRM byte."""
_WHOLE = _set(0x9A, 0xC0, 0xC1, 0xC8, 0xD4, 0xD5, 0xEA)
"""Opcodes whose immediates stay: they are not a single number (far pointers, ENTER), or their value
decides more than a class (AAM, AAD, and shifts, whose count decides about the flags)."""
_ESCAPE = _set(0x0F, 0x62, 0x8F, 0xC4, 0xC5)
"""First bytes of other opcode maps. Their immediates stay: some choose the mnemonic or a
register."""

_modrm = np.arange(256)
_DISPLACEMENT = np.choose(_modrm >> 6, [4 * (_modrm & 7 == 5), 1, 4, 0])
"""ModRM byte → bytes of displacement, unless a SIB byte changes it."""
_SIB = (_modrm >> 6 < 3) & (_modrm & 7 == 4)
_MASK = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
_LOW = _MASK[np.minimum(np.arange(LONGEST + 1), 8)]
_HIGH = _MASK[np.maximum(np.arange(LONGEST + 1) - 8, 0)]
"""Length of an instruction → the bits of its first and of its last eight bytes."""
_BYTE = np.full(256, 2, np.uint8)
_BYTE[[0, 1, 255]] = 0, 1, 255
_BYTE[128:255] = 254


def canonical(code: Array, lengths: Array, bits: int) -> Array:
    """Return code whose numbers are replaced by representatives of their classes.

    Args:
        code: u1, instructions end to end; invalid instructions stay invalid.
        lengths: u1 (n), their lengths in bytes, 1 to 15 each.
        bits: 64 or 32.

    Returns:
        u1, the code and 16 zero bytes, so that all of it can be read as words.
    """
    changed = np.zeros(len(code) + 16, np.uint8)
    changed[: len(code)] = code
    ends = np.cumsum(lengths, dtype=np.intp)
    place, first = _opcodes(changed, ends - lengths, ends, bits)
    # The place after the opcode, whether there is a ModRM byte, whether a number may be at the end.
    behind, modrm, number = place + 1, _MODRM[first], ~_WHOLE[first]
    _escapes(changed, place, first, bits, behind, modrm, number)
    modrm &= behind < ends
    if bits == 32:
        # The prefix 67 makes 16-bit addresses, whose displacements are encoded differently.
        odd = np.flatnonzero(place > ends - lengths)
        odd = odd[_short_addresses(changed, (ends - lengths)[odd], place[odd])]
        modrm[odd] = number[odd] = False
    narrow, wide = _displacements(changed, behind, modrm)
    sizes = np.where(number, ends - behind, 0)
    _classify(changed, np.concatenate([narrow, behind[sizes == 1]]), "<u1")
    _classify(changed, behind[sizes == 2], "<u2")
    _classify(changed, np.concatenate([wide, behind[sizes == 4]]), "<u4")
    _classify(changed, behind[sizes == 8], "<u8")
    return changed


def canonical_words(code: Array, lengths: Array, bits: int) -> tuple[Array, Array]:
    """Return the canonical bytes of each instruction as two u8 (n), its length in the last byte."""
    changed = canonical(code, lengths, bits)
    starts = np.cumsum(lengths, dtype=np.intp) - lengths
    words = np.ndarray((len(changed) - 7,), "<u8", changed.data, strides=(1,))
    low = words[starts] & _LOW[lengths]
    high = words[starts + 8] & _HIGH[lengths]
    return low, high | (lengths.astype(np.uint64) << np.uint64(56))


def _opcodes(code: Array, starts: Array, ends: Array, bits: int) -> tuple[Array, Array]:
    prefix = _PREFIX[bits]
    place = starts.copy()
    first = code[place]
    rest = np.flatnonzero(prefix[first])
    while len(rest):
        place[rest] += 1
        rest = rest[place[rest] < ends[rest]]
        first[rest] = code[place[rest]]
        rest = rest[prefix[first[rest]]]
    return place, first


def _escapes(
    code: Array, place: Array, first: Array, bits: int, behind: Array, modrm: Array, number: Array
) -> None:
    """Set `behind`, `modrm` and `number` for instructions outside of the one-byte map."""
    rows = np.flatnonzero(_ESCAPE[first])
    first, second = first[rows], code[place[rows] + 1]
    # In 32-bit code these bytes are also BOUND, LES and LDS, which have a memory operand.
    vector = (second >= 0xC0) | (bits == 64)
    two = first == 0x0F
    sizes = np.select(
        [two, (first == 0xC5) & vector, (first == 0xC4) & vector, (first == 0x62) & vector,
         (first == 0x8F) & (second & 0x1F >= 8)],
        [2 + ((second == 0x38) | (second == 0x3A)), 3, 4, 5, 4],
    )  # fmt: skip
    there = sizes > 0
    rows, two, second = rows[there], two[there], second[there]
    behind[rows] = place[rows] + sizes[there]
    branch = two & (second & 0xF0 == 0x80)
    # The ModRM byte of MOV with control and debug registers never means memory.
    modrm[rows] = ~branch & ~(two & (second & 0xF8 == 0x20))
    number[rows] = branch


def _short_addresses(code: Array, starts: Array, places: Array) -> Array:
    """Return which instructions have the prefix 67 (bool), given begin and end of prefixes."""
    result = np.zeros(len(starts), bool)
    for step in range(LONGEST):
        result |= (starts + step < places) & (code[starts + step] == 0x67)
    return result


def _displacements(code: Array, behind: Array, modrm: Array) -> tuple[Array, Array]:
    """Return the places of displacements of 1 and of 4 bytes, and move `behind` past them."""
    rows = np.flatnonzero(modrm)
    places = behind[rows]
    byte = code[places]
    sizes, sib = _DISPLACEMENT[byte], _SIB[byte]
    bare = np.flatnonzero(sib & (byte < 0x40))
    sizes[bare] = 4 * (code[places[bare] + 1] & 7 == 5)
    places += 1 + sib
    behind[rows] = places + sizes
    return places[sizes == 1], places[sizes == 4]


def _classify(code: Array, places: Array, dtype: str) -> None:
    """Replace little-endian numbers at places that do not overlap."""
    if dtype == "<u1":
        code[places] = _BYTE[code[places]]
        return
    # A view whose items begin at every byte.
    size = np.dtype(dtype).itemsize
    numbers = np.ndarray((len(code) - size + 1,), dtype, code.data, strides=(1,))
    values = numbers[places]
    most = np.iinfo(dtype).max
    largest, small = np.asarray([most - 1, 2], dtype)
    changed = np.where(values > most >> 1, largest, small)
    keep = (values <= 1) | (values == most)
    changed[keep] = values[keep]
    numbers[places] = changed
