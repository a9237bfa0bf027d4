"""Training with libraries in Rust, in a child process: they print, panic, and ignore Ctrl-C."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

BORDER = b"\xff"
"""Separates records in a spool file; no UTF-8 text holds this byte."""
MOST_PLACES = 1 << 23
"""Ids of all distinct words above which Python does not train: it would take minutes, and 80 bytes
each."""

Merges = list[tuple[bytes, bytes]]


def read_spool(path: str) -> Iterator[str]:
    for block in _blocks(path, 1 << 22):
        for record in block.split(BORDER):
            yield record.decode()


def _blocks(path: str, size: int) -> Iterator[bytes]:
    with open(path, "rb") as handle:
        rest = b""
        while block := handle.read(size):
            whole, border, rest = (rest + block).rpartition(BORDER)
            if border:
                yield whole


def gigatoken(spool: str, vocab_size: int, specials: list[str]) -> Merges:
    import gigatoken

    return gigatoken.train_bpe(
        gigatoken.TextFileSource([spool], separator=BORDER), vocab_size, specials, "huggingface"
    )[1]


def mixed(spool: str, vocab_size: int, specials: list[str], first: int) -> Merges | None:
    """Learn `first` ids with gigatoken, which is slow when most pairs have been joined, the others
    in Python, which is slow before.

    None if two merges make the same token, which no encoder allows, or if there are more ids than
    `MOST_PLACES`.
    """
    from gigatoken import Tokenizer
    from gigatoken.gigatoken_rs import pretokenized_counts

    from tokmill.text.learning.bpe import train_words
    from tokmill.text.tokenizers.tokenizer_json import BYTE_ORDER, byte_level, canonical

    words: Counter[bytes] = Counter()
    for block in _blocks(spool, 1 << 26):
        words.update(dict(pretokenized_counts(block, BORDER)))
    known = gigatoken(spool, first, specials) if first > 256 + len(specials) else []
    tokens = [bytes([byte]) for byte in BYTE_ORDER] + [left + right for left, right in known]
    if len({*tokens}) < len(tokens):
        return None
    engine = Tokenizer.from_json(canonical(byte_level(dict(enumerate(tokens)), known, {})))
    arrays = [engine.encode(word) for word in words]
    if sum(map(len, arrays)) > MOST_PLACES:
        return None
    spelled = ((ids + len(specials)).tolist() for ids in arrays)
    return train_words(words, vocab_size, specials, "first", known, spelled)[1]


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
