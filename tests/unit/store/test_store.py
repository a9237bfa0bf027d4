"""Reading a store: records, columns and spans are what was written, wherever the shards end."""

import functools
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import TOKENS, change_sealed, rec, token_store, write_store
from phrase_records import PHRASES, expand, shards
from tokmill.base.errors import TokmillError, UsageError
from tokmill.store import manifest as layout
from tokmill.store.gather import Spans
from tokmill.store.schema import Column, Schema
from tokmill.store.shards import column_buffers
from tokmill.store.store import Store

SCHEMA: Schema = {
    "token": Column("u2"),
    "depth": Column("u1"),
    "pair": Column("u2", width=2),
    "name": Column("utf8", per="record"),
    "level": Column("i8", per="record"),
}


def row(number: int, length: int) -> dict[str, Any]:
    tokens = [(number * 31 + i * 7) % 1000 for i in range(length)]
    return rec(
        tokens,
        depth=[token % 200 for token in tokens],
        pair=[[token, i] for i, token in enumerate(tokens)],
        name=f"é{number}" * (number % 3),
        level=-number,
    )


LENGTHS = st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=4)


def records_of(lengths: list[list[int]]) -> list[list[dict[str, Any]]]:
    numbers = iter(range(1000))
    return [[row(next(numbers), length) for length in shard] for shard in lengths]


