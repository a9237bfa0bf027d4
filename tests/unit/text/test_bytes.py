"""The `bytes` column: what makes bytes a token and bits a byte exact."""

from pathlib import Path

import msgspec
import pytest

import tokmill
from tokmill import Store
from tokmill.store.checks.stats import statistics
from tokmill.text.learning.train_tokenizer import train_tokenizer

TEXTS = ["plain words", "straße über 東京", "🙂" * 5, "one more line of plain words"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    train_tokenizer(TEXTS, 300).save(tmp_path / "tokenizer.json")
    lines = [msgspec.json.encode({"title": "t", "text": text}) for text in TEXTS]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    return tokmill.build(
        "jsonl", [tmp_path / "in.jsonl"], tmp_path / "s", tokenizer=tmp_path / "tokenizer.json"
    )


def test_it_counts_the_document_and_nothing_of_its_packing(store: Store) -> None:
    expected = [len(f"t\n{text}".encode()) for text in TEXTS]
    assert store.column("bytes").tolist() == expected
    assert statistics(store).bytes_per_token == pytest.approx(sum(expected) / store.tokens)


def test_it_stays_exact_in_a_selection(store: Store, tmp_path: Path) -> None:
    part = tokmill.build("select", [store.path], tmp_path / "part", max_length=6)
    assert 0 < len(part) < len(store)
    kept = [int(record["bytes"]) for record in part]
    assert part.bytes_per_token() == pytest.approx(sum(kept) / part.tokens)
