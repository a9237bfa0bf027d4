"""Strings of a record column: once a shard or end to end, whichever is smaller."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import batch_of, rec
from tokmill.store.schema import Column, Records, Schema, Strings
from tokmill.store.shards import column_buffers as module
from tokmill.store.shards.shard import SUFFIX, Shard, ShardWriter

SCHEMA: Schema = {"token": Column("u2"), "name": Column("utf8", per="record")}
FEW = ["main", "", "\ud800 torn", "main", "é\U0001f600", ""] * 50
ALL = [f"name {i}" for i in range(300)]


def write(path: Path, names: Sequence[str], cuts: Sequence[int] = (), **options: Any) -> bytes:
    writer = ShardWriter(SCHEMA, {}, **options)
    edges = [0, *cuts, len(names)]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        rows = [rec([1], name=name) for name in names[start:stop]]
        writer.add(batch_of(SCHEMA, rows, starts=range(start, stop)), 0)
    writer.write(path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"x{SUFFIX}"


@pytest.mark.parametrize("names", [FEW, ALL, ["one"], [""] * 3], ids=["few", "all", "one", "empty"])
def test_what_is_read_is_what_was_written(path: Path, names: list[str]) -> None:
    write(path, names)
    shard = Shard(path)
    assert shard.strings("name", 0, len(names)) == names
    assert shard.strings("name", 1, 2) == names[1:2]
    assert shard.strings("name", 1, 1) == []
    found = shard.records(0, len(names), SCHEMA).columns["name"]
    assert isinstance(found, Strings)
    assert found.decoded() == names
    assert ("name.values" in shard) == (names in (FEW, [""] * 3))


def test_strings_lie_there_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = len(write(path, FEW))
    assert Shard(path)["name"].dtype == np.uint8
    assert len(Shard(path)["name.values.offsets"]) - 1 == len(set(FEW))
    monkeypatch.setattr(module, "MOST_STRINGS", 0)
    assert once < len(write(path, FEW)) - 8 * len(FEW)


@pytest.mark.parametrize("names", [FEW, ALL, FEW + ALL])
@pytest.mark.parametrize(
    ("most", "look"),
    [*((most, module.FIRST) for most in (3, 4, 5, 200)), (module.MOST_STRINGS, 40)],
)
def test_the_bytes_do_not_depend_on_the_batches(
    path: Path, names: list[str], most: int, look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_STRINGS", most)
    monkeypatch.setattr(module, "FIRST", look)
    whole = write(path, names)
    assert all(write(path, names, cuts) == whole for cuts in ([1], [5, 6, 7], range(1, len(names))))
    assert Shard(path).strings("name", 0, len(names)) == names
    differ = len(set(names))
    assert ("name.values" in Shard(path)) == (differ <= most and names is not ALL)


def test_nor_on_where_they_wait(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = FEW + ALL
    whole = write(path, names)
    monkeypatch.setattr("tokmill.store.shards.column_buffers.MOST", 64)
    assert write(path, names, range(1, len(names)), scratch=tmp_path) == whole
    monkeypatch.setattr(module, "MOST_STRINGS", 7)
    assert write(path, names, range(1, len(names)), scratch=tmp_path) == write(path, names)


@pytest.mark.parametrize(("differ", "dtype"), [(256, "u1"), (257, "u2"), (70_000, "u4")])
def test_numbers_are_as_narrow_as_the_table_allows(path: Path, differ: int, dtype: str) -> None:
    numbers = np.arange(4 * differ) // 4
    table = Strings.of([f"some name {i}" for i in range(differ)])
    writer = ShardWriter(SCHEMA, {})
    n = len(numbers)
    columns = {"token": np.zeros(n, "u2"), "name": Strings(numbers, table.data, table.offsets)}
    writer.add(Records(np.arange(n + 1), columns, np.zeros(n, np.int64)), 0)
    writer.write(path)
    assert Shard(path)["name"].dtype == np.dtype(dtype)
    assert Shard(path).strings("name", n - 5, n) == [
        f"some name {differ - 2}",
        *[f"some name {differ - 1}"] * 4,
    ]


def test_rows_that_nobody_uses_or_that_are_equal_leave_no_trace(path: Path) -> None:
    wanted = write(path, ["b", "a", "b"] * 9)
    assert "name.values" in Shard(path)
    data, offsets = np.frombuffer(b"xabb", np.uint8), np.array([0, 1, 2, 3, 4])
    writer = ShardWriter(SCHEMA, {})
    strings = Strings(np.array([3, 1, 2] * 9, np.uint8), data, offsets)
    batch = batch_of(SCHEMA, [rec([1], name="") for _ in range(27)])
    batch.columns["name"] = strings
    writer.add(batch, 0)
    writer.write(path)
    assert path.read_bytes() == wanted


def test_each_asks_once_a_row() -> None:
    asked = []
    data, offsets = np.frombuffer(b"xab", np.uint8), np.arange(4)
    strings = Strings(np.array([2, 1, 2, 2]), data, offsets)
    found = strings.each(lambda value: asked.append(value) or len(asked))
    assert (asked, found.tolist()) == (["b", "a"], [1, 2, 1, 1])
    assert strings.take(np.array([1, 1, 0])).decoded() == ["a", "a", "b"]
    out, ends = strings.written_out()
    assert (out.tobytes(), ends.tolist()) == (b"babb", [0, 1, 2, 3, 4])
    assert Strings.constant("é", 3).decoded() == ["é"] * 3
    assert Strings.of([]).decoded() == []
