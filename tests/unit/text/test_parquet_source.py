"""Parquet and Arrow files give the ids of the same records in JSON Lines."""

import ast
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from making import ids_of, jsonl, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.formats import arrow_files
from tokmill.store.store import Store
from tokmill.text import parquet as source

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

ROWS: list[dict[str, Any]] = [
    {"id": i, "title": None if i % 5 == 0 else f" title {i} ", "text": f"text é {i} " * (i % 4)}
    for i in range(50)
] + [{"id": 50, "title": "[deleted]", "text": None}, {"id": 51, "title": None, "text": None}]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("jsonl")
    path = jsonl(folder / "x.jsonl", ROWS)
    return quick_build("jsonl", path, folder / "s", keep=["id"])


def write(path: Path, table: Any, kind: str) -> Path:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
    elif kind == "feather":
        feather.write_feather(table, path)
    else:
        make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            for batch in table.to_batches(max_chunksize=11):
                writer.write_batch(batch)
    return path


def same(store: Store, reference: Store) -> None:
    assert ids_of(store) == ids_of(reference)
    assert [r["id"] for r in store] == [r["id"] for r in reference]
    assert sum(store.manifest.skipped.values()) == sum(reference.manifest.skipped.values())
    assert store.manifest.skipped.keys() == reference.manifest.skipped.keys()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((kind, "string") for kind in ("parquet", "arrow", "feather", "stream")),
        *(
            (kind, text)
            for kind in ("parquet", "stream")
            for text in ("large_string", "dictionary")
        ),
    ],
)
def test_equal_ids(tmp_path: Path, reference: Store, kind: str, text: str) -> None:
    table = pa.Table.from_pylist(ROWS)
    if text == "large_string":
        for name in ("title", "text"):
            table = table.set_column(
                table.schema.get_field_index(name), name, table[name].cast(pa.large_string())
            )
    elif text == "dictionary":
        for name in ("title", "text"):
            column = table[name].dictionary_encode()
            table = table.set_column(table.schema.get_field_index(name), name, column)
    suffix = {"stream": "arrow"}.get(kind, kind)
    path = write(tmp_path / f"x.{suffix}", table, kind)
    same(quick_build("parquet", path, tmp_path / "s", keep=["id"]), reference)


def test_row_groups_in_several_items(
    tmp_path: Path, reference: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.parquet", pa.Table.from_pylist(ROWS), "parquet")
    monkeypatch.setattr(arrow_files, "MAX_ITEM", 1000)
    store = quick_build("parquet", path, tmp_path / "s", keep=["id"])
    same(store, reference)
    items = [item for i in range(len(store.shards)) for item in store.receipt(i).items]
    assert len(items) > 3
    # A record's place is its row in the file.
    starts = [int(v) for i in range(len(store.shards)) for v in store.shard(i)["start"]]
    assert starts == [int(record["id"]) for record in reference]


def test_kept_columns_are_part_of_the_content(tmp_path: Path) -> None:
    stores = []
    for name, url in (("a", "x"), ("b", "y")):
        table = pa.Table.from_pylist([{"text": "one", "url": url}])
        path = write(tmp_path / f"{name}.parquet", table, "parquet")
        stores.append(quick_build("parquet", path, tmp_path / name, keep=["url"]))
    assert stores[0].fingerprint != stores[1].fingerprint


def test_a_missing_field_is_left_out_and_no_field_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", pa.Table.from_pylist([{"text": "one"}]), "parquet")
    store = quick_build("parquet", path, tmp_path / "s", keep=["url"])
    assert store.record(0)["url"] == ""
    path = write(tmp_path / "y.parquet", pa.Table.from_pylist([{"body": "one"}]), "parquet")
    with pytest.raises(UsageError, match="none of the fields 'title', 'text'") as caught:
        quick_build("parquet", path, tmp_path / "t")
    assert "body" in caught.value.hint
    assert caught.value.where == str(path)


def test_a_rejected_row_is_called_a_row(tmp_path: Path) -> None:
    raw = pa.array([b"one", b"two", *[b"\xff"] * 9])
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet", row_group_size=2)
    with pytest.raises(TokmillError, match=r"9 of 11 .*x\.parquet, row 2 \(utf8\)"):
        quick_build("parquet", tmp_path / "x.parquet", tmp_path / "s", fields=["text"])


def test_a_column_of_numbers_is_no_text(tmp_path: Path) -> None:
    row = {"text": 5, "size": 6, "words": "seven"}
    path = write(tmp_path / "x.parquet", pa.Table.from_pylist([row]), "parquet")
    with pytest.raises(UsageError, match="'text' holds int64, not text") as caught:
        quick_build("parquet", path, tmp_path / "s")
    assert caught.value.hint == "known: words"


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("no parquet at all")
    with pytest.raises(TokmillError, match="no Parquet or Arrow file"):
        quick_build("parquet", path, tmp_path / "s")
    whole = write(tmp_path / "y.parquet", pa.Table.from_pylist(ROWS), "parquet").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TokmillError, match="no Parquet or Arrow file"):
        quick_build("parquet", path, tmp_path / "s")


