"""Byte-level BPE by Hugging Face's `tokenizers`, as a script of twenty lines trains it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")


def merges_and_ids(
    texts: list[str] | Path, size: int, specials: list[str], pattern: str | None = None
) -> tuple[list[list[str]], dict[str, int]]:
    """Return merges, and token → id, learned from texts or from the lines of a file."""
    steps = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = (
        steps.ByteLevel(add_prefix_space=False)
        if pattern is None
        else steps.Sequence(
            [
                steps.Split(tokenizers.Regex(pattern), "isolated"),
                steps.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=specials,
        initial_alphabet=steps.ByteLevel.alphabet(),
        show_progress=False,
    )
    if isinstance(texts, Path):
        tokenizer.train([str(texts)], trainer)
    else:
        tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["merges"], model["vocab"]
