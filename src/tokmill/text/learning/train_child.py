"""Training with libraries in Rust, in a child process: they print, panic, and ignore Ctrl-C."""

from collections.abc import Iterator
from typing import Any

BORDER = b"\xff"
"""Separates records in a spool file; no UTF-8 text holds this byte."""


def read_spool(path: str) -> Iterator[str]:
    with open(path, "rb") as handle:
        rest = b""
        while block := handle.read(1 << 22):
            *whole, rest = (rest + block).split(BORDER)
            for record in whole:
                yield record.decode()


def gigatoken(spool: str, vocab_size: int, specials: list[str]) -> list[tuple[bytes, bytes]]:
    import gigatoken

    return gigatoken.train_bpe(
        gigatoken.TextFileSource([spool], separator=BORDER), vocab_size, specials, "huggingface"
    )[1]


def tokenizers(spool: str, vocab_size: int, specials: list[str], pattern: str | None) -> str:
    """Train with Hugging Face `tokenizers` and return its tokenizer.json; None: GPT-2's pattern."""
    import tokenizers as library

    from tokmill.text.encoding.guards import no_panic

    steps = library.pre_tokenizers
    words: Any = steps.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        split = steps.Split(library.Regex(pattern), "isolated")
        byte_level = steps.ByteLevel(add_prefix_space=False, use_regex=False)
        words = steps.Sequence([split, byte_level])
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = words
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=steps.ByteLevel.alphabet(),
        show_progress=False,
    )
    with no_panic():
        tokenizer.train_from_iterator(read_spool(spool), trainer)
    return tokenizer.to_str()
