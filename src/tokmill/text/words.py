"""Whole words as a vocabulary: a tokenizer.json whose tokens are what stands between blanks.

Format of the files: a `vocab.txt` holds a word per line, and the number of the line is its id.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokmill.errors import TokmillError, UsageError
from tokmill.files import machine_errors
from tokmill.text.tokenizer_json import added_token
from tokmill.text.wordpiece import INSIDE, SPECIALS, vocab_lines

MOST_WORDS = 1 << 20
"""Words of a vocabulary; each has a vector in a model."""


WORD = re.compile(r"(?:\S|[\x1c-\x1f])+")
"""What stands between white space of Unicode, which U+001C to U+001F are not (`tokenizers`)."""


class WordList(NamedTuple):
    """The words of a file, and what was not as it should be."""

    ids: dict[str, int]
    repeated: int
    """Lines whose word stands in a later line too; that one is its id, as in BERT's own reader."""
    missing: list[str]
    """Special tokens that the file lacks; they got the ids after its last line."""
    empty: int = 0
    """Lines without a word, the end of the file apart."""


def read_words(path: Path) -> WordList:
    """Read a `vocab.txt`; raises `TokmillError` for one that is no text, or holds no word."""
    with machine_errors("read", path):
        raw = path.read_bytes()
    lines = vocab_lines(raw, path)
    ids = {word: number for number, word in enumerate(lines) if word}
    if not ids:
        raise TokmillError("the file lists no word", where=str(path), hint="a word per line")
    held = len(lines) - lines.count("")
    missing = [token for token in SPECIALS if token not in ids]
    first = max(ids.values()) + 1
    ids |= {token: first + number for number, token in enumerate(missing)}
    # What stands after the last word are ends of lines.
    empty = lines[:first].count("")
    return WordList(ids, held - (len(ids) - len(missing)), missing, empty)


def count_words(lines: Iterable[Sequence[str]], min_count: int) -> dict[str, int]:
    """Return the ids of the words of lines, the special tokens first, then the most frequent.

    Words that stand less often than `min_count` are left out. Raises `UsageError` for more than a
    million words, of which most are addresses and numbers.
    """
    counts: Counter[str] = Counter()
    for some in lines:
        for line in some:
            counts.update(WORD.findall(line))
        if len(counts) > 4 * MOST_WORDS:
            raise _too_many(len(counts))
    kept = [(-n, word) for word, n in counts.items() if n >= min_count and word not in SPECIALS]
    if len(kept) > MOST_WORDS:
        raise _too_many(len(kept))
    return {word: number for number, word in enumerate((*SPECIALS, *(w for _, w in sorted(kept))))}


def _too_many(count: int) -> UsageError:
    return UsageError(
        f"there are {count:,} different words, and {MOST_WORDS:,} is the most",
        hint="--min-count 5 leaves rare ones out; or learn parts of words: tokmill tokenizer train "
        "… --model wordpiece, then --tokenizer",
    )


def tokenizer_of_words(ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of a tokenizer.json for words; `[UNK]` stands for all others."""
    added = [added_token(number, token) for token, number in ids.items() if token in SPECIALS]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        # It writes a blank between words.
        "decoder": {"type": "WordPiece", "prefix": INSIDE, "cleanup": False},
        "model": {"type": "WordLevel", "vocab": dict(ids), "unk_token": "[UNK]"},
    }
