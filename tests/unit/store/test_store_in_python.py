"""Stores as Python sequences, their texts, and what notebooks show."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import tokmill
import toy
from tokmill.base.errors import TokmillError, UsageError
from tokmill.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(toy.make_store(tmp_path / "a<b", toy.cycles(9)))


def test_records_by_number_and_slice(store: Store) -> None:
    tokens = [record["token"].tolist() for record in store]
    assert len(tokens) == 9
    for number in (0, 3, 8, -1, -9, np.int64(4), np.uint8(8), np.int16(-2)):
        assert store[number]["token"].tolist() == tokens[number]
    for piece in (slice(2), slice(-3, None), slice(None, None, -2), slice(5, 2), slice(7, 100)):
        found = store[piece]
        assert isinstance(found, list)
        assert [record["token"].tolist() for record in found] == tokens[piece]
    for number in (9, -10, 1 << 70):
        with pytest.raises(IndexError, match="there is no record") as error:
            store[number]
        assert isinstance(error.value, UsageError) and str(number) in str(error.value)
    with pytest.raises(TypeError):
        store["token"]  # type: ignore[call-overload]


def test_texts_of_records(tmp_path: Path) -> None:
    texts = ["one two", "three\nfour", "né"]
    tokmill.train_tokenizer(texts, 280).save(tmp_path / "tokenizer")
    (tmp_path / "d.txt").write_text("<|endoftext|>".join(texts))
    store = tokmill.build(
        "text", tmp_path / "d.txt", tmp_path / "s", tokenizer=tmp_path / "tokenizer"
    )
    assert [store.text(n) for n in range(3)] == [f"{text}<|endoftext|>" for text in texts]
    assert store.text(-1) == store.text(np.int64(2), column="token")
    with pytest.raises(UsageError, match="no token column 'bytes'"):
        store.text(0, column="bytes")
    with pytest.raises(TokmillError):
        Store(toy.make_store(tmp_path / "toy", toy.cycles(2))).text(0)


def test_text_of_code(tmp_path: Path) -> None:
    """The tokens of an instruction on a line, by the list and by the bits of `border`."""
    store = tokmill.build("x86", "/bin/true", tmp_path / "code")
    names = json.loads(store.vocabulary_file("asm").read_bytes())["tokens"]
    for number in (0, -1):
        record = store[number]
        tokens = [names[one] for one in record["asm"]]
        begins = [*np.flatnonzero(record["border"] & 1), len(tokens)]
        lines = [" ".join(tokens[a:b]) for a, b in itertools.pairwise(begins)]
        assert store.text(number) == "\n".join(lines)
    assert store.text(0, "mne").split()[1:] == [
        json.loads(store.vocabulary_file("mne").read_bytes())["tokens"][one]
        for one in store[0]["mne"]
    ]


def test_what_notebooks_show(store: Store) -> None:
    shown = store._repr_html_()
    assert "a&lt;b" in shown and "a<b" not in shown and "\n" not in repr(store)
    assert f"<td>{store.fingerprint}</td>" in shown and "<th>token</th>" in shown
