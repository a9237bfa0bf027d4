"""The engines that encode text in builds, with one interface and equal ids.

gigatoken is used if its ids are known to equal those of Hugging Face `tokenizers`: for byte-level
BPE with the patterns of `text.tokenizers.patterns`, without steps that the two handle differently.
Otherwise `tokenizers` is used. The two have different versions of Unicode, so what stands about
characters newer than Unicode 16.0 is always encoded by `tokenizers`.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokmill import plugins
from tokmill.base.bounds import resident_bytes
from tokmill.base.errors import MissingExtraError, TokmillError, UsageError, nearest
from tokmill.text.encoding import guards
from tokmill.text.encoding.guards import no_panic
from tokmill.text.tokenizers import tokenizer_json as files
from tokmill.text.tokenizers.patterns import GPT2, safe_cut, segments

Array = NDArray[Any]

_LONG = 1 << 20
"""Characters above which a text is encoded in parts by `tokenizers`."""
_STEP = 1 << 20
"""Bytes that gigatoken encodes until its memory is measured, about."""
_STRETCH = 1 << 12
"""Characters of a text that are looked at together for those that gigatoken does not know."""
_GROWTH = 128 << 20
"""Bytes by which the process may grow until gigatoken's engine is replaced, whose cache grows with
the number of distinct words."""
_AT_ONCE = 1 << 19
"""Characters that `tokenizers` encodes at a time, and 64 more a text: its Encodings need about 100
bytes a token, and a kilobyte each."""

NO_TOKEN = "\ufdd0no token"
"""Unknown token of models that have none: it is in no vocabulary."""
SPECIALS_IN_TEXT = ("plain", "special", "reject")


class BatchEncoder(Protocol):
    """Encodes many texts at a time into one array of ids."""

    name: str
    """`gigatoken` or `tokenizers`."""

    def __call__(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Encode texts.

        Returns:
            ids (uint32, flat) and lengths (int64, one a text; an empty text has 0).

        Raises:
            TokmillError: a text holds a lone surrogate.
        """
        ...

    def encode_utf8(self, data: Array, offsets: Array) -> tuple[Array, Array]:
        """Encode texts in one buffer.

        Args:
            data: uint8, valid UTF-8 (the engines handle invalid UTF-8 differently).
            offsets: int64 (n + 1), text i is `data[offsets[i]:offsets[i + 1]]`; it begins and ends
                between characters.
        """
        ...


def make_encoder(
    tokenizer_json: bytes,
    *,
    engine: str = "auto",
    specials_in_text: str = "plain",
    threads: bool = True,
) -> BatchEncoder:
    """Load a tokenizer into an engine.

    Args:
        tokenizer_json: the content of a tokenizer.json.
        engine: `auto` uses gigatoken if it gives the ids of `tokenizers`, else `tokenizers`.
        specials_in_text: with `plain` and `reject`, names of special tokens in a text are text
            (the caller checks for `reject`); with `special` they become the tokens.
        threads: use all cores; otherwise only the calling thread.

    Tokens of the post-processor are never added (`tokenizer_json.template_tokens`).
    """
    if engine != "auto" and engine not in plugins.ENCODERS:
        raise UsageError(
            f"no engine is called {engine!r}", hint=nearest(engine, ("auto", *plugins.ENCODERS))
        )
    if specials_in_text not in SPECIALS_IN_TEXT:
        raise UsageError(
            f"specials_in_text = {specials_in_text!r} is not known",
            hint=nearest(specials_in_text, SPECIALS_IN_TEXT),
        )
    data = files.parse(tokenizer_json, "tokenizer.json")
    data = {**data, "post_processor": None, "truncation": None, "padding": None}
    if specials_in_text != "special":
        data = files.without_specials(data)
    if data["model"].get("dropout"):
        raise TokmillError(
            f"the model has dropout = {data['model']['dropout']}: the same text would get other "
            "ids each time",
            where="tokenizer.json",
            hint='set "dropout" to null',
        )
    missing: MissingExtraError | None = None
    for name in plugins.ENCODERS if engine == "auto" else (engine,):
        kind = plugins.load(plugins.ENCODERS, name)
        if not (reason := kind.why_not(data)):
            try:
                return kind(data, threads)
            except MissingExtraError as error:
                missing = error
        elif engine != "auto":
            raise TokmillError(
                f"{name} does not give the ids of this tokenizer: {reason}",
                where="tokenizer.json",
                hint=f"--engine auto (or {', '.join(e for e in plugins.ENCODERS if e != name)})",
            )
    assert missing is not None, "the last engine runs every tokenizer"
    raise missing


