"""Parquet of token ids: layout, other people's types, refusals."""

from __future__ import annotations

import re

import numpy as np
import pytest

from making import ids_of, quick_build, rec, token_store, write_store
from tokmill.base.errors import TokmillError
from tokmill.formats.parquet_tokens import ParquetExport
from tokmill.store.schema import Column

arrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")

ROWS = [[1, 2], [], [3]]


def put(path, rows=ROWS, kind=None, group=2, **more):
    kind = kind or arrow.list_(arrow.int32())
    table = arrow.table({"input_ids": arrow.array(rows, kind), **more})
    parquet.write_table(table, path, row_group_size=group)
    return path


def export(store, out):
    return ParquetExport(ParquetExport.Config()).write(store, out)


def test_one_row_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr("tokmill.formats.parquet_export.GROUP_TOKENS", 3)
    rows = [[1, 2], [], [3], [4, 5, 6, 7], [8]]
    written = export(token_store(tmp_path / "s", [rows[:3], rows[3:]]), tmp_path / "o")
    assert written["rows"] == 5 and written["tokens"] == 8
    file = parquet.ParquetFile(tmp_path / "o/tokens.parquet")
    assert file.schema_arrow.field("input_ids").type == arrow.list_(arrow.uint16())
    assert [file.metadata.row_group(i).num_rows for i in range(3)] == [3, 1, 1]
    assert file.read().column("input_ids").to_pylist() == rows
    file.close()


def test_wide_ids(tmp_path):
    store = write_store(tmp_path / "s", {"token": Column("u4")}, [[rec([70000])]])
    export(store, tmp_path / "t.parquet")
    table = parquet.read_table(tmp_path / "t.parquet")
    assert table.schema.field("input_ids").type == arrow.list_(arrow.uint32())
    assert ids_of(quick_build("parquet-tokens", tmp_path / "t.parquet", tmp_path / "a")) == [
        [70000]
    ]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("int8", "u1"), ("uint16", "u2"), ("uint32", "u4"), ("int32", "u4"), ("int64", "u4")],
)
@pytest.mark.parametrize("large", [True, False])
def test_integers_of_any_width(tmp_path, kind, dtype, large):
    make = arrow.large_list if large else arrow.list_
    put(tmp_path / "a.parquet", kind=make(getattr(arrow, kind)()))
    store = quick_build("parquet-tokens", tmp_path, tmp_path / "s")
    assert ids_of(store) == ROWS and store.schema["token"].dtype == dtype


def test_fixed_size_lists(tmp_path):
    put(tmp_path / "a.parquet", [[1, 2], [3, 4], [5, 6]], arrow.list_(arrow.int64(), 2))
    store = quick_build("parquet-tokens", tmp_path, tmp_path / "s")
    assert ids_of(store) == [[1, 2], [3, 4], [5, 6]]


