"""What holds for any code: the cache agrees with the rules, and the closed lists hold it all."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from iced_x86 import Decoder

from tokmill.x86.tokens.canonical import canonical
from tokmill.x86.tokens.rules import COLUMNS, align, decode, make_rules
from tokmill.x86.tokens.templates import Templates
from tokmill.x86.tokens.vocabularies.vocabulary import closed
from x86_code import check_equal, decodable, programs, text_of

RULES = ["tokmill", "semanticbbv"]
CLOSED = {name: set(closed()[name].tokens) for name in COLUMNS}

numbers = st.sampled_from(
    [b"\0" * 8, b"\1" + b"\0" * 7, b"\xff" * 8, b"\xfe" + b"\xff" * 7, b"\x7f" * 8, b"\x80" * 8]
)
heads = st.one_of(
    st.sampled_from([b"", b"\x0f", b"\x0f\x38", b"\x0f\x3a", b"\x0f\x0f", b"\xd9"]),
    st.tuples(st.just(b"\xc5"), st.binary(min_size=1, max_size=1)).map(b"".join),
    st.tuples(
        st.sampled_from([b"\xc4\xe1", b"\xc4\xe2", b"\xc4\x43", b"\x8f\xe8", b"\x8f\xe9"]),
        st.sampled_from([b"\x79", b"\x7d", b"\xf9", b"\x69", b"\x78"]),
    ).map(b"".join),
    st.tuples(
        st.sampled_from([b"\x62\xf1", b"\x62\xf2", b"\x62\xf3", b"\x62\x61", b"\x62\xf5"]),
        st.sampled_from([b"\x7c", b"\x7d", b"\xfd", b"\x6d", b"\x7e"]),
        st.sampled_from([b"\x08", b"\x28", b"\x48", b"\x58", b"\xcb"]),
    ).map(b"".join),
)
prefixes = st.sampled_from(
    [b"", b"", b"\x66", b"\xf2", b"\xf3", b"\x48", b"\x41", b"\x67", b"\x64", b"\x3e", b"\xf0"]
)
likely = st.tuples(prefixes, prefixes, heads, st.binary(min_size=3, max_size=3), numbers, numbers)
code_bytes = st.one_of(
    st.binary(min_size=100, max_size=600),
    st.lists(likely.map(b"".join), min_size=5, max_size=30).map(b"".join),
)


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("rules", RULES)
def test_the_cache_agrees_on_any_bytes(rules: str, bits: int) -> None:
    templates = Templates(rules, bits)

    @given(code_bytes)
    @settings(max_examples=60, deadline=None)
    def check(raw: bytes) -> None:
        check_equal(templates, *decodable(raw, bits))

    check()


@given(code_bytes, st.sampled_from([64, 32]), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_tokens_are_closed_aligned_and_without_address(raw: bytes, bits: int, address: int) -> None:
    code, _ = decodable(raw, bits)
    rules = make_rules("tokmill", bits)
    here, there = (decode(code.tobytes(), place, bits) for place in (0, address))
    for one, other in zip(here, there, strict=True):
        aligned = align(rules.tokens(one))
        assert rules.tokens(other) == rules.tokens(one)
        assert len({len(tokens) for tokens in aligned.values()}) == 1
        for name, tokens in aligned.items():
            assert set(tokens) <= CLOSED[name]


@given(code_bytes, st.sampled_from([64, 32]))
@settings(max_examples=60, deadline=None)
def test_canonical_code_is_code_of_the_same_lengths(raw: bytes, bits: int) -> None:
    code, lengths = decodable(raw, bits)
    found = canonical(code, lengths, bits)[: len(code)]
    decoded = list(Decoder(bits, found.tobytes()))
    assert all(decoded)
    assert [len(instruction) for instruction in decoded] == lengths.tolist()
    assert (canonical(found, lengths, bits)[: len(code)] == found).all()


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("path", programs(), ids=lambda path: path.name)
def test_programs_in_part(path: Path, rules: str) -> None:
    text = text_of(path)
    templates = Templates(rules, 64)
    rng = random.Random(path.name)
    for _ in range(4):
        start = rng.randrange(max(1, len(text) - 2500))
        check_equal(templates, *decodable(text[start : start + 2500]))


@pytest.mark.long
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("path", programs(), ids=lambda path: path.name)
def test_every_instruction_of_programs(path: Path, rules: str) -> None:
    check_equal(Templates(rules, 64), *decodable(text_of(path)))


def test_there_are_ten_programs() -> None:
    assert len(programs()) >= 10


def test_the_checker_can_fail() -> None:
    """Another template for one instruction is seen."""
    code, lengths = decodable(bytes.fromhex("55488945f8c3"))
    templates = Templates("tokmill", 64)
    templates.numbers(code, lengths)
    templates.columns["asm"].data[0] += 1
    with pytest.raises(AssertionError, match="^55: "):
        check_equal(templates, code, lengths)
    assert isinstance(lengths, np.ndarray)