class TokenizersEncoder:
    """Hugging Face `tokenizers`, for every tokenizer.json."""

    name = "tokenizers"

    @staticmethod
    def why_not(data: Mapping[str, Any]) -> str:
        """Return why this engine does not give the ids of a tokenizer.json: it always does."""
        return ""

    def __init__(self, data: Mapping[str, Any], threads: bool) -> None:
        library = plugins.require("tokenizers")
        self.threads = threads
        self._data = data
        if data["model"]["type"] == "BPE" and data["model"].get("unk_token") is None:
            # Characters without a token would be left out in silence; this is an error then.
            data = {**data, "model": {**data["model"], "unk_token": NO_TOKEN}}
        try:
            with no_panic():
                self.tokenizer = library.Tokenizer.from_str(_as_json(data))
        except Exception as error:
            raise TokmillError(
                f"this tokenizer.json cannot be loaded: {error}",
                where="tokenizer.json",
                hint="is it written by a newer version of tokenizers?",
            ) from None
        for token, number in files.added_tokens(data).items():
            given = self.tokenizer.token_to_id(token)
            if given != number:
                raise TokmillError(
                    f"the added token {token!r} says id {number}, but tokenizers gives it {given}",
                    where="tokenizer.json",
                    hint="put the token into the model's vocabulary with its id",
                )

    def __call__(self, texts: Sequence[str]) -> tuple[Array, Array]:
        texts = list(texts)
        if any(len(text) > _LONG for text in texts) and self.cuts[1] is not None:
            return self._in_parts(texts)
        ends = np.cumsum([len(text) + 64 for text in texts])
        cuts = np.searchsorted(ends, np.arange(_AT_ONCE, ends[-1] if len(ends) else 0, _AT_ONCE))
        places = [0, *np.unique(cuts + 1).tolist(), len(texts)]
        parts = [
            self._encode(texts[first:last])
            for first, last in zip(places, places[1:], strict=False)
            if first < last or len(places) == 2
        ]
        if len(parts) == 1:
            return parts[0]
        ids, lengths = zip(*parts, strict=True)
        return np.concatenate(ids), np.concatenate(lengths)

    @functools.cached_property
    def cuts(self) -> tuple[dict[str, int], re.Pattern[str] | None]:
        return places_to_cut(self._data)

    def _in_parts(self, texts: list[str]) -> tuple[Array, Array]:
        """Encode long texts in parts, cut at safe places, to bound the memory of Encodings."""
        ids: list[Array] = []
        lengths: list[int] = []
        for text in texts:
            blocks = (text[start : start + _LONG] for start in range(0, len(text), _LONG))
            pieces = segments(blocks, *self.cuts)
            parts = [self._encode([piece])[0] for piece, _ in pieces]
            ids.extend(parts)
            lengths.append(sum(map(len, parts)))
        flat = np.concatenate(ids) if ids else np.zeros(0, np.uint32)
        return flat, np.array(lengths, np.int64)

    def _encode(self, texts: list[str]) -> tuple[Array, Array]:
        parts = [np.array(encoding.ids, np.uint32) for encoding in self.encodings(texts)]
        lengths = np.array([len(part) for part in parts], np.int64)
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32), lengths

    def encodings(self, texts: Sequence[str]) -> Sequence[Any]:
        """Return the `Encoding` of each text, without its offsets."""
        try:
            with no_panic():
                if not self.threads:
                    return [self.tokenizer.encode(t, add_special_tokens=False) for t in texts]
                return self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            _utf8(texts)
            raise
        except Exception as error:
            if NO_TOKEN in str(error):
                lost = next(
                    filter(self._has_no_token, dict.fromkeys("".join(texts))), "a character"
                )
                raise TokmillError(
                    f"the vocabulary has no token for {lost!r} and no unknown token",
                    where="tokenizer.json",
                    hint="train with all 256 bytes in the vocabulary, or name a token as the "
                    "model's unk_token",
                ) from None
            raise TokmillError(
                f"this tokenizer.json cannot encode a text: {error}",
                where="tokenizer.json",
                hint="a pattern that takes endless time, or a model that lacks its `unk` token, "
                "ends so: correct the file",
            ) from None

    def _has_no_token(self, character: str) -> bool:
        try:
            self.tokenizer.encode(character, add_special_tokens=False)
        except Exception:
            return True
        return False

    def encode_utf8(self, data: Array, offsets: Array) -> tuple[Array, Array]:
        view = memoryview(np.ascontiguousarray(data).data)
        return self([str(view[start:stop], "utf-8") for start, stop in pairwise(offsets.tolist())])