def test_empty_tables(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS[:1]).slice(0, 0)
    for kind in ("parquet", "arrow", "feather", "stream"):
        path = write(tmp_path / f"{kind}.{'arrow' if kind == 'stream' else kind}", table, kind)
        with pytest.raises(TokmillError, match="no record"):
            quick_build("parquet", path, tmp_path / f"s{kind}")


def test_a_large_row_group_is_cut_into_parts_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from making import files_of

    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    for module in (source, arrow_files):
        monkeypatch.setattr(module, "MAX_ITEM", 300)
    monkeypatch.setattr(source, "BATCH", 200)
    store = quick_build("parquet", path, tmp_path / "s")
    assert len(store.shards) > 2
    whole = files_of(tmp_path / "s")
    for entry in store.shards[1:]:
        (tmp_path / f"s/shards/{entry.name}.json").unlink()
    (tmp_path / "s/manifest.json").unlink()
    quick_build("parquet", path, tmp_path / "s")
    assert files_of(tmp_path / "s") == whole


@pytest.mark.parametrize("cut", [False, True])
def test_a_file_of_another_kind_is_told_from_a_damaged_one(tmp_path: Path, cut: bool) -> None:
    path = tmp_path / "a file"
    if cut:
        data = write(path, pa.table({"text": ["a"] * 99}), "stream").read_bytes()
        path.write_bytes(data[:100])
    else:
        jsonl(path, [{"text": "a"}] * 9)
    with pytest.raises(TokmillError) as found:
        quick_build("parquet", path, tmp_path / "s")
    assert ("make or fetch it again" in str(found.value)) == cut
    assert (f"tokmill inspect '{path}'" in str(found.value)) == (not cut)


KEPT: list[tuple[Any, list[Any], list[str]]] = [
    (pa.int64(), [9007199254740993, None], ["9007199254740993", ""]),
    (pa.float64(), [float("nan"), float("-inf")], ["NaN", "-Infinity"]),
    (pa.list_(pa.float64()), [[float("nan"), None], [1.5]], ["[NaN,null]", "[1.5]"]),
    (
        pa.timestamp("ns"),
        [1_700_000_000_123_456_789, None],
        ["2023-11-14 22:13:20.123456789", ""],
    ),
    (pa.timestamp("ns", "UTC"), [0, 1], [f"1970-01-01 00:00:00.{n:09d}Z" for n in (0, 1)]),
    (pa.timestamp("s"), [300_000_000_000, 0], ["11476-08-15 05:20:00", "1970-01-01 00:00:00"]),
    (pa.time64("ns"), [1, None], ["00:00:00.000000001", ""]),
    (pa.date32(), [19_724, None], ["2024-01-02", ""]),
    (pa.duration("ns"), [1, 10**15], ["1", "1000000000000000"]),
    (pa.decimal128(20, 2), [Decimal("1.10"), None], ["1.10", ""]),
]


@pytest.mark.parametrize(("kind", "values", "right"), KEPT, ids=lambda v: str(v)[:20])
def test_kept_values_are_those_of_the_file(
    tmp_path: Path, kind: Any, values: list[Any], right: list[str]
) -> None:
    table = pa.table({"text": ["a", "b"], "k": pa.array(values, kind)})
    path = write(tmp_path / "x.arrow", table, "arrow")  # Parquet has no seconds
    store = quick_build("parquet", path, tmp_path / "s", keep=["k"])
    assert [record["k"] for record in store] == right


