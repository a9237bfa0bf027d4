"""An engine's cache does not take more memory than it is worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tokmill.text.encoding import guards as recycling
from tokmill.text.encoding.encoders import GigatokenEncoder, make_encoder
from tokmill.text.encoding.guards import EACH, MOST, START, YOUNG, Growth
from tokmill.text.learning.train_tokenizer import train_tokenizer
from tokmill.text.tokenizers.tokenizer import Tokenizer

MIB = 1 << 20


def growth(sizes: list[int]) -> Growth:
    given: Iterator[int] = iter(sizes)
    return Growth(lambda: next(given))


def test_what_the_first_text_takes_is_no_growth() -> None:
    found = growth([500 * MIB, 500 * MIB + START])
    assert not found.too_large(MIB)
    assert not found.too_large(MIB)


def test_growth_of_ten_bytes_a_byte_is_too_much_and_of_one_is_not() -> None:
    fast = growth([100 * MIB + 10 * i * MIB for i in range(100)])
    # 10 n above what may be, 20 and n + 1 (in MiB), for the first time at n = 3.
    assert [fast.too_large(MIB) for _ in range(4)] == [False, False, False, True]
    slow = growth([100 * MIB + int(EACH * i) * MIB for i in range(200)])
    assert [slow.too_large(MIB) for _ in range(200)].index(True) == MOST // MIB + 1


def test_memory_that_was_given_back_is_room_again() -> None:
    found = growth([100 * MIB, 90 * MIB, 90 * MIB + START + MIB, 91 * MIB + START + 4 * MIB])
    assert [found.too_large(MIB) for _ in range(4)] == [False, False, False, True]


def test_a_young_engine_is_looked_at_often() -> None:
    found = growth([0] * 100)
    young = found.step
    while found._bytes < YOUNG:
        found.too_large(found.step)
    assert found.step > young
    found.start_again()
    assert found.step == young


def test_the_memory_of_this_process_is_known() -> None:
    assert recycling.resident_bytes() > MIB
    recycling.give_back_memory()
    assert not any(growth([0] * 9).too_large(1 << 40) for _ in range(1)), "nor is it guessed"


@pytest.fixture(scope="module")
def tokenizer(corpus: Any) -> Tokenizer:
    return train_tokenizer(corpus.texts[:60], 600, ["<|endoftext|>"])


def test_ids_are_the_same_whenever_the_engine_is_made_anew(
    tokenizer: Tokenizer, corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recycling, "OFTEN", 1000)
    texts = [*corpus.texts[:80], "", "x" * 5000, "", "end"]
    encoder = make_encoder(tokenizer.to_json(), engine="gigatoken")
    assert isinstance(encoder, GigatokenEncoder)
    encoder.growth.resident = lambda: 0
    wanted = encoder(texts)
    first = encoder.tokenizer
    assert len(wanted[1]) == len(texts)
    sizes = iter(range(0, 1 << 60, MOST))
    encoder.growth.resident = lambda: next(sizes)
    encoder.growth.start_again()
    again = encoder(texts)
    assert next(sizes) > 3 * MOST, "it was looked at after each few texts"
    assert encoder.tokenizer is not first
    for mine, theirs in zip(again, wanted, strict=True):
        assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype
