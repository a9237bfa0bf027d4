"""A time limit holds within a shard, for every source; what goes on makes the same bytes."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from making import files_of, here, jsonl, quick_build
from tokmill import plugins
from tokmill.build import make
from tokmill.build.prepare import How
from tokmill.build.source import Item
from tokmill.store.store import Store
from tokmill.store.validate import validate
from tokmill.text import blocks, parquet

ROWS = [{"text": f"document {i} " * 5} for i in range(400)]
LIMIT = 3
"""Looks at the clock before the time is up."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_RECORDS", 20)
    monkeypatch.setattr(parquet, "BATCH", 1500)


def inputs_of(kind: str, folder: Path) -> Path:
    if kind == "jsonl":
        return jsonl(folder / "x.jsonl", ROWS)
    if kind == "gz":
        path = folder / "x.jsonl.gz"
        path.write_bytes(gzip.compress(jsonl(folder / "x.jsonl", ROWS).read_bytes()))
        return path
    if kind == "text":
        path = folder / "x.txt"
        path.write_text("<|endoftext|>".join(row["text"] for row in ROWS))
        return path
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
        pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
        pq.write_table(pa.table({"text": [row["text"] for row in ROWS]}), folder / "x.parquet")
        return folder / "x.parquet"
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["jsonl", "gz", "text", "parquet"])
def test_work_stops_within_a_block_and_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = inputs_of(kind, tmp_path)
    source = "jsonl" if kind == "gz" else kind
    loaded = plugins.load(plugins.SOURCES, source)
    read = loaded.read
    seen = 0

    def counted(self: Any, item: Item, digest: Any) -> Iterator[Any]:
        nonlocal seen
        for batch in read(self, item, digest):
            seen += 1
            yield batch

    monkeypatch.setattr(loaded, "read", counted)
    whole = quick_build(source, path, tmp_path / "whole")
    batches, seen = seen, 0
    assert batches > 5 * LIMIT, "too few batches to tell"
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return 0.0 if looks <= LIMIT + 2 else 100.0

    monkeypatch.setattr(make, "clock", clock)
    how = How(quiet=True, amount=here(), limit_seconds=10)
    partial = quick_build(source, path, tmp_path / "s", how=how)
    assert LIMIT <= seen <= LIMIT + 2, f"{seen} of {batches} batches"
    assert partial.partial and 0 < len(partial) < len(whole)
    assert partial.receipt(0).cut is True
    assert validate(partial).ok
    for mine, theirs in zip(partial, whole, strict=False):
        assert mine["token"].tolist() == theirs["token"].tolist()
    assert (tmp_path / "s/projection.json").exists()
    seen = 0
    quick_build(source, path, tmp_path / "s")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")
    assert not Store(tmp_path / "s").partial


def test_a_store_of_a_store_stops_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_build("jsonl", inputs_of("jsonl", tmp_path), tmp_path / "base")
    quick_build("select", tmp_path / "base", tmp_path / "whole", min_length=1)
    times = iter([0.0, 100.0, *[100.0] * 50])
    monkeypatch.setattr(make, "clock", lambda: next(times))
    how = How(quiet=True, amount=here(), limit_seconds=10)
    partial = quick_build("select", tmp_path / "base", tmp_path / "s", min_length=1, how=how)
    assert partial.partial and partial.receipt(0).cut is True
    monkeypatch.undo()
    quick_build("select", tmp_path / "base", tmp_path / "s", min_length=1)
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")
