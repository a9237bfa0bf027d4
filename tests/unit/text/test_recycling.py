"""An engine's cache does not take more memory than it is worth."""

from typing import Any

import numpy as np
import pytest

from tokmill.text.encoding import encoders
from tokmill.text.encoding.encoders import GigatokenEncoder, make_encoder
from tokmill.text.learning.train_tokenizer import train_tokenizer

MIB = 1 << 20


def test_ids_are_the_same_whenever_the_engine_is_made_anew(
    corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first text takes is no growth, and memory that was given back is room again."""
    tokenizer = train_tokenizer(corpus.texts[:60], 600, ["<|endoftext|>"])
    monkeypatch.setattr(encoders, "_STEP", 1000)
    texts = [*corpus.texts[:80], "", "x" * 5000, "", "end"]
    encoder = make_encoder(tokenizer.to_json(), engine="gigatoken")
    assert isinstance(encoder, GigatokenEncoder)
    made: list[object] = []
    begin = encoder._engine

    def engine() -> Any:
        made.append(None)
        return begin()

    monkeypatch.setattr(encoder, "_engine", engine)
    monkeypatch.setattr(encoders, "resident_bytes", lambda: 900 * MIB)
    wanted = encoder(texts)
    assert len(wanted[1]) == len(texts) and not made
    sizes = iter(i for _ in range(1 << 20) for i in (500 * MIB, 500 * MIB + encoders._GROWTH + 1))
    monkeypatch.setattr(encoders, "resident_bytes", lambda: next(sizes))
    again = encoder(texts)
    assert len(made) > 3, "it was looked at after each few texts"
    for mine, theirs in zip(again, wanted, strict=True):
        assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype
