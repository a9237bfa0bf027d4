"""A shard gives back what was written, in bytes that depend on nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from making import batch_of, rec
from tokmill.base.errors import TokmillError
from tokmill.store.manifest import Receipt, encode, read_json
from tokmill.store.schema import Column, Schema, check_schema, id_dtype
from tokmill.store.shards import column_buffers as held
from tokmill.store.shards.shard import SUFFIX, Shard, ShardWriter, write_tensors

SCHEMA: Schema = {
    "token": Column("u2"),
    "byte": Column("u1"),
    "wide": Column("u4", width=3),
    "name": Column("utf8", per="record"),
    "size": Column("u8", per="record"),
    "delta": Column("i8", per="record"),
    "score": Column("f4", per="record"),
    "vector": Column("f4", per="record", width=2),
}
LIMITS = {
    "u1": st.integers(0, 2**8 - 1),
    "u2": st.integers(0, 2**16 - 1),
    "u4": st.integers(0, 2**32 - 1),
    "u8": st.integers(0, 2**64 - 1),
    "i8": st.integers(-(2**63), 2**63 - 1),
    "f4": st.floats(width=32, allow_nan=False),
    "utf8": st.one_of(st.just(""), st.text(max_size=5), st.just("\U0001f600é")),
}


@st.composite
def rows(draw: Any) -> list[dict[str, Any]]:
    found = []
    for length in draw(st.lists(st.integers(0, 4), max_size=6)):
        row: dict[str, Any] = {}
        for name, column in SCHEMA.items():
            value = LIMITS[column.dtype]
            if column.width:
                value = st.lists(value, min_size=column.width, max_size=column.width)
            count = length if column.per == "token" else None
            row[name] = draw(
                value if count is None else st.lists(value, min_size=count, max_size=count)
            )
        found.append(row)
    return found


def write(path: Path, parts: list[list[dict[str, Any]]], schema: Schema = SCHEMA) -> ShardWriter:
    writer = ShardWriter(schema, {})
    place = 0
    for part in parts:
        writer.add(batch_of(schema, part, starts=range(place, place + len(part))), 0)
        place += len(part)
    writer.write(path)
    return writer


@settings(max_examples=40, deadline=None)
@given(rows(), st.lists(st.integers(0, 6), max_size=3))
def test_round_trip_whatever_the_batches(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    write(folder / "one", [records])
    edges = [0, *sorted(min(cut, len(records)) for cut in cuts), len(records)]
    write(folder / "many", [records[a:b] for a, b in zip(edges, edges[1:], strict=False)])
    assert (folder / "one").read_bytes() == (folder / "many").read_bytes()

    shard = Shard(folder / "one")
    assert len(shard) == len(records)
    ends = np.cumsum([len(row["token"]) for row in records])
    assert shard["offsets"].tolist() == [0, *ends.tolist()]
    for name, column in SCHEMA.items():
        if column.dtype == "utf8":
            assert shard.strings(name, 0, len(records)) == [row[name] for row in records]
            continue
        wanted = [row[name] for row in records]
        if column.per == "token":
            wanted = [value for row in wanted for value in row]
        assert shard[name].dtype == column.numpy()
        assert shard[name].tolist() == wanted
    assert shard["start"].tolist() == list(range(len(records)))


@settings(max_examples=20, deadline=None)
@given(st.lists(rows(), max_size=6), st.sampled_from([0, 40, 200]))
def test_what_waits_in_a_file_comes_out_the_same(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[dict[str, Any]]], most: int
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    write(folder / "plain", parts)
    scratch = folder / "scratch"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held, "MOST", most)
        patch.setattr(held, "CHUNK", 24)
        writer = ShardWriter(SCHEMA, {}, scratch)
        place = 0
        for part in parts:
            starts = range(place, place + len(part))
            writer.add(batch_of(SCHEMA, part, starts=starts), 0)
            place += len(part)
        if most == 0 and any(parts):
            stored = [part for found in writer.buffers.parts.values() for part in found]
            assert any(isinstance(part, held.Stored) for part in stored)
        writer.write(folder / "waited")
    assert (folder / "waited").read_bytes() == (folder / "plain").read_bytes()
    assert not list(scratch.iterdir()), "the file has no name that a kill could leave behind"


@settings(max_examples=20, deadline=None)
@given(rows(), st.integers(0, 6), st.integers(0, 6))
def test_a_part_of_the_records_is_the_part_written_alone(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], a: int, b: int
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    write(folder / "whole", [records])
    start, stop = sorted((min(a, len(records)), min(b, len(records))))
    part = Shard(folder / "whole").records(start, stop, SCHEMA)
    assert part.starts.tolist() == list(range(start, stop))
    part.starts = np.arange(stop - start)
    writer = ShardWriter(SCHEMA, {})
    writer.add(part, 0)
    writer.write(folder / "again")
    write(folder / "part", [records[start:stop]])
    assert (folder / "again").read_bytes() == (folder / "part").read_bytes()


def test_file_is_aligned_padded_and_read_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / f"x{SUFFIX}"
    row = {
        **rec([1, 2, 3], byte=[1, 2, 3], wide=[[1, 2, 3]] * 3, name="é\U0001f600", size=7),
        "delta": -1,
        "score": 0.5,
        "vector": [1, 2],
    }
    write(path, [[row]])
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 64 == 0
    assert header.pop("__metadata__") == {"format": "tokmill-shard", "version": "2"}
    sizes = {"U8": 1, "U16": 2, "U32": 4, "U64": 8, "I64": 8, "F32": 4}
    places = sorted((e["data_offsets"], sizes[e["dtype"]]) for e in header.values())
    assert all(start % size == 0 for (start, _), size in places)
    order = [size for (start, stop), size in places if stop > start]
    assert order == sorted(order, reverse=True)
    theirs = safetensors.numpy.load_file(path)
    ours = Shard(path)
    assert theirs.keys() == header.keys()
    for name, value in theirs.items():
        assert value.dtype == ours[name].dtype
        assert np.array_equal(value, ours[name])
        assert not ours[name].flags.writeable


def test_zero_records(tmp_path: Path) -> None:
    write(tmp_path / "x", [[]])
    shard = Shard(tmp_path / "x")
    assert len(shard) == 0
    assert shard["wide"].shape == (0, 3)
    assert shard.strings("name", 0, 0) == []
    assert len(shard.records(0, 0, SCHEMA)) == 0
    # A writer that was given nothing at all knows no widths and writes the same arrays.
    ShardWriter(SCHEMA, {}).write(tmp_path / "nothing")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "nothing").read_bytes()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("u1", 256), ("u1", -1), ("u2", 65536), ("u4", 1 << 32)],
)
def test_ids_that_the_dtype_cannot_hold_are_refused(dtype: Any, value: int) -> None:
    schema = {"token": Column(dtype)}
    batch = batch_of({"token": Column("i8")}, [rec([1, value])])
    with pytest.raises(TokmillError, match=f"holds the id {value}"):
        ShardWriter(schema, {}).add(batch, 0)


def test_ids_that_the_vocabulary_lacks_are_refused() -> None:
    writer = ShardWriter({"token": Column("u2")}, {"token": 10})
    writer.add(batch_of(writer.schema, [rec([9])]), 0)
    with pytest.raises(TokmillError, match="ids are 0 to 9"):
        writer.add(batch_of(writer.schema, [rec([3, 10])]), 0)


def test_a_column_of_the_wrong_length_is_refused() -> None:
    writer = ShardWriter({"token": Column("u2"), "size": Column("u8", per="record")}, {})
    batch = batch_of(writer.schema, [rec([1, 2], size=1), rec([3], size=2)])
    batch.columns["size"] = np.asarray([1])
    with pytest.raises(ValueError, match="size"):
        writer.add(batch, 0)


def test_ranges_survive_the_receipt(tmp_path: Path) -> None:
    """What a receipt says is equal before and after it was on disk, whatever the numbers."""
    schema: Schema = {
        "token": Column("u2"),
        "big": Column("u8", per="record"),
        "score": Column("f4", per="record"),
    }
    writer = ShardWriter(schema, {})
    rows = [rec([5, 2], big=2**64 - 1, score=0.5), rec([], big=0, score=float("inf"))]
    writer.add(batch_of(schema, rows), 0)
    writer.add(batch_of(schema, [rec([7], big=3, score=float("nan"))]), 0)
    assert writer.ranges["token"] == (2, 7)
    assert writer.ranges["big"] == (0, 2**64 - 1)
    assert writer.ranges["score"] == (0.5, 0.5)
    receipt = Receipt("a" * 24, 0, True, 3, 3, 0, "", writer.ranges, [], [])
    path = tmp_path / "receipt.json"
    path.write_bytes(encode(receipt))
    again = read_json(path, Receipt)
    assert again == receipt
    assert encode(again) == path.read_bytes()


@pytest.mark.parametrize(
    "schema",
    [
        {"offsets": Column("u1")},
        {"a-b": Column("u1")},
        {"a": Column("utf8")},
        {"a": Column("utf8", per="record", width=2)},
        {"a": Column("u1", per="record", phrase=True)},
        {"a": Column("u1", phrase=True, width=2)},
    ],
)
def test_impossible_columns_are_refused(schema: Schema) -> None:
    with pytest.raises(TokmillError):
        check_schema(schema)


def test_the_smallest_dtype_holds_the_largest_id() -> None:
    sizes = (1, 256, 257, 65536, 65537, 1 << 32)
    assert [id_dtype(size) for size in sizes] == ["u1", "u1", "u2", "u2", "u4", "u4"]
    with pytest.raises(TokmillError):
        id_dtype((1 << 32) + 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:4],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: (1 << 60).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: data.replace(b'"U16"', b'"U17"'),
        lambda data: data.replace(b'"data_offsets"', b'"data_offsetz"'),
    ],
    ids=["short", "cut", "longer", "header", "json", "dtype", "offsets"],
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "x"
    write_tensors(path, {"token": ("u2", [3], [np.arange(3, dtype="<u2")])})
    assert Shard(path)["token"].tolist() == [0, 1, 2]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TokmillError, match="damaged") as caught:
        Shard(path)
    assert caught.value.where == str(path)
    assert "store validate" in caught.value.hint


def test_a_missing_array_is_damage(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {})
    with pytest.raises(TokmillError, match="'token' is missing"):
        Shard(tmp_path / "x")["token"]


def test_large_and_small_parts_give_the_same_file(tmp_path: Path) -> None:
    values = np.arange(1 << 18, dtype="<u4")
    whole = write_tensors(tmp_path / "a", {"v": ("u4", [len(values)], [values])})
    parts = write_tensors(
        tmp_path / "b", {"v": ("u4", [len(values)], [values[:5], values[5:70000], values[70000:]])}
    )
    assert whole == parts
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert whole[0] == (tmp_path / "a").stat().st_size
