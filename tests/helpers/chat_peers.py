"""Chats as Hugging Face transformers encodes them: ids and the mask of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokmill.text.learning.train_tokenizer import train_tokenizer
from tokmill.text.tokenizers.tokenizer import Tokenizer

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
WORDS = ["hello there", "the answer is 42.", "Größe für alle: 早上好 😀", "user\nassistant\nsystem"]


def tokenizer(pattern: str = "gpt2", size: int = 330) -> Tokenizer:
    """A small byte-level tokenizer with the special tokens of all built-in templates."""
    return train_tokenizer(WORDS * 50, size, SPECIALS, pattern=pattern)


def peer(path: Path, **names: str) -> Any:
    """The same tokenizer in transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(path), **names)


def encoded(
    peer_: Any, template: str, chats: Sequence[Any], masks: bool = True, **more: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """(ids, masks) of chats by `apply_chat_template`."""
    ids, learned = [], []
    for chat in chats:
        found = peer_.apply_chat_template(
            chat,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=masks,
            **more,
        )
        ids.append(list(found["input_ids"]))
        if masks:
            learned.append(list(found["assistant_masks"]))
    return ids, learned
