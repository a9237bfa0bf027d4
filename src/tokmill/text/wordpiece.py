"""WordPiece with BERT's words: a `vocab.txt` as a tokenizer.json.

Text is cleaned of control characters, put into lower case and stripped of accents (of vocabularies
without capital letters), and cut at white space, punctuation and around each CJK character. Each
word becomes the longest tokens that fit, from the left; those inside of a word begin with `##`.
A word without such tokens, or of more than 100 characters, is `[UNK]`. Source: `tokenization.py` of
google-research/bert; format of tokenizer.json: Hugging Face `tokenizers`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokmill.errors import TokmillError
from tokmill.text import tokenizer_json as files

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
