"""Mixing: the closed form against a slow twin, shares at every step, columns that must agree."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import token_store, write_store
from tokmill.base.errors import UsageError
from tokmill.feed.rows import BITS, Mix, Rows, Whole, Windows, column_dtypes, row_shares
from tokmill.store.schema import Column
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary

SHARES = st.lists(st.fractions(Fraction(1, 1000), 50, max_denominator=1000), min_size=1, max_size=9)


def slow_source(shares: list[Fraction], slot: int) -> tuple[int, int]:
    """(source, number of the row in it) of a slot, from the definition alone."""
    if len(shares) == 1:
        return 0, slot
    middle = len(shares) // 2
    share = Fraction(round(sum(shares[:middle]) / sum(shares) * 2**BITS), 2**BITS)
    before, after = math.floor(slot * share), math.floor((slot + 1) * share)
    if after > before:
        return slow_source(shares[:middle], before)
    source, number = slow_source(shares[middle:], slot - before)
    return middle + source, number


def flat(mix: Mix, start: int, stop: int) -> list[tuple[int, int]]:
    """(source, number) of each slot."""
    found = [(-1, -1)] * (stop - start)
    for source, (slots, first) in enumerate(mix.split(start, stop)):
        for number, slot in enumerate(slots.tolist()):
            assert found[slot] == (-1, -1)
            found[slot] = (source, first + number)
    return found


@settings(max_examples=60, deadline=None)
@given(SHARES, st.integers(0, 1 << 50), st.integers(0, 60))
def test_the_closed_form_against_the_slow_twin(
    shares: list[Fraction], start: int, count: int
) -> None:
    wanted = [slow_source(shares, slot) for slot in range(start, start + count)]
    assert flat(Mix(shares), start, start + count) == wanted


def test_a_share_next_to_nothing_is_not_nothing() -> None:
    mix = Mix([Fraction(1, 10**30), Fraction(1)])
    slots, first = mix.split((1 << BITS) - 1, 1 << BITS)[0]
    assert (slots.tolist(), first) == ([0], 0)
    assert all(len(slots) == 1 for slots, _ in mix.split(0, 1)[1:])


def rows_of(path: Path, lengths: list[int], length: int, kind: Any = Windows) -> Rows:
    rows: Rows = kind(token_store(path, [[[1] * n for n in lengths]]), length)
    return rows


def test_without_weights_all_stores_end_together(tmp_path: Path) -> None:
    sources = [rows_of(tmp_path / str(n), [n], 4) for n in (40, 12, 7)]
    shares = row_shares(sources)
    assert [share / shares[0] for share in shares] == [1, Fraction(3, 10), Fraction(2, 10)]
    assert sum(shares) * 59 == sum(map(len, sources))


def test_weights_are_shares_of_tokens(tmp_path: Path) -> None:
    """Rows of 2 tokens and rows of 8: for as many tokens there must be four times as many."""
    short = rows_of(tmp_path / "short", [2] * 10, 8, Whole)
    long = rows_of(tmp_path / "long", [9] * 10, 8, Whole)
    shares = row_shares([short, long], [1, 1])
    assert shares[0] == 4 * shares[1]
    assert row_shares([short, long], [0.5, 0.5]) == shares
    assert row_shares([short, long], [3, 1])[0] / row_shares([short, long], [3, 1])[1] == 12


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ([1], "1 weights cannot be shared among 2 stores"),
        ([1, 0], "weight of store 2 is 0"),
        ([-1, 1], "weight of store 1 is -1"),
        ([1, math.nan], "is nan"),
        ([math.inf, 1], "is inf"),
    ],
)
def test_weights_that_are_none(tmp_path: Path, weights: list[float], what: str) -> None:
    sources = [rows_of(tmp_path / str(n), [n], 4) for n in (8, 9)]
    with pytest.raises(UsageError, match=what) as caught:
        row_shares(sources, weights)
    assert caught.value.hint


def store_of(path: Path, schema: dict[str, Column], vocabulary: str = "") -> Store:
    """One record of two tokens."""
    row = {}
    for name, column in schema.items():
        value: Any = [1] * column.width if column.width else 1
        row[name] = [value] * 2 if column.per == "token" else value
    known = {"token": Vocabulary("token.json", vocabulary, 9, {})} if vocabulary else {}
    return write_store(path, schema, [[row]], vocabularies=known)


def test_the_largest_dtype_wins(tmp_path: Path) -> None:
    stores = [
        store_of(tmp_path / dtype, {"token": Column(dtype), "pair": Column("f4", width=3)})
        for dtype in ("u2", "u4", "u1")
    ]
    dtypes = column_dtypes(stores, None)
    assert dtypes == {"token": np.dtype("<u4"), "pair": np.dtype(("<f4", (3,)))}
    assert list(column_dtypes(stores, ["pair"])) == ["pair"]


@pytest.mark.parametrize(
    ("other", "vocabulary", "what"),
    [
        ({"depth": Column("u1")}, "a", "no column 'token'"),
        ({"token": Column("u2", per="record"), "depth": Column("u1")}, "a", "no column 'token'"),
        ({"token": Column("f4", vocab="token")}, "a", "'token' has values f4"),
        ({"token": Column("u2", vocab="token", width=2)}, "a", "of width 2"),
        ({"token": Column("u2", vocab="token")}, "bcd", "the vocabulary bcd, but .* vocabulary a "),
        ({"token": Column("u2")}, "", "no vocabulary, but"),
    ],
)
def test_columns_that_do_not_agree(
    tmp_path: Path, other: dict[str, Column], vocabulary: str, what: str
) -> None:
    first = store_of(tmp_path / "first", {"token": Column("u2", vocab="token")}, "a")
    second = store_of(tmp_path / "second", other, vocabulary)
    with pytest.raises(UsageError, match=what) as caught:
        column_dtypes([first, second], ["token"])
    assert caught.value.where == str(second.path)
    assert caught.value.hint


def test_without_names_all_stores_need_all_columns(tmp_path: Path) -> None:
    more = store_of(tmp_path / "more", {"token": Column("u2"), "depth": Column("u1")})
    fewer = store_of(tmp_path / "fewer", {"token": Column("u2")})
    for stores in ([more, fewer], [fewer, more]):
        with pytest.raises(UsageError, match="no column 'depth'") as caught:
            column_dtypes(stores, None)
        assert caught.value.where == str(fewer.path)
