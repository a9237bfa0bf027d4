"""Stores as `vocab.txt` and `corpus.txt`: all pairs, and back to the same ids."""

from pathlib import Path

import numpy as np
import pytest

from making import jsonl, quick_build
from pair_graphs import write_small
from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import UsageError
from tokmill.formats import notes
from tokmill.formats.notes import check
from tokmill.report.describe.shown_records import Reader
from tokmill.store.store import Store


def export(store: Store, out: Path, **options: object) -> dict[str, object]:
    kind = plugins.load(plugins.EXPORTS, "corpus")
    made: dict[str, object] = kind(recipe.convert(kind.Config, options)).write(store, out)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    files = [write_small(tmp_path, number) for number in range(3)]
    return quick_build("pairs", files, tmp_path / "s", all_pairs=True, walks=3)


@pytest.mark.parametrize("block", [16, notes.BLOCK])
def test_all_pairs_are_there(
    tmp_path: Path, store: Store, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes.blocks, "__defaults__", (block,))
    out = tmp_path / "out"
    made = export(store, out)
    words = (out / "vocab.txt").read_text().splitlines()
    assert words == Reader(store).lists["asm"]
    text = (out / "corpus.txt").read_text()
    pairs = [
        [walk.split(" ") for walk in pair.split("\n")] for pair in text.rstrip("\n").split("\n\n")
    ]
    records = [store.record(i) for i in range(store.records)]
    assert len(pairs) == 3 and made["walks"] == store.records
    for pair, first in zip(pairs, (0, store.records // 3, 2 * store.records // 3), strict=True):
        for number, walk in enumerate(pair, first):
            assert walk == [words[i] for i in records[number]["asm"].tolist()]
        assert len({(r["first"], r["second"]) for r in records[first : first + len(pair)]}) == 1
    assert not check(out).problems


def test_what_was_written_is_read_as_the_same_ids(tmp_path: Path, store: Store) -> None:
    out = tmp_path / "out"
    export(store, out)
    again = quick_build(
        "corpus", out / "corpus.txt", tmp_path / "again", words=str(out / "vocab.txt")
    )
    assert again.records == store.records and again.manifest.notes == {}
    assert again.vocabularies["token"].roles == store.vocabularies["asm"].roles
    for number in range(store.records):
        assert np.array_equal(again.record(number)["token"], store.record(number)["asm"])
    export(again, tmp_path / "twice")
    assert (tmp_path / "twice" / "corpus.txt").read_bytes() == (out / "corpus.txt").read_bytes()
    assert (tmp_path / "twice" / "vocab.txt").read_bytes() == (out / "vocab.txt").read_bytes()


def test_columns_and_keys_may_be_chosen(tmp_path: Path, store: Store) -> None:
    export(store, tmp_path / "mne", column="mne")
    assert "\n\n" in (tmp_path / "mne" / "corpus.txt").read_text()
    with pytest.raises(UsageError, match="no vocabulary"):
        export(store, tmp_path / "x", column="side")


def test_ids_without_a_word_keep_the_lines_of_others(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\n\nb\na\n[UNK]\n[PAD]\n[CLS]\n[SEP]\n[MASK]\n")
    (tmp_path / "corpus.txt").write_text("a b\n")
    store = quick_build(
        "corpus", tmp_path / "corpus.txt", tmp_path / "s", words=str(tmp_path / "vocab.txt")
    )
    export(store, tmp_path / "out")
    words = (tmp_path / "out" / "vocab.txt").read_text().splitlines()
    assert words[:4] == ["[unused0]", "[unused1]", "b", "a"]


def test_a_store_of_text_has_no_words(tmp_path: Path) -> None:
    store = quick_build(
        "jsonl", jsonl(tmp_path / "a.jsonl", [{"text": "some text"}]), tmp_path / "s"
    )
    with pytest.raises(UsageError, match="is not a word") as error:
        export(store, tmp_path / "out")
    assert error.value.hint and not (tmp_path / "out" / "vocab.txt").exists()
