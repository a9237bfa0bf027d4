"""Numbers by class: which bytes change, and into what."""

from __future__ import annotations

import numpy as np
import pytest
from iced_x86 import Decoder

from tokmill.x86.tokens.canonical import canonical


def changed(code: str, bits: int = 64) -> str:
    """Return the canonical form of some instructions that lie end to end."""
    raw = np.frombuffer(bytes.fromhex(code), np.uint8)
    lengths = np.array([len(instruction) for instruction in Decoder(bits, raw.tobytes())], np.uint8)
    found = canonical(raw, lengths, bits)
    assert len(found) == len(raw) + 16 and not found[len(raw) :].any()
    return found[: len(raw)].tobytes().hex()


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("83c07f", "83c002"),
        ("83c080", "83c0fe"),
        ("83c001", "83c001"),
        ("83c0ff", "83c0ff"),
        ("0512345678", "0502000000"),
        ("05ffffff80", "05feffffff"),
        ("05ffffffff", "05ffffffff"),
        ("66051234", "66050200"),
        ("66050080", "6605feff"),
        ("48b81122334455667788", "48b8feffffffffffffff"),
        ("48b81122334455667708", "48b80200000000000000"),
        ("8b45f8", "8b45fe"),
        ("8b8511223344", "8b8502000000"),
        ("8b442410", "8b442402"),
        ("8b0425112233f4", "8b0425feffffff"),
        ("8b05112233f4", "8b05feffffff"),
        ("c744241044332211", "c744240202000000"),
        ("66c744241044f3", "66c7442402feff"),
        ("e811223344", "e802000000"),
        ("0f8411223384", "0f84feffffff"),
        ("74f0", "74fe"),
        ("f3aa", "f3aa"),
        ("a11122334455667788", "a1feffffffffffffff"),
        ("67a111223344", "67a102000000"),
    ],
)
def test_displacements_and_immediates(code: str, wanted: str) -> None:
    assert changed(code) == wanted


@pytest.mark.parametrize(
    "code",
    [
        "c1e007",  # the flags of a shift depend on by how much
        "c8100001",  # two immediates in a row
        "0fbae005",
        "0fc2c105",  # an immediate that chooses the mnemonic
        "c4e36949c340",  # or a register
        "0f0fc19e",  # or the instruction (3DNow!)
        "0f2045",  # ModRM that never means memory
        "c5f877",
    ],
)
def test_what_stays(code: str) -> None:
    assert changed(code) == code


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("c5f9c2450705", "c5f9c2450205"),
        ("c4e3694b4408074c", "c4e3694b4408024c"),
        ("62f37d203f470403", "62f37d203f470203"),
        ("8fe978c14507", "8fe978c14502"),
        ("660f3a0f450711", "660f3a0f450211"),
        ("660f38004508", "660f38004502"),
        ("0f18440811", "0f18440802"),
    ],
)
def test_displacements_of_other_maps(code: str, wanted: str) -> None:
    assert changed(code) == wanted


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("40", "40"),  # INC, no prefix here
        ("408b4508", "408b4502"),
        ("c4401122", "c4400222"),  # LES with a displacement, then a cut byte
        ("624508", "624502"),  # BOUND
        ("9a112233445566", "9a112233445566"),
        ("d40b", "d40b"),
        ("678b4011", "678b4011"),  # addresses of 16 bits stay as they are
        ("668b4011", "668b4002"),
    ],
)
def test_32_bit_code(code: str, wanted: str) -> None:
    assert changed(code, 32) == wanted


def test_many_at_once_and_none() -> None:
    assert changed("83c07f" + "e811223344" + "c3") == "83c002" + "e802000000" + "c3"
    assert changed("") == ""


@pytest.mark.parametrize("bits", [64, 32])
def test_cut_instructions_harm_nobody(bits: int) -> None:
    """A length that lies must not lead out of the array."""
    for code in ("66" * 15, "0f", "c4", "62", "8b", "8b84", "0f84", "c7", "48", "8f"):
        raw = np.frombuffer(bytes.fromhex(code), np.uint8)
        canonical(raw, np.array([len(raw)], np.uint8), bits)
