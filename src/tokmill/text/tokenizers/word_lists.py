"""WordPiece with BERT's words: a `vocab.txt` as a tokenizer.json.

Text is cleaned of control characters, put into lower case and stripped of accents (of vocabularies
without capital letters), and cut at white space, punctuation and around each CJK character. Each
word becomes the longest tokens that fit, from the left; those inside of a word begin with `##`.
A word without such tokens, or of more than 100 characters, is `[UNK]`. Source: `tokenization.py` of
google-research/bert; format of tokenizer.json: Hugging Face `tokenizers`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import machine_errors
from tokmill.text.tokenizers import tokenizer_json as files
from tokmill.text.tokenizers.tokenizer_json import added_token

INSIDE = "##"
"""Prefix of tokens inside of a word."""
LONGEST = 100
"""Characters of a word at most; a longer one is `[UNK]`."""
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of BERT, in the order of their ids in a vocabulary that is trained."""


def vocab_lines(raw: bytes, path: Path) -> list[str]:
    """Return the lines of a `vocab.txt`, stripped of white space as in BERT's own reader."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokmillError(
            f"a vocab.txt is text in UTF-8: {error.reason}",
            where=f"{path}: byte {error.start}",
            hint="copy the file again",
        ) from None
    return [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


def read_vocab_txt(raw: bytes, path: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a tokenizer.json for a `vocab.txt`: a token per line, the line its id.

    The file does not state whether text is converted to lower case. A `tokenizer_config.json`
    beside it does (`said`); without it, capital letters are kept if the vocabulary has some. If a
    token occurs twice, its last line is its id, as in BERT's own reader.
    """
    vocab = {token: number for number, token in enumerate(vocab_lines(raw, path)) if token}
    if "[UNK]" not in vocab:
        raise TokmillError(
            "the file has no token [UNK], which stands for words that have no tokens",
            where=str(path),
            hint="a vocab.txt of WordPiece has a token per line, [UNK] among them",
        )
    capital = any(t != t.lower() for t in vocab if not re.fullmatch(r"\[.*\]", t))
    lower = said.get("do_lower_case")
    return tokenizer_data(
        vocab,
        lower=lower if isinstance(lower, bool) else not capital,
        chinese=said.get("tokenize_chinese_chars") is not False,
        accents=said.get("strip_accents"),
    )


def tokenizer_data(
    vocab: Mapping[str, int],
    *,
    lower: bool,
    chinese: bool = True,
    accents: object = None,
    more: Collection[str] = (),
) -> dict[str, Any]:
    """Return the content of a tokenizer.json.

    Args:
        vocab: token → id; those of `SPECIALS` become special tokens.
        lower: whether text is put into lower case.
        chinese: whether each CJK character is a word.
        accents: whether accents are taken off; None: where text is put into lower case.
        more: further special tokens.
    """
    added = [
        files.added_token(number, token)
        for token, number in sorted(vocab.items(), key=lambda item: item[1])
        if token in SPECIALS or token in more
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": chinese,
            "strip_accents": accents if isinstance(accents, bool) else None,
            "lowercase": lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": files.template(["[CLS]"], ["[SEP]"], vocab)
        if "[CLS]" in vocab and "[SEP]" in vocab
        else None,
        "decoder": {"type": "WordPiece", "prefix": INSIDE, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": INSIDE,
            "max_input_chars_per_word": LONGEST,
            "vocab": dict(vocab),
        },
    }


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
