"""Which records are shown, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_stores import write_store

from tokmill.errors import UsageError
from tokmill.report import records
from tokmill.report.records import Reader, matching


def test_matching_counts_through_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SOME", 2)
    store = write_store(tmp_path, [[[2, 0]] * 5, [[3, 0]] * 4], kept=True)
    assert list(matching(store)) == list(range(9))
    assert list(matching(store, ["level=1"])) == [1, 4, 6]
    assert list(matching(store, ["level=1", "name=doc-1-1"])) == [6]
    assert list(matching(store, ["level=-1"])) == []
    assert list(matching(store, ["level=70000"])) == []


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("name", "no condition"),
        ("nam=x", "did you mean"),
        ("level=x", "holds numbers"),
        ("token=2", "one value a record"),
    ],
)
def test_conditions_that_cannot_be(tmp_path: Path, condition: str, message: str) -> None:
    store = write_store(tmp_path, [[[2, 0]]], kept=True)
    with pytest.raises(UsageError, match=message):
        list(matching(store, [condition]))


def test_a_record_says_where_it_is_from(tmp_path: Path) -> None:
    store = write_store(tmp_path, [[[2, 0]], [[3, 4, 0], [5, 0]]], kept=True, vocabulary=None)
    reader = Reader(store)
    assert reader.show(2) == {
        "record": 2, "tokens": 2, "from": "in-1.txt", "byte": 10,
        "level": 1, "name": "doc-1-1", "token": [5, 0],
    }  # fmt: skip
    assert reader.show(1, 2)["token"] == [3, 4]
    (tmp_path / f"shards/{store.shards[0].name}.json").unlink()
    assert "from" not in reader.show(0)


def test_a_tokenizer_that_cannot_be_read_is_talk(tmp_path: Path) -> None:
    reader = Reader(write_store(tmp_path, [[[2, 0]]], vocabulary=b"{}"))
    assert "ids instead of text" in reader.talk
    assert reader.show(0)["token"] == [2, 0]