def test_items_are_row_groups_and_blocks_do_not_matter(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    rows = [random.integers(0, 999, n).tolist() for n in random.integers(0, 50, 60)]
    urls = [f"é{i}" if i % 3 else None for i in range(60)]
    put(tmp_path / "a.parquet", rows, group=7, url=arrow.array(urls))
    monkeypatch.setattr("tokmill.formats.arrow_files.MAX_ITEM", 900)
    store = quick_build("parquet-tokens", tmp_path / "a.parquet", tmp_path / "s", keep=["url"])
    assert ids_of(store) == rows
    assert [r["url"] for r in store] == [u or "" for u in urls]
    assert len(store.receipt(0).items) > 2
    assert store.shard(0)["start"].tolist() == list(range(60))
    monkeypatch.setattr("tokmill.formats.arrow_files.MOST_ROWS", 3)
    other = quick_build("parquet-tokens", tmp_path / "a.parquet", tmp_path / "t", keep=["url"])
    assert [e.sha256 for e in other.shards] == [e.sha256 for e in store.shards]
    assert other.fingerprint == store.fingerprint


def test_the_fingerprint_covers_the_kept_columns(tmp_path):
    prints = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        put(tmp_path / name / "a.parquet", url=arrow.array([name, "b", "c"]))
        built = quick_build("parquet-tokens", tmp_path / name, tmp_path / f"s{name}", keep=["url"])
        prints.append(built.fingerprint)
    assert prints[0] != prints[1]


STRINGS = arrow.array(["a", "b", "c"])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda p: p.write_bytes(b"PAR1 nonsense"), {}, "damaged or no Parquet"),
        (lambda p: put(p, kind=arrow.list_(arrow.float32())), {}, "not lists of integers"),
        (lambda p: put(p, [1, 2, 3], arrow.int32()), {}, "holds int32, not lists"),
        (lambda p: put(p), {"column": "inputids"}, "no column 'inputids'(.|\n)*'input_ids'"),
        (lambda p: put(p), {"keep": ["url"]}, "no column 'url'"),
        (lambda p: put(p, x=arrow.array([1.0, 2, 3])), {"keep": ["x"]}, "holds double"),
        (lambda p: put(p, x=arrow.array([1, None, 3])), {"keep": ["x"]}, "1 values of the column"),
        (lambda p: put(p, [[1], None, [2]]), {}, "1 values of the column 'input_ids' are missing"),
        (lambda p: put(p, [[1], [None], [2]]), {}, "1 values of the column 'input_ids'"),
        (lambda p: put(p, [[1], [2, 3], [-4]]), {}, "row 2: the id -4"),
        (lambda p: put(p), {"vocab_size": 3}, "row 2: the id 3 is none of 0 to 2"),
        (lambda p: put(p, []), {}, "not one record"),
    ],
)
def test_refusals(tmp_path, make, options, message):
    make(tmp_path / "a.parquet")
    with pytest.raises(TokmillError) as caught:
        quick_build("parquet-tokens", tmp_path / "a.parquet", tmp_path / "s", **options)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "a.parquet" in str(caught.value)


def test_strings_that_are_no_utf8(tmp_path):
    schema = {"token": Column("u2"), "url": Column("utf8", per="record")}
    store = write_store(tmp_path / "s", schema, [[rec([1], url="a"), rec([2], url="\ud800")]])
    with pytest.raises(TokmillError, match="lone surrogate"):
        export(store, tmp_path / "t.parquet")
    assert not list(tmp_path.glob("*t.parquet*"))
    bad = arrow.Array.from_buffers(
        arrow.string(),
        3,
        [None, arrow.py_buffer(np.arange(4, dtype="<i4")), arrow.py_buffer(b"a\xff\xfe")],
    )
    put(tmp_path / "b.parquet", url=bad)
    with pytest.raises(TokmillError, match=r"b\.parquet.*'url' holds strings that are no UTF-8"):
        quick_build("parquet-tokens", tmp_path / "b.parquet", tmp_path / "a", keep=["url"])


def test_damage_in_the_middle_of_our_own_files_is_noticed(tmp_path):
    random = np.random.default_rng(0)
    rows = [random.integers(0, 60000, 500).tolist() for _ in range(4)]
    export(token_store(tmp_path / "store", [rows]), tmp_path / "a.parquet")
    path = tmp_path / "a.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(TokmillError, match=r"a\.parquet: the file is damaged"):
        quick_build("parquet-tokens", path, tmp_path / "s")


def test_files_whose_columns_differ_are_refused(tmp_path):
    put(tmp_path / "a.parquet", x=STRINGS)
    put(tmp_path / "b.parquet", x=arrow.array([1, 2, 3]))
    with pytest.raises(TokmillError, match="b.parquet: its columns"):
        quick_build("parquet-tokens", tmp_path, tmp_path / "s", keep=["x"])


def test_a_store_does_not_grow_by_wider_ids(tmp_path):
    (tmp_path / "in").mkdir()
    put(tmp_path / "in/a.parquet", kind=arrow.list_(arrow.uint16()))
    quick_build("parquet-tokens", tmp_path / "in", tmp_path / "s")
    put(tmp_path / "in/b.parquet", kind=arrow.list_(arrow.uint32()))
    with pytest.raises(TokmillError, match="dtypes.token.*u2.*u4"):
        quick_build("parquet-tokens", tmp_path / "in", tmp_path / "s")