def test_columns_that_cannot_be_kept_or_told_apart_are_refused(tmp_path: Path) -> None:
    inner = pa.array([{"t": 1}], pa.struct([("t", pa.timestamp("ns"))]))
    path = write(tmp_path / "x.parquet", pa.table({"text": ["a"], "k": inner}), "parquet")
    with pytest.raises(UsageError, match="'k' .* cannot be kept as text"):
        quick_build("parquet", path, tmp_path / "s", keep=["k"])
    for names, of in ((["text", "text"], "text"), (["text", "k", "k"], "k")):
        table = pa.Table.from_arrays([pa.array(["a"])] * len(names), names=names)
        path = write(tmp_path / "x.parquet", table, "parquet")
        keep = ["k"] if "k" in names else []
        with pytest.raises(UsageError, match=f"2 columns '{of}'"):
            quick_build("parquet", path, tmp_path / "s", keep=keep)
    # Of columns that nobody reads names may be equal.
    assert quick_build("parquet", path, tmp_path / "s").records == 1


DAMAGED = """
import sys
from tokmill.base.errors import TokmillError
from tokmill.formats.arrow_files import open_table

path = sys.argv[1]
data = open(path, "rb").read()
found = {"read": 0, "refused": 0}
for place in range(len(data)):
    for value in (0, 255, 2):
        with open(path, "wb") as file:
            file.write(data[:place] + bytes([value]) + data[place + 1 :])
        try:
            table = open_table(path)
            for batch in table.batches(range(len(table.rows)), table.names, 1 << 20):
                batch.validate(full=True)
            found["read"] += 1
        except (TokmillError, ValueError):
            found["refused"] += 1
print(found)
"""


def test_no_damaged_byte_ends_the_process(tmp_path: Path) -> None:
    """pyarrow aborts where metadata of a column chunk are damaged and somebody asks for them."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path, write_statistics=False)
    command = [sys.executable, "-c", DAMAGED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sum(ast.literal_eval(done.stdout).values()) == 3 * path.stat().st_size


@pytest.mark.parametrize("given", ["", "d", "d/cache-0123456789abcdef.arrow"])
def test_a_folder_of_datasets_is_refused(tmp_path: Path, given: str) -> None:
    """`map` leaves a copy of the rows there, and `shuffle` their order."""
    (tmp_path / "all/d").mkdir(parents=True)
    for name in ("data-00000-of-00001", "cache-0123456789abcdef"):
        write(tmp_path / f"all/d/{name}.arrow", pa.Table.from_pylist(ROWS), "stream")
    (tmp_path / "all/d/state.json").write_text("{}")
    with pytest.raises(UsageError, match="a folder of `datasets"):
        quick_build("parquet", tmp_path / "all" / given, tmp_path / "s", fields=["text"])
    for given, more in (("all/d/data-00000-of-00001.arrow", {}), ("all", {"glob": ["data-*"]})):
        quick_build(
            "parquet", tmp_path / given, tmp_path / f"s{len(more)}", fields=["text"], **more
        )


def test_a_table_with_a_log_is_refused(tmp_path: Path) -> None:
    """Files of rows that were deleted or replaced lie there too."""
    (tmp_path / "t/_delta_log").mkdir(parents=True)
    file = write(tmp_path / "t/part=1.parquet", pa.Table.from_pylist(ROWS), "parquet")
    with pytest.raises(UsageError, match="a table of Delta"):
        quick_build("parquet", tmp_path, tmp_path / "s", fields=["text"])
    assert len(quick_build("parquet", file, tmp_path / "s", fields=["text"])) > 0


def test_a_name_with_a_dot_is_no_path(tmp_path: Path) -> None:
    """pyarrow reads the part `b` of a column `a` too where `a.b` is asked for."""
    parts = pa.array([{"b": "part", "c": "other"}] * 2)
    table = pa.table({"a": parts, "a.b": ["flat", "also"], "text": ["x", "y"]})
    path = write(tmp_path / "x.parquet", table, "parquet")
    kept = quick_build("parquet", path, tmp_path / "kept", fields=["text"], keep=["a.b"])
    assert [record["a_b"] for record in kept] == ["flat", "also"]
    read = quick_build("parquet", path, tmp_path / "read", fields=["a.b", "text"])
    lines = [{"text": "flat\nx"}, {"text": "also\ny"}]
    wanted = quick_build("jsonl", jsonl(tmp_path / "x.jsonl", lines), tmp_path / "lines")
    assert ids_of(read) == ids_of(wanted)
