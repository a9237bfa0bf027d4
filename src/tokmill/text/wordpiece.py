"""WordPiece with BERT's words: a `vocab.txt` as a tokenizer.json, and its ids in plain Python.

Text is cleaned of control characters, put into lower case and stripped of accents (of vocabularies
without capital letters), and cut at white space, punctuation and around each CJK character. Each
word becomes the longest tokens that fit, from the left; those inside of a word begin with `##`.
A word without such tokens, or of more than 100 characters, is `[UNK]`. Source: `tokenization.py` of
google-research/bert; format of tokenizer.json: Hugging Face `tokenizers`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokmill import plugins
from tokmill.errors import TokmillError
from tokmill.text import tokenizer_json as files
from tokmill.text.panics import no_panic
from tokmill.text.readable import ReadableEncoder

INSIDE = "##"
"""Prefix of tokens inside of a word."""
LONGEST = 100
"""Characters of a word at most; a longer one is `[UNK]`."""
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of BERT, in the order of their ids in a vocabulary that is trained."""
BEFORE_SPACE = re.compile(r"(?=[ \n])")
"""Matches places where a text may be cut: no word holds white space."""


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


class ReadableWordPiece(ReadableEncoder):
    """Text → ids of a tokenizer.json with WordPiece.

    Which characters are punctuation, control characters, marks or capitals depends on the version
    of Unicode, and `tokenizers` uses several versions. So words are made by its own normalizer and
    pre-tokenizer; the ids of a word are computed here.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.where = where
        model = data["model"]
        self.vocab: dict[str, int] = model["vocab"]
        self.unknown = self.vocab.get(model.get("unk_token") or "")
        self.inside = str(model.get("continuing_subword_prefix") or INSIDE)
        self.longest = int(model.get("max_input_chars_per_word") or LONGEST)
        if self.unknown is None:
            raise TokmillError(
                "the vocabulary has no unknown token, which words without tokens become",
                where=where,
                hint="add [UNK] to the vocabulary, as unk_token of the model",
            )
        self.normalizers = []
        self._words = {}
        bare = {**data, "added_tokens": [], "post_processor": None}
        library = plugins.require("tokenizers")
        try:
            with no_panic():
                loaded = library.Tokenizer.from_str(_as_text(bare))
        except Exception as error:
            raise TokmillError(
                f"this tokenizer.json cannot be loaded: {error}",
                where=where,
                hint="is it written by a newer version of tokenizers?",
            ) from None
        self._normalizer_step, self._words_step = loaded.normalizer, loaded.pre_tokenizer
        kinds = [(data.get(key) or {}).get("type") for key in ("normalizer", "pre_tokenizer")]
        known = kinds == ["BertNormalizer", "BertPreTokenizer"]
        if self._normalizer_step is not None:
            self.normalizers = [lambda text, first, last: self._normalizer_step.normalize_str(text)]
        self.added, self.later = self._added(data)
        self.safe_places = BEFORE_SPACE if known and not self.later else None

    def _cut(self, text: str, first: bool) -> Iterable[str]:
        if self._words_step is None or not text:
            return [text] if text else []
        return [word for word, _ in self._words_step.pre_tokenize_str(text)]

    def _merged(self, word: str) -> list[int]:
        """Return the ids of one word: the longest tokens that fit, from the left."""
        assert self.unknown is not None
        if len(word) > self.longest:
            return [self.unknown]
        found: list[int] = []
        start = 0
        while start < len(word):
            before = self.inside if start else ""
            stop = len(word)
            while stop > start and before + word[start:stop] not in self.vocab:
                stop -= 1
            if stop == start:
                return [self.unknown]
            found.append(self.vocab[before + word[start:stop]])
            start = stop
        return found


class ReadableWords(ReadableWordPiece):
    """Text → ids of a tokenizer.json with whole words (`tokmill.text.words`)."""

    def _merged(self, word: str) -> list[int]:
        """Return the id of one word."""
        assert self.unknown is not None
        return [self.vocab.get(word, self.unknown)]


WORDS = {"WordPiece": ReadableWordPiece, "WordLevel": ReadableWords}
"""Models whose text is cut into words by steps of its own."""


def readable_encoder(data: Mapping[str, Any], where: str) -> ReadableEncoder:
    """Return the readable encoder for the model of a tokenizer.json."""
    return WORDS.get(data["model"]["type"], ReadableEncoder)(data, where)


def _as_text(data: Mapping[str, Any]) -> str:
    return files.canonical(data).decode()
