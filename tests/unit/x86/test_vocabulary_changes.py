"""Smaller and merged vocabularies, and stores that get them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.remake import deep_check
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store
from tokmill.x86.tokens.rules import COLUMNS, tokenize_bytes
from tokmill.x86.tokens.vocabularies.vocabulary import SPECIALS, UNKNOWN, TokenList, closed
from tokmill.x86.tokens.vocabularies.vocabulary_changes import (
    counts_in,
    id_map,
    lists_to_keep,
    pruned,
    vocabularies_in,
)
from tokmill.x86.tokens.vocabularies.vocabulary_files import write_texts, write_vocabularies

PUSH, MOV, RET, CPUID = (bytes.fromhex(code) for code in ("55", "4889e5", "c3", "0fa2"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two sequences of `tokmill` tokens under the closed vocabularies."""
    write_vocabularies(tmp_path / "closed", closed())
    sequences = [tokenize_bytes(PUSH + MOV + RET, 0), tokenize_bytes(PUSH + CPUID + PUSH + RET, 0)]
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(sequences))
    vocab = str(tmp_path / "closed")
    return quick_build("token-dicts", tmp_path / "in.pkl", tmp_path / "s", vocab=vocab)


def some(**counts: int) -> dict[str, TokenList]:
    return {"asm": TokenList.counted("asm", "tokmill", counts)}


def asm(store: Store, record: int) -> list[str]:
    tokens = vocabularies_in(store)["asm"].tokens
    return [tokens[number] for number in store.record(record)["asm"].tolist()]


def test_rare_tokens_go_and_special_ones_stay() -> None:
    made = pruned(some(a=1, b=5, c=2), min_count=2)["asm"]
    assert made.tokens == [*SPECIALS, "b", "c"] and made.counts == [0, 0, 0, 0, 0, 5, 2]


def test_an_order_that_is_not_sorted_stays() -> None:
    lists = {"asm": TokenList("asm", "tokmill", [*SPECIALS, "z", "b", "y"])}
    kept = {"asm": TokenList.of("asm", "tokmill", ["y", "z", "never"])}
    made = pruned(lists, keep=kept)["asm"]
    assert made.tokens == [*SPECIALS, "z", "y"] and made.counts is None
    assert id_map(lists["asm"], made) == [0, 1, 2, 3, 4, 5, UNKNOWN, 6]


def test_other_columns_than_the_kept_ones_stay() -> None:
    lists = some(a=1) | {"reg": TokenList.of("reg", "tokmill", ["RAX"])}
    made = pruned(lists, keep={"reg": TokenList.of("reg", "tokmill", [])})
    assert made["asm"].tokens == lists["asm"].tokens and made["reg"].tokens == list(SPECIALS)


def test_what_stores_use() -> None:
    lists = {"asm": TokenList.of("asm", "tokmill", "abcd")}
    made = pruned(lists, used=[{"asm": {"a": 1, "b": 1}}, {"asm": {"b": 1, "c": 4}}], min_count=2)
    assert made["asm"].tokens[5:] == ["b", "c"] and made["asm"].counts == [0, 0, 0, 0, 0, 2, 4]
    assert pruned(lists, used=[{}])["asm"].tokens == list(SPECIALS)
    with pytest.raises(TokmillError, match="asm has no counts, so none is below 3"):
        pruned(lists, min_count=3)


def test_counts_of_a_store(store: Store) -> None:
    counts = counts_in(store)
    assert list(counts) == list(COLUMNS)
    assert counts["mne"] == {"PUSH": 3, "MOV": 1, "RET": 2, "CPUID": 1}
    assert counts["asm"]["RBP"] == 4


def test_without_options_a_store_gets_the_tokens_it_uses(tmp_path: Path, store: Store) -> None:
    small = quick_build("recode", store.path, tmp_path / "t")
    assert small.schema["asm"].dtype == "u1" and store.schema["asm"].dtype == "u2"
    assert small.manifest.notes == {}
    assert vocabularies_in(small)["mne"].tokens[5:] == ["CPUID", "MOV", "PUSH", "RET"]
    for record in range(2):
        assert asm(small, record) == asm(store, record)
        for name in ("border", "function", "variant"):
            assert np.array_equal(store.record(record)[name], small.record(record)[name])
    assert validate(small).ok and not deep_check(small, 1)


