"""Phrases: tokens stored once a shard give the tokens that were meant, at any place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import batch_of
from phrase_records import CODED, PHRASES, expand, shards
from tokmill.base.errors import TokmillError
from tokmill.store.checks.hashes import token_values
from tokmill.store.shards.shard import Shard, ShardWriter


@settings(max_examples=60, deadline=None)
@given(shards(), st.integers(1, 3))
def test_any_span_is_its_part_of_the_expansion(
    tmp_path_factory: pytest.TempPathFactory, made: Any, size: int
) -> None:
    table, rows = made
    path = tmp_path_factory.mktemp("phrases") / "x"
    writer = ShardWriter(PHRASES, {})
    for start in range(0, len(rows), size):
        writer.add(batch_of(PHRASES, rows[start : start + size], table=table), 0)
    writer.write(path)
    shard = Shard(path)
    lengths = np.diff(shard["offsets"].astype(int)).tolist()
    for i, row in enumerate(rows):
        wanted = expand(table, row)
        assert lengths[i] == len(wanted["asm"])
        for start in range(lengths[i] + 1):
            for stop in range(start, lengths[i] + 1):
                values = shard.phrase_tokens(i, start, stop, CODED)
                assert [v.tolist() for v in values] == [wanted[n][start:stop] for n in CODED]
    batch = shard.records(0, len(rows), PHRASES)
    for name in ("asm", "type"):
        flat = [value for row in rows for value in expand(table, row)[name]]
        assert token_values(batch, name).tolist() == flat


@settings(max_examples=30, deadline=None)
@given(shards())
def test_the_table_holds_each_phrase_once_and_only_used_ones(
    tmp_path_factory: pytest.TempPathFactory, made: Any
) -> None:
    table, rows = made
    path = tmp_path_factory.mktemp("phrases") / "x"
    writer = ShardWriter(PHRASES, {})
    writer.add(batch_of(PHRASES, rows, table=table), 0)
    writer.write(path)
    shard = Shard(path)
    edges = shard["table_offsets"].tolist()
    stored = [
        (tuple(shard["table.asm"][a:b].tolist()), tuple(shard["table.type"][a:b].tolist()))
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    used = {
        (tuple(table["asm"][i]), tuple(table["type"][i])) for row in rows for i, _ in row["phrases"]
    }
    assert len(stored) == len(set(stored))
    assert set(stored) == used


def test_the_same_bytes_in_other_batches_and_from_another_table(tmp_path: Path) -> None:
    rows = [
        {"phrases": [(2, True), (1, False)], "side": [0] * 2, "address": 1},
        {"phrases": [(1, False), (0, True)], "side": [1] * 3, "address": 2},
    ]
    table = {"asm": [[1, 2], [3], [3]], "type": [[0, 0], [1], [2]]}
    writer = ShardWriter(PHRASES, {})
    writer.add(batch_of(PHRASES, rows, table=table), 0)
    writer.write(tmp_path / "a")
    writer = ShardWriter(PHRASES, {})
    for i, row in enumerate(rows):
        writer.add(batch_of(PHRASES, [row], table=table, starts=[i]), 0)
    writer.write(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = ShardWriter(PHRASES, {})
    again.add(Shard(tmp_path / "a").records(0, 2, PHRASES), 0)
    again.write(tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()


@settings(max_examples=60, deadline=None)
@given(shards(), shards(), st.integers(1, 3), st.integers(0, 5))
def test_a_table_that_grows_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, one: Any, two: Any, size: int, known: int
) -> None:
    """Rows of two tables in turns; of each one some rows are there only from the second batch."""
    path = tmp_path_factory.mktemp("phrases")
    plain, growing = ShardWriter(PHRASES, {}), ShardWriter(PHRASES, {})
    for table, rows in (one, two, one):
        mark = object()
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            batch = batch_of(PHRASES, part, table=table)
            plain.add(batch, 0)
            needed = max((number for row in part for number, _ in row["phrases"]), default=0)
            held = len(table["asm"]) if start else min(len(table["asm"]), max(known, needed + 1))
            shorter = {name: values[:held] for name, values in table.items()}
            batch = batch_of(PHRASES, part, table=shorter)
            assert batch.phrases is not None
            batch.phrases.growing = mark
            growing.add(batch, 0)
    plain.write(path / "a")
    growing.write(path / "b")
    assert (path / "a").read_bytes() == (path / "b").read_bytes()


def test_ids_in_the_table_are_checked(tmp_path: Path) -> None:
    rows = [{"phrases": [(0, False)], "side": [0], "address": 0}]
    with pytest.raises(TokmillError, match="'asm' holds the id 9"):
        ShardWriter(PHRASES, {"asm": 9}).add(
            batch_of(PHRASES, rows, table={"asm": [[9]], "type": [[0]]}), 0
        )


@pytest.mark.parametrize(
    ("phrase", "what"), [(99, "that are not in its table"), (1, "other numbers of tokens")]
)
def test_phrases_that_were_damaged_are_told(tmp_path: Path, phrase: int, what: str) -> None:
    rows = [{"phrases": [(0, True), (1, False)], "side": [0] * 3, "address": 1}]
    writer = ShardWriter(PHRASES, {})
    writer.add(batch_of(PHRASES, rows, table={"asm": [[1, 2], [3]], "type": [[0, 0], [1]]}), 0)
    writer.write(tmp_path / "x")
    data = bytearray((tmp_path / "x").read_bytes())
    place = data.index((1 << 31).to_bytes(4, "little") + (1).to_bytes(4, "little"))
    data[place : place + 4] = phrase.to_bytes(4, "little")
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(TokmillError, match=f"damaged: .*{what}") as error:
        Shard(tmp_path / "x").phrase_tokens(0, 0, 3, CODED)
    assert "store validate" in error.value.hint