class GigatokenEncoder:
    """gigatoken: byte-level BPE, one text after the other in one thread."""

    name = "gigatoken"

    @staticmethod
    def why_not(data: Mapping[str, Any]) -> str:
        """Return why this engine does not give the ids of a tokenizer.json; "" where it does."""
        return guards.why_not_gigatoken(data)

    def __init__(self, data: Mapping[str, Any], threads: bool) -> None:
        self._library = plugins.require("gigatoken")
        self.threads = threads
        self._data = data
        self._json = _as_json(data)
        self.tokenizer = self._engine()

    def _engine(self) -> Any:
        # Least resident memory after a text was encoded.
        self._least: int | None = None
        with _gigatoken_errors():
            return self._library.Tokenizer.from_json(self._json)

    def __call__(self, texts: Sequence[str]) -> tuple[Array, Array]:
        return self._encode(_utf8(texts))

    def encode_utf8(self, data: Array, offsets: Array) -> tuple[Array, Array]:
        view = memoryview(np.ascontiguousarray(data).data)
        return self._encode([bytes(view[start:stop]) for start, stop in pairwise(offsets.tolist())])

    def _encode(self, texts: Sequence[bytes]) -> tuple[Array, Array]:
        parts = self._each(texts)
        for number in guards.with_newer_characters(texts):
            parts[number] = self._in_stretches(texts[number].decode())
        lengths = np.array([len(part) for part in parts], np.int64)
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32), lengths

    def _each(self, texts: Sequence[bytes]) -> list[Array]:
        # `encode_batch` takes twice the time while the cache is cold, and imports awkward.
        parts = []
        size = 0
        for text in texts:
            with _gigatoken_errors():
                parts.append(self.tokenizer.encode(text))
            size += len(text)
            if size >= _STEP:
                self._bound_memory()
                size = 0
        self._bound_memory()
        return parts

    def _bound_memory(self) -> None:
        now = resident_bytes()
        self._least = now if self._least is None else min(self._least, now)
        if now - self._least > _GROWTH:
            # Free the old engine first: two at a time would need twice the memory.
            self.tokenizer = None
            guards.give_back_memory()
            self.tokenizer = self._engine()

    @functools.cached_property
    def _other(self) -> TokenizersEncoder:
        return TokenizersEncoder(self._data, self.threads)

    def _in_stretches(self, text: str) -> Array:
        """Encode a text with newer characters: only what stands about them by `tokenizers`."""
        blocks = (text[start : start + _STRETCH] for start in range(0, len(text), _STRETCH))
        pieces = [piece for piece, _ in segments(blocks, *self._other.cuts)]
        encoded = _utf8(pieces)
        parts = self._each(encoded)
        for number in guards.with_newer_characters(encoded):
            parts[number] = self._other([pieces[number]])[0]
        return np.concatenate(parts)


def places_to_cut(data: Mapping[str, Any]) -> tuple[dict[str, int], re.Pattern[str] | None]:
    """Return where a text may be cut, so that the ids of its parts are those of the whole.

    Returns:
        The added tokens (token → id) around which it may be cut, and a pattern of further places;
        None if no place between two such tokens is known.
    """
    normalizers = files.flatten(data.get("normalizer"), "normalizers")
    steps = files.flatten(data.get("pre_tokenizer"), "pretokenizers")
    added = [token for token in data.get("added_tokens") or [] if token["content"]]
    strips = any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word"))
    if strips or any(step.get("prepend_scheme") == "first" for step in steps):
        return {}, None
    # Tokens that are not normalized are found first, in the text as it is.
    tokens, later = (
        {t["content"]: t["id"] for t in added if bool(t.get("normalized")) is kind}
        for kind in (False, True)
    )
    if not normalizers and not tokens:
        tokens, later = later, {}
    prefixed = any(s.get("add_prefix_space", s["type"] == "ByteLevel") for s in steps)
    if later or prefixed or not steps:
        return tokens, None
    kinds = [step["type"] for step in (*normalizers, *steps)]
    if kinds == ["BertNormalizer", "BertPreTokenizer"]:
        # No word holds white space.
        return tokens, re.compile(r"(?=[ \n])")
    if normalizers:
        return tokens, None
    first = steps[0]
    if first["type"] == "Split" and (first["behavior"], bool(first.get("invert"))) in (
        ("Isolated", False),
        ("Removed", True),
    ):
        return tokens, safe_cut(first["pattern"].get("Regex", ""))
    cuts_as_gpt2 = first["type"] == "ByteLevel" and first.get("use_regex", True)
    return tokens, safe_cut(GPT2) if cuts_as_gpt2 else None


def _as_json(data: Mapping[str, Any]) -> str:
    try:
        return msgspec.json.encode(data).decode()
    except UnicodeEncodeError:
        # A lone surrogate in a token: the libraries refuse it with their own message.
        return json.dumps(data)


def utf8_buffer(texts: Sequence[str]) -> tuple[Array, Array]:
    """Return texts as UTF-8 in one buffer: (uint8, offsets int64 (n + 1))."""
    encoded = _utf8(texts)
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


def _utf8(texts: Sequence[str]) -> list[bytes]:
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:
        pass
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokmillError(
                f"the text holds a lone surrogate {text[error.start]!r}, which no UTF-8 has",
                where=f"text {number}, character {error.start}",
                hint="read the text with errors='replace', or reject it",
            ) from None
    raise AssertionError


@contextlib.contextmanager
def _gigatoken_errors() -> Iterator[None]:
    try:
        with no_panic():
            yield
    except Exception as error:
        raise TokmillError(
            f"gigatoken failed: {error}",
            where="tokenizer.json",
            hint="--engine tokenizers runs every tokenizer",
        ) from None
