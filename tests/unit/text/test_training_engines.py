"""The engine that trains is chosen by what it costs, and Ctrl-C ends both."""

from __future__ import annotations

from typing import Any

import pytest

from tokmill.text import train
from tokmill.text.train import train_tokenizer

pytest.importorskip("gigatoken", reason="needs the extra text")
TEXTS = ["".join(chr(97 + (i * j) % 26) for j in range(2, 9)) + f" {i}" for i in range(600)]


def engines_of(monkeypatch: pytest.MonkeyPatch, vocab_size: int, **more: Any) -> list[str]:
    used: list[str] = []
    library = train._with_tokenizers

    def seen(*arguments: Any) -> Any:
        used.append("tokenizers")
        return library(*arguments)

    monkeypatch.setattr(train, "_with_tokenizers", seen)
    train_tokenizer(TEXTS, vocab_size, [], **more)
    return used


def test_gigatoken_trains_where_words_are_many_and_tokenizers_where_ids_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert engines_of(monkeypatch, 300) == []
    assert engines_of(monkeypatch, 900) == ["tokenizers"]


def test_an_error_in_the_thread_is_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        yield "some text"
        raise ValueError("from the texts")

    with pytest.raises(ValueError, match="from the texts"):
        train._with_tokenizers(fails(), 300, [], train.GPT2)


def test_both_engines_give_one_tokenizer() -> None:
    made = [train_tokenizer(TEXTS, 330, [], engine=e).to_json() for e in ("auto", "tokenizers")]
    assert made[0] == made[1]
