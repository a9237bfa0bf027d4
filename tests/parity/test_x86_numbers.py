"""Where numbers lie in code: ours beside iced-x86's, over all opcodes and kinds of operands."""

from itertools import product

import numpy as np
import pytest
from iced_x86 import Decoder, EncodingKind, Instruction

from tokmill.x86.tokens.canonical import canonical

MODRM = [mod << 6 | reg << 3 | rm for mod in range(4) for reg in (0, 5) for rm in (0, 4, 5, 6)]
MAPS = {
    "one byte": b"",
    "0F": b"\x0f",
    "0F38": b"\x0f\x38",
    "0F3A": b"\x0f\x3a",
    "VEX 2": b"\xc5\xf9",
    "VEX 0F38": b"\xc4\xe2\x79",
    "VEX 0F3A": b"\xc4\xe3\x79",
    "EVEX 0F": b"\x62\xf1\x7d\x48",
    "EVEX 0F38": b"\x62\xf2\xfd\x28",
    "EVEX 0F3A": b"\x62\xf3\x7d\x08",
    "EVEX 5": b"\x62\xf5\x7c\x48",
    "XOP 8": b"\x8f\xe8\x78",
    "XOP 9": b"\x8f\xe9\x78",
    "XOP 10": b"\x8f\xea\x78",
}
PREFIXES = {64: (b"", b"\x66", b"\xf3\x48"), 32: (b"", b"\x66", b"\xf3")}
OTHERS = {
    32: {0x0F, 0x26, 0x2E, 0x36, 0x3E, *range(0x64, 0x68), 0xF0, 0xF2, 0xF3},
    64: {0x0F, 0x26, 0x2E, 0x36, 0x3E, *range(0x40, 0x50), *range(0x64, 0x68), 0xF0, 0xF2, 0xF3},
}
"""First bytes that are prefixes, or lead to another map."""
TAILS = (b"\x25" + b"\x5a" * 12, b"\xff" * 13)
KEPT = {0x9A, 0xC0, 0xC1, 0xC8, 0xD4, 0xD5, 0xEA}
"""Opcodes whose immediates are no single number, or decide more than a class."""


def expected(decoder: Decoder, instruction: Instruction, raw: bytes, opcode: bytes) -> bytes:
    """Return the canonical code of an instruction, by where iced-x86 says that numbers lie."""
    constants = decoder.get_constant_offsets(instruction)
    spans = [(constants.displacement_offset, constants.displacement_size)]
    one_byte = instruction.encoding == EncodingKind.LEGACY and opcode[0] not in {0x0F, *KEPT}
    if one_byte or (opcode[0] == 0x0F and opcode[1] & 0xF0 == 0x80):
        spans.append((constants.immediate_offset, constants.immediate_size))
    made = bytearray(raw)
    for first, size in spans:
        value = int.from_bytes(raw[first : first + size], "little", signed=True)
        value = max(-2, min(2, value))
        made[first : first + size] = value.to_bytes(size, "little", signed=True)
    return bytes(made)


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("name", MAPS)
def test_places_of_numbers(name: str, bits: int) -> None:
    codes, wanted = [], []
    for prefix, opcode, modrm, tail in product(PREFIXES[bits], range(256), MODRM, TAILS):
        head = MAPS[name] + bytes([opcode, modrm])
        decoder = Decoder(bits, (prefix + head + tail)[:15])
        instruction = decoder.decode()
        if not instruction or (not MAPS[name] and opcode in OTHERS[bits]):
            continue
        codes.append((prefix + head + tail)[: instruction.len])
        wanted.append(expected(decoder, instruction, codes[-1], head))
    assert len(codes) > 40
    lengths = np.array([len(raw) for raw in codes], np.uint8)
    code = np.frombuffer(b"".join(codes), np.uint8)
    found = canonical(code, lengths, bits).tobytes()
    starts = np.cumsum(lengths) - lengths
    for raw, start, made in zip(codes, starts.tolist(), wanted, strict=True):
        assert found[start : start + len(raw)] == made, raw.hex()