def test_rare_tokens_of_a_store_become_unknown(tmp_path: Path, store: Store) -> None:
    small = quick_build("recode", store.path, tmp_path / "t", min_count=3)
    assert asm(small, 0) == ["PUSH", "RBP", "RSP", "[UNK]", "RBP", "RSP", "[UNK]", "RSP"]
    lost = sum(asm(small, record).count("[UNK]") for record in range(2))
    assert small.manifest.notes["tokens of asm replaced by unk"] == lost
    assert vocabularies_in(small)["asm"].counts is not None
    assert validate(small).ok


@pytest.mark.parametrize("form", ["json", "text", "store"])
def test_a_store_gets_other_vocabularies(tmp_path: Path, store: Store, form: str) -> None:
    small = quick_build("recode", store.path, tmp_path / "t")
    folder = tmp_path / "t"
    if form != "store":
        folder = tmp_path / "lists"
        write = write_texts if form == "text" else write_vocabularies
        write(folder, vocabularies_in(small))
    (tmp_path / "more.pkl").write_bytes(pickle.dumps([tokenize_bytes(b"\x90" + PUSH, 0)]))
    vocab = str(tmp_path / "closed")
    more = quick_build("token-dicts", tmp_path / "more.pkl", tmp_path / "m", vocab=vocab)
    # Read as `tokmill` lists, as the store is one of these rules.
    made = quick_build("recode", more.path, tmp_path / "u", vocab=str(folder))
    assert asm(made, 0) == ["[UNK]", "PUSH", "RBP", "RSP"]
    assert made.manifest.notes == {
        "tokens of asm replaced by unk": 1, "tokens of mne replaced by unk": 1
    }  # fmt: skip
    # What was unknown before is not unknown anew.
    again = quick_build("recode", made.path, tmp_path / "v", vocab=str(tmp_path / "closed"))
    assert asm(again, 0) == ["[UNK]", "PUSH", "RBP", "RSP"] and again.manifest.notes == {}


def test_pruned_by_another_store_or_a_list(tmp_path: Path, store: Store) -> None:
    (tmp_path / "p.pkl").write_bytes(pickle.dumps([tokenize_bytes(PUSH, 0)]))
    vocab = str(tmp_path / "closed")
    other = quick_build("token-dicts", tmp_path / "p.pkl", tmp_path / "p", vocab=vocab)
    made = quick_build("recode", store.path, tmp_path / "t", used_by=(str(other.path),))
    assert vocabularies_in(made)["asm"].tokens[5:] == ["PUSH", "RBP", "RSP"]
    (tmp_path / "asm_tokens.txt").write_text("RET\nPUSH\n")
    keep = str(tmp_path / "asm_tokens.txt")
    made = quick_build("recode", store.path, tmp_path / "u", keep=keep)
    assert vocabularies_in(made)["asm"].tokens[5:] == ["PUSH", "RET"]
    assert vocabularies_in(made)["mne"].tokens == closed()["mne"].tokens
    assert list(lists_to_keep(keep)) == ["asm"]


def test_two_stores_become_one(tmp_path: Path, store: Store) -> None:
    other = tmp_path / "other"
    quick_build("select", store.path, other)
    made = quick_build("recode", [store.path, other], tmp_path / "t")
    assert made.records == 4 and asm(made, 1) == asm(made, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab": "v", "min_count": 2}, "vocab names whole vocabularies"),
        ({"tokenizer": "t.json"}, "no tokenizer"),
    ],
)
def test_options_that_exclude_each_other(
    tmp_path: Path, store: Store, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        quick_build("recode", store.path, tmp_path / "t", **options)


def test_stores_of_text_have_no_x86_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    text = quick_build("text", tmp_path / "a.txt", tmp_path / "s")
    with pytest.raises(TokmillError, match="no vocabulary of an x86 column"):
        quick_build("recode", text.path, tmp_path / "t")