@pytest.mark.parametrize("place", ["file", "full disk"])
def test_many_offsets_are_mapped(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file cannot be written they are held."""
    held = token_store(tmp_path / "s", [[[1, 2], [], [3]], [], [[4] * 9]]).offsets()
    monkeypatch.setattr(column_buffers, "MOST", 0)
    if place != "file":
        full = functools.partial(open, "/dev/full", "wb")
        monkeypatch.setattr(column_buffers, "nameless_file", lambda _: full())
    files = sorted(tmp_path.rglob("*"))
    found = Store(tmp_path / "s").offsets()
    assert found.tolist() == held.tolist() == [0, 2, 2, 3, 12]
    assert found.dtype == held.dtype and found.flags.writeable == (place != "file")
    assert sorted(tmp_path.rglob("*")) == files


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_records_columns_and_ends(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]]
) -> None:
    made = records_of(lengths)
    store = write_store(tmp_path_factory.mktemp("store"), SCHEMA, made)
    flat = [record for shard in made for record in shard]
    assert len(store) == len(flat)
    assert store.ends().tolist() == np.cumsum([len(r["token"]) for r in flat]).tolist()
    for found, wanted in zip(store, flat, strict=True):
        assert {
            name: value.tolist() if isinstance(value, np.ndarray | np.generic) else value
            for name, value in found.items()
        } == wanted
    assert store.column("level").tolist() == [r["level"] for r in flat]
    seen = [(shard, first, len(batch)) for shard, first, batch in store.batches(2)]
    assert sum(count for _, _, count in seen) == len(flat)


@st.composite
def spans_of(draw: Any, lengths: list[int]) -> list[tuple[int, int, int, int]]:
    """Random (row, record, start, stop), rows rising, several spans a row."""
    found, number = [], 0
    for _ in range(draw(st.integers(0, 8))):
        record = draw(st.integers(0, len(lengths) - 1))
        start = draw(st.integers(0, lengths[record]))
        found.append((number, record, start, draw(st.integers(start, lengths[record]))))
        number += draw(st.integers(0, 2))
    return found


def slow_fill(
    records: list[dict[str, list[Any]]], spans: Spans, length: int, size: int, names: list[str]
) -> tuple[dict[str, list[list[Any]]], list[list[int]]]:
    """One token after the other."""
    columns: dict[str, list[list[Any]]] = {
        name: [[None] * length for _ in range(size)] for name in names
    }
    document = [[-1] * length for _ in range(size)]
    place = [0] * size
    for i in range(len(spans.row)):
        number = int(spans.row[i])
        for position in range(int(spans.start[i]), int(spans.stop[i])):
            for name in names:
                columns[name][number][place[number]] = records[int(spans.record[i])][name][position]
            document[number][place[number]] = int(spans.document[i])
            place[number] += 1
    return columns, document


def check_fill(
    store: Store,
    records: list[dict[str, Any]],
    chosen: list[tuple[int, int, int, int]],
    names: list[str],
) -> None:
    array = np.asarray(chosen, np.int64).reshape(-1, 4)
    seen: dict[int, int] = {}
    documents = []
    for number in array[:, 0].tolist():
        documents.append(seen.get(number, 0))
        seen[number] = documents[-1] + 1
    spans = Spans(
        row=array[:, 0],
        record=array[:, 1],
        document=np.asarray(documents, np.int64),
        start=array[:, 2],
        stop=array[:, 3],
    )
    size = int(array[:, 0].max()) + 2 if len(array) else 1
    filled: dict[int, int] = {}
    for number, _, start, stop in chosen:
        filled[number] = filled.get(number, 0) + stop - start
    length = max([30, *filled.values()])
    columns: dict[str, Any] = {}
    document = np.full((size, length), -1, np.int32)
    store.fill(spans, length, columns, document, size, names)
    wanted, wanted_document = slow_fill(records, spans, length, size, names)
    assert document.tolist() == wanted_document
    for name in names:
        for found_row, wanted_row in zip(columns[name].tolist(), wanted[name], strict=True):
            for found, value in zip(found_row, wanted_row, strict=True):
                nothing = [0, 0] if isinstance(found, list) else 0
                assert found == (nothing if value is None else value)


@settings(max_examples=60, deadline=None)
@given(st.data(), LENGTHS.filter(lambda shards: any(shards)))
def test_fill_equals_the_slow_twin(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, lengths: list[list[int]]
) -> None:
    made = records_of(lengths)
    store = write_store(tmp_path_factory.mktemp("store"), SCHEMA, made)
    flat = [record for shard in made for record in shard]
    chosen = data.draw(spans_of([len(r["token"]) for r in flat]))
    check_fill(store, flat, chosen, ["token", "depth", "pair"])


@settings(max_examples=40, deadline=None)
@given(st.data(), shards().filter(lambda made: len(made[1]) > 0))
def test_fill_equals_the_slow_twin_on_phrases(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, made: Any
) -> None:
    table, rows = made
    cut = data.draw(st.integers(0, len(rows)))
    parts = [rows[:cut], rows[cut:]]
    store = write_store(tmp_path_factory.mktemp("store"), PHRASES, parts, table=table)
    records = [{**expand(table, row), "side": row["side"]} for row in rows]
    chosen = data.draw(spans_of([len(r["asm"]) for r in records]))
    check_fill(store, records, chosen, ["asm", "type", "border", "side"])


def test_fill_does_not_join_spans_of_records_in_phrases(tmp_path: Path) -> None:
    """The second begins where the first ends, but in another record."""
    table = {"asm": [[1, 2, 3], [4, 5, 6]], "type": [[0, 0, 0], [1, 1, 1]]}
    rows = [{"phrases": [(i, False)], "side": [i] * 3, "address": i} for i in range(2)]
    store = write_store(tmp_path, PHRASES, [rows], table=table)
    records = [{**expand(table, row), "side": row["side"]} for row in rows]
    check_fill(store, records, [(0, 0, 0, 1), (0, 1, 1, 3)], ["asm", "type", "border", "side"])


def test_fill_leaves_what_no_span_reaches(tmp_path: Path) -> None:
    store = token_store(tmp_path, [[[1, 2, 3]]])
    columns = {"token": np.full((2, 4), 9, np.uint16)}
    document = np.full((2, 4), -1, np.int32)
    one = np.asarray([0])
    store.fill(Spans(one + 1, one, one, one + 1, one + 3), 4, columns, document, 2)
    assert columns["token"].tolist() == [[9] * 4, [2, 3, 9, 9]]
    assert document.tolist() == [[-1] * 4, [0, 0, -1, -1]]


def test_records_out_of_range_and_wrong_columns(tmp_path: Path) -> None:
    store = token_store(tmp_path, [[[1]], [], [[2]]])
    assert [store.find(i) for i in range(2)] == [(0, 0), (2, 0)]
    for number in (-1, 2):
        with pytest.raises(UsageError, match=f"no record {number}"):
            store.record(number)
    with pytest.raises(UsageError, match="no column 'tokem'") as caught:
        store.column("tokem")
    assert "did you mean 'token'" in caught.value.hint
    with pytest.raises(UsageError, match="a number per record"):
        store.column("token")


def test_folders_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="no such store"):
        Store(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(TokmillError, match="is a file"):
        Store(tmp_path / "file")
    with pytest.raises(TokmillError, match="holds no store"):
        Store(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    token_store(tmp_path, [[[1]]])
    change_sealed(tmp_path / "manifest.json", format=3)
    with pytest.raises(TokmillError, match="format 3, and this program reads 2"):
        Store(tmp_path)


def test_a_manifest_without_digest_is_refused(tmp_path: Path) -> None:
    store = token_store(tmp_path, [[[1]]])
    (tmp_path / "manifest.json").write_bytes(layout.encode(store.manifest))
    with pytest.raises(TokmillError, match="does not end with its digest"):
        Store(tmp_path)


def test_a_manifest_of_no_shard_is_refused(tmp_path: Path) -> None:
    token_store(tmp_path, [[[1]]])
    change_sealed(tmp_path / "manifest.json", shards=[])
    with pytest.raises(TokmillError, match="has 1 records and no shard"):
        Store(tmp_path)


def test_a_damaged_manifest_names_the_file(tmp_path: Path) -> None:
    token_store(tmp_path, [[[1]]])
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TokmillError, match="cannot be read") as caught:
        Store(tmp_path)
    assert caught.value.where == str(path)


def test_a_store_without_manifest_is_partial_and_shows_what_is_there(tmp_path: Path) -> None:
    store = token_store(tmp_path, [[[1, 2]], [[3]], [[4]]])
    (tmp_path / "manifest.json").unlink()
    (tmp_path / f"shards/{store.shards[1].name}.json").unlink()
    partial = Store(tmp_path)
    assert partial.partial
    assert [record["token"].tolist() for record in partial] == [[1, 2], [4]]


FEW_FILES = """
import gc, os, resource, sys
from pathlib import Path
import numpy as np
from tokmill.store.store import Store
from tokmill.store.checks.hashes import store_digests
limit = int(sys.argv[2])
stores = [Store(sys.argv[1]) for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
for again in range(2):
    for store in stores:
        assert store.ends()[-1] == store.tokens
        values = [int(store.record(i)["token"][0]) for i in range(len(store))]
        assert values == list(range(len(store))), values
        assert store.column("label").tolist() == list(range(len(store)))
        store._ends = None
        assert len(store_digests(store)) == len(store)
assert open(os.devnull).close() is None
print("done")
"""


def test_more_shards_than_file_descriptors(tmp_path: Path) -> None:
    """Three stores of 300 shards each, open at once, where a process may open 128 files."""
    schema = {**TOKENS, "label": Column("u2", per="record")}
    store = write_store(tmp_path, schema, [[{"token": [i], "label": i}] for i in range(300)])
    assert len(store.shards) == 300
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 128
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(tmp_path), "128"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_manifest_of_receipts_is_the_same_from_disk(tmp_path: Path) -> None:
    """A resumed build reads receipts that another one had in memory: equal manifests."""
    store = token_store(tmp_path, [[[1, 2]], [[3]]])
    written = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").unlink()
    gathered = json.loads(layout.encode(Store(tmp_path).manifest))
    del written["digest"]
    assert gathered | {"complete": True} == written
    assert gathered["ranges"] == {"token": [1, 3]}
    assert layout.encode(store.manifest) == (
        layout.encode(msgspec.structs.replace(Store(tmp_path).manifest, complete=True))
    )
