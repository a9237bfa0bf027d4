"""The reference of encoders: the steps of a tokenizer.json in plain Python, exact and slow.

The engines of `text.encoding` are tested against it. It knows byte-level BPE (GPT-2, GPT-4,
Llama 3 and similar) and SentencePiece BPE with byte fallback (Llama 2). An unknown step is an error
that names it; no step is ever skipped.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from reference_patterns import compile_pattern, split_words
from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.text.encoding.cutting import pieces, segments
from tokmill.text.encoding.encoders import no_token
from tokmill.text.encoding.guards import no_panic
from tokmill.text.tokenizers import tokenizer_json as files
from tokmill.text.tokenizers.patterns import GPT2, safe_cut
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_files import INSIDE, LONGEST

Normalizer = Callable[[str, bool, bool], str]
"""(text, is it the first of a stretch between special tokens, is it the last) → text."""
Splitter = Callable[[str, bool], Iterator[str]]

_CACHED = 1 << 11
"""Words whose ids are cached: about 0.5 MB, as `encode_iterable` promises constant memory."""


class ReadableEncoder:
    """Text → ids for one tokenizer.json.

    Raises `TokmillError` when the file has a step that is not known here.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.where = where
        model = data["model"]
        self._check_model(model)
        self.vocab: dict[str, int] = model["vocab"]
        self.unknown = self.vocab.get(model.get("unk_token") or "")
        self.fuse_unknown = bool(model.get("fuse_unk"))
        self.byte_fallback = bool(model.get("byte_fallback"))
        self.ignore_merges = bool(model.get("ignore_merges"))
        self.ranks: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, (left, right) in enumerate(model["merges"]):
            # Of a pair that stands twice, `tokenizers` takes the last place.
            self.ranks[self._merge(left, right)] = (rank, self.vocab[left + right])
        self.normalizers = [
            self._normalizer(step) for step in files.flatten(data.get("normalizer"), "normalizers")
        ]
        self.is_byte_level = False
        self.splitters = [
            self._splitter(step)
            for step in files.flatten(data.get("pre_tokenizer"), "pretokenizers")
        ]
        if not (self.is_byte_level or self.byte_fallback):
            raise self._unknown("a model that is neither byte-level nor has byte fallback")
        self.added, self.later = self._added(data)
        self.safe_places = None if self.later else self._safe_places(data)
        self._words: dict[str, list[int]] = {}

    def encode(self, chunks: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of text that arrives in chunks, some at a time.

        The ids do not depend on the chunks. Names of added tokens in the text become these tokens
        (with a file of `tokenizer_json.without_specials`, names of special tokens do not).
        """
        tokens = self.added
        before_special = True
        held: str | None = None
        for piece, is_special in segments(chunks, tokens, self.safe_places):
            if held is not None:
                yield self._stretch(held, before_special, is_special)
                before_special = False
                held = None
            if is_special:
                before_special = True
                yield [tokens[piece]]
            else:
                held = piece
        if held is not None:
            yield self._stretch(held, before_special, True)

    def _stretch(self, text: str, first: bool, last: bool) -> list[int]:
        utf8(text)
        for normalize in self.normalizers:
            text = normalize(text, first, last)
        ids: list[int] = []
        for piece, is_added in pieces(text, self.later):
            if is_added:
                ids.append(self.later[piece])
            else:
                for word in self._cut(piece, first):
                    ids.extend(self._word(word))
            first = True
        return ids

    def _cut(self, text: str, first: bool) -> Iterable[str]:
        """Return the words of normalized text without added tokens."""
        words: Iterable[str] = [text] if text else []
        for place, split in enumerate(self.splitters):
            words = [
                piece
                for number, word in enumerate(words)
                for piece in split(word, first or place > 0 or number > 0)
            ]
        return words

    def _word(self, word: str) -> list[int]:
        known = self._words.get(word)
        if known is None:
            known = self._merged(word)
            if len(self._words) < _CACHED and len(word) < 64:
                self._words[word] = known
        return known

    def _merged(self, word: str) -> list[int]:
        raw = utf8(word)
        spelled = files.alias(raw) if self.is_byte_level else word
        if self.ignore_merges and spelled in self.vocab:
            return [self.vocab[spelled]]
        units: list[int] = []
        after_unknown = False
        for unit in spelled:
            number = self.vocab.get(unit)
            if number is not None:
                units.append(number)
                after_unknown = False
                continue
            fallback = [self.vocab.get(f"<0x{byte:02X}>") for byte in unit.encode()]
            if self.byte_fallback and None not in fallback:
                units.extend(number for number in fallback if number is not None)
                after_unknown = False
            elif self.unknown is None:
                raise no_token(unit, self.where)
            else:
                if not (after_unknown and self.fuse_unknown):
                    units.append(self.unknown)
                after_unknown = True
        return merge_ids(units, self.ranks)

    def _merge(self, left: str, right: str) -> tuple[int, int]:
        for token in (left, right, left + right):
            if token not in self.vocab:
                raise TokmillError(
                    f"the merge {left!r} {right!r} needs the token {token!r}, which is not in the "
                    "vocabulary",
                    where=self.where,
                    hint="the vocabulary and the merges are of different tokenizers",
                )
        return self.vocab[left], self.vocab[right]

    def _safe_places(self, data: Mapping[str, Any]) -> re.Pattern[str] | None:
        steps = files.flatten(data.get("pre_tokenizer"), "pretokenizers")
        if self.byte_fallback and not steps:
            # No token has a space inside, so nothing is merged across the place before a space.
            # Spaces that a normalizer joins or removes are then in the same part.
            inner = re.compile(f"[^{files.SPACE}]{files.SPACE}")
            known = (files.SPACE, " ", "")
            if all(
                step.get("content", step.get("prepend")) in known
                for step in files.flatten(data.get("normalizer"), "normalizers")
            ) and not any(map(inner.search, self.vocab)):
                return re.compile(f"(?<=[^ {files.SPACE}])(?= )")
            return None
        # Without a normalizer the first pre-tokenizer sees the original text, and later steps see
        # its pieces. In other cases there are no safe places.
        if self.normalizers or not steps:
            return None
        if steps[0]["type"] == "Split":
            return safe_cut(steps[0]["pattern"]["Regex"])
        return safe_cut(GPT2) if steps[0].get("use_regex", True) else None

    def _check_model(self, model: Mapping[str, Any]) -> None:
        if model["type"] != "BPE":
            raise self._unknown(f"the model {model['type']!r}")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise self._unknown(f"{key} = {model[key]!r}")

    def _normalizer(self, step: Mapping[str, Any]) -> Normalizer:
        kind = step["type"]
        if kind == "Prepend":
            return lambda text, first, last: step["prepend"] + text if first and text else text
        if kind == "Replace":
            return _replacer(step["pattern"], step["content"])
        if kind in ("NFC", "NFD", "NFKC", "NFKD"):
            form = getattr(plugins.require("tokenizers").normalizers, kind)()
            return lambda text, first, last: str(form.normalize_str(text))
        raise self._unknown(f"the normalizer {kind!r}")

    def _splitter(self, step: Mapping[str, Any]) -> Splitter:
        kind = step["type"]
        if self.is_byte_level:
            # It would see the spelling of bytes, not the text.
            raise self._unknown(f"the pre-tokenizer {kind!r} after ByteLevel")
        if kind == "ByteLevel":
            self.is_byte_level = True
            pattern = GPT2 if step.get("use_regex", True) else None
            if pattern:
                compile_pattern(pattern)
            return _byte_level(pattern, bool(step.get("add_prefix_space", True)))
        if kind == "Split":
            inverted = bool(step.get("invert"))
            if (step["behavior"], inverted) not in (("Isolated", False), ("Removed", True)):
                raise self._unknown(f"the Split with behaviour {step['behavior']!r}")
            if "Regex" not in step["pattern"]:
                raise self._unknown("the Split at a fixed string")
            pattern = step["pattern"]["Regex"]
            compile_pattern(pattern)
            if inverted:
                return lambda text, first: (
                    m[0] for m in compile_pattern(pattern).finditer(text) if m[0]
                )
            return lambda text, first: split_words(pattern, text)
        raise self._unknown(f"the pre-tokenizer {kind!r}")

    def _added(self, data: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
        """Return the added tokens that are found in the text, and those of the normalized text."""
        found: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for token in data.get("added_tokens") or []:
            flags = [k for k in ("lstrip", "rstrip", "single_word") if token.get(k)]
            if flags:
                raise self._unknown(f"the added token {token['content']!r} with {flags[0]}")
            text = token["content"]
            if later := bool(token.get("normalized")):
                for normalize in self.normalizers:
                    text = normalize(text, True, True)
            if token["content"] and not text:
                raise self._unknown(
                    f"the added token {token['content']!r}, of which nothing is left"
                )
            found[later][text] = token["id"]
        # Without a normalizer a text may be cut while it is read, if all are of one sort.
        return found if self.normalizers or found[0] else (found[1], {})

    def _unknown(self, what: str) -> TokmillError:
        return TokmillError(
            f"the reference does not know {what}",
            where=self.where,
            hint="`Tokenizer.encode` runs it",
        )


def utf8(text: str) -> bytes:
    """Return text as UTF-8; raises `TokmillError` for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokmillError(
            f"the text holds a lone surrogate {text[error.start]!r}, which no UTF-8 has",
            hint="read the text with errors='replace'",
        ) from None


def _replacer(pattern: Mapping[str, str], content: str) -> Normalizer:
    if pattern.get("Regex") == files.OUTER_SPACES and not content:
        return _strip_spaces
    if "String" in pattern:
        return lambda text, first, last: text.replace(pattern["String"], content)
    regex = pattern["Regex"]
    compile_pattern(regex)

    def replace(text: str, first: bool, last: bool) -> str:
        parts, end = [], 0
        for match in compile_pattern(regex).finditer(text):
            parts += [text[end : match.start()], content]
            end = match.end()
        return "".join([*parts, text[end:]])

    return replace


def _strip_spaces(text: str, first: bool, last: bool) -> str:
    text = text.lstrip(" ") if first else text
    return text.rstrip(" " + files.SPACE) if last else text


def _byte_level(pattern: str | None, prefix_space: bool) -> Splitter:
    def split(text: str, first: bool) -> Iterator[str]:
        if prefix_space and first and text and not text.startswith(" "):
            text = " " + text
        return split_words(pattern, text) if pattern else iter([text] if text else [])

    return split


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
                loaded = library.Tokenizer.from_str(files.canonical(bare).decode())
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
        self.safe_places = re.compile(r"(?=[ \n])") if known and not self.later else None

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
    """Text → ids of a tokenizer.json with whole words."""

    def _merged(self, word: str) -> list[int]:
        """Return the id of one word."""
        assert self.unknown is not None
        return [self.vocab.get(word, self.unknown)]


WORDS = {"WordPiece": ReadableWordPiece, "WordLevel": ReadableWords}
"""Models whose text is cut into words by steps of its own."""


def readable_encoder(data: Mapping[str, Any], where: str) -> ReadableEncoder:
    """Return the readable encoder for the model of a tokenizer.json."""
    return WORDS.get(data["model"]["type"], ReadableEncoder)(data, where)


def merge_ids(ids: Sequence[int], ranks: Mapping[tuple[int, int], tuple[int, int]]) -> list[int]:
    """Merge a word's units: always the pair with the smallest rank; among equals, the leftmost.

    Args:
        ids: the ids of a word's bytes (or characters).
        ranks: pair of ids → (rank, id of the joined token).

    Returns:
        The remaining ids. Takes n log n time, so a word of a million letters is no problem.
    """
    symbols: list[int] = list(ids)
    count = len(symbols)
    after = list(range(1, count + 1))
    before = list(range(-1, count - 1))
    gone = bytearray(count)
    queue = [
        (ranks[pair][0], place)
        for place, pair in enumerate(zip(symbols, symbols[1:], strict=False))
        if pair in ranks
    ]
    heapq.heapify(queue)
    while queue:
        rank, left = heapq.heappop(queue)
        right = after[left]
        if gone[left] or right >= count:
            continue
        found = ranks.get((symbols[left], symbols[right]))
        if found is None or found[0] != rank:
            continue
        symbols[left] = found[1]
        gone[right] = 1
        after[left] = after[right]
        if after[left] < count:
            before[after[left]] = left
        for place in (before[left], left):
            if place >= 0 and after[place] < count:
                found = ranks.get((symbols[place], symbols[after[place]]))
                if found is not None:
                    heapq.heappush(queue, (found[0], place))
    return [symbol for symbol, is_gone in zip(symbols, gone, strict=True) if not is_gone]


def reference_ids(tokenizer: Tokenizer, text: str, specials: str = "special") -> list[int]:
    """Return the ids of a text; see `Tokenizer.encode`."""
    data = tokenizer.data
    if specials == "plain":
        data = files.without_specials(data)
    return [i for ids in readable_encoder(data, tokenizer.where).encode([text]) for i in ids]
