"""Digests of records, duplicates and leaks against plain comparison."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from making import TOKENS, batch_of, rec
from phrase_records import PHRASES, expand, shards
from tokmill.store.checks.hashes import first_of_equals, record_digests
from tokmill.store.schema import Column

# Few different tokens, so that equal records come often.
RECORDS = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12)


@settings(max_examples=80, deadline=None)
@given(RECORDS)
def test_digests_are_equal_if_and_only_if_the_tokens_are(records: list[list[int]]) -> None:
    batch = batch_of(TOKENS, [rec(tokens) for tokens in records])
    digests = [(int(d["a"]), int(d["b"])) for d in record_digests(batch, ["token"])]
    for i, one in enumerate(records):
        for j, other in enumerate(records):
            assert (digests[i] == digests[j]) == (one == other)
            assert (digests[i][0] == digests[j][0]) == (one == other)
    first = first_of_equals(record_digests(batch, ["token"])).tolist()
    assert first == [records.index(tokens) for tokens in records]


def test_digests_do_not_depend_on_the_batch_or_the_width_of_the_ids() -> None:
    rows = [rec([5, 0, 5]), rec([]), rec([0])]
    wide = record_digests(batch_of({"token": Column("u4")}, rows), ["token"])
    for i, row in enumerate(rows):
        assert record_digests(batch_of({"token": Column("u1")}, [row]), ["token"])[0] == wide[i]


def test_columns_count_and_do_not_mix() -> None:
    schema = {"a": Column("u1"), "b": Column("u1")}
    rows = [{"a": [1, 2], "b": [3, 4]}, {"a": [3, 4], "b": [1, 2]}, {"a": [1, 2], "b": [3, 5]}]
    digests = record_digests(batch_of(schema, rows), ["a", "b"])
    assert len({(int(d["a"]), int(d["b"])) for d in digests}) == 3


@settings(max_examples=30, deadline=None)
@given(shards())
def test_phrases_have_the_digests_of_their_expansion(made: Any) -> None:
    table, rows = made
    coded = record_digests(batch_of(PHRASES, rows, table=table), ["asm", "type"])
    plain = batch_of(
        {"asm": Column("u2"), "type": Column("u1")}, [expand(table, row) for row in rows]
    )
    assert coded.tolist() == record_digests(plain, ["asm", "type"]).tolist()


def test_numbers_with_fractions_and_vectors_count_in_full() -> None:
    schema = {"a": Column("f8"), "v": Column("f4", width=2)}
    values = [(0.25, (0.5, 1)), (0.75, (0.5, 1)), (0.25, (0.25, 1)), (0.25, (1, 0.5))]
    rows = [{"a": [a], "v": [v]} for a, v in [*values, values[0]]]
    digests = [tuple(d) for d in record_digests(batch_of(schema, rows), ["a", "v"]).tolist()]
    assert len(set(digests)) == 4 and digests[4] == digests[0]
