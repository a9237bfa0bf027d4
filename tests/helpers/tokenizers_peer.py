"""What Hugging Face's `tokenizers` makes of whole texts: trained merges, ids and words."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_json import without_specials

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


def reference_ids(tokenizer: Tokenizer, text: str, specials: str = "special") -> list[int]:
    """Return the ids of a text, read as a whole; see `Tokenizer.encode`."""
    return list(_loaded(tokenizer, specials).encode(text, add_special_tokens=False).ids)


@functools.lru_cache(maxsize=8)
def _loaded(tokenizer: Tokenizer, specials: str) -> Any:
    data = tokenizer.data if specials == "special" else without_specials(tokenizer.data)
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def split_words(pattern: str, text: str) -> list[str]:
    """Return the words of a text: the matches of a pattern and the text between them."""
    step = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return [word for word, _ in step.pre_tokenize_str(text)]
