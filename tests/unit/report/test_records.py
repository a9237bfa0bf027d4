"""Which records are shown, and how."""

import json
from collections import Counter
from pathlib import Path

import pytest

import making
from report_stores import write_store
from tokmill.base.errors import UsageError
from tokmill.report.describe import shown_records as records
from tokmill.report.describe.shown_records import Reader, matching
from tokmill.store.schema import Column
from tokmill.store.vocab import Vocabulary


def test_matching_counts_through_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SOME", 2)
    store = write_store(tmp_path, [[[2, 0]] * 5, [[3, 0]] * 4], kept=True)
    assert list(matching(store)) == list(range(9))
    assert list(matching(store, ["level=1"])) == [1, 4, 6]
    assert list(matching(store, ["level=1", "name=doc-1-1"])) == [6]
    assert list(matching(store, ["level=-1"])) == []
    assert list(matching(store, ["level=70000"])) == []
    assert list(matching(store, ["level = 0x1", "name ~ -1-1$"])) == [6]
    unknown: Counter[str] = Counter()
    assert list(matching(store, ["name > 1"], unknown)) == []
    assert unknown == {"name > 1": 9}
    assert list(matching(store, ["level != 1", "length >= 2", "name < doc-0-3"])) == [0, 2]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("name", "COLUMN OP VALUE"),
        ("nam=x", "did you mean"),
        ("level=x", "holds numbers"),
        ("token=2", "one value per record"),
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
        "record": 2, "tokens": 2, "from": "in-1.txt", "at": "byte 10",
        "level": 1, "name": "doc-1-1", "token": [5, 0],
    }  # fmt: skip
    assert reader.show(1, 2)["token"] == [3, 4]
    (tmp_path / f"shards/{store.shards[0].name}.json").unlink()
    assert "from" not in reader.show(0)


def test_a_tokenizer_that_cannot_be_read_is_talk(tmp_path: Path) -> None:
    reader = Reader(write_store(tmp_path, [[[2, 0]]], vocabulary=b"{}"))
    assert "ids instead of text" in reader.talk
    assert reader.show(0)["token"] == [2, 0]


def test_columns_with_a_list_of_tokens_are_shown_as_tokens(tmp_path: Path) -> None:
    schema = {
        "asm": Column("u1", phrase=True, vocab="asm"),
        "reg": Column("u1", phrase=True, vocab="reg"),
        "border": Column("u1", phrase=True),
    }
    lists = {"asm": ["PUSH", "RBP", "RET"], "reg": ["-", "RSP", "RBP"]}
    table = {"asm": [[0, 1], [2]], "reg": [[1, 2], [7]]}
    rows = [{"phrases": [(0, True), (1, False), (0, True)]}]
    vocabularies = {name: Vocabulary(f"{name}.json", "0" * 64, 9) for name in lists}
    store = making.write_store(
        tmp_path, schema, [rows], table=table, vocabularies=vocabularies
    )  # fmt: skip
    for name, tokens in lists.items():
        (tmp_path / f"vocab/{name}.json").write_text(json.dumps({"tokens": tokens}))
    shown = Reader(store).show(0)
    assert shown["text"] == "PUSH RBP\nRET\n\nPUSH RBP" and "asm" not in shown
    assert shown["reg"] == ["RSP", "RBP", "(7)", "RSP", "RBP"]
    assert Reader(store).show(0, 3)["text"] == "PUSH RBP\nRET"
    (tmp_path / "vocab/asm.json").write_text("{}")
    reader = Reader(store)
    assert "asm.json is not a list of tokens" in reader.talk
    assert reader.show(0)["asm"] == [0, 1, 2, 0, 1] and reader.show(0)["reg"][0] == "RSP"
