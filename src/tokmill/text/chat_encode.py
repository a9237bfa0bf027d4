"""Encode texts of chats with marks: ids, and a mask of the tokens that are learned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tokmill.builds.source import Resources
from tokmill.errors import TokmillError
from tokmill.store.schema import Array
from tokmill.store.strings import ranges
from tokmill.text import tokenizer_json as files
from tokmill.text.chat_sandbox import CLOSE, OPEN
from tokmill.text.chat_templates import BREAK, END, MARKS
from tokmill.text.encoders import TokenizersEncoder, make_encoder

Encoded = tuple[Array, Array, Array, Array]
"""ids (uint32), offsets (int64, chats + 1), learned (uint8, one per token), bytes of each chat."""


def control_tokens(data: Mapping[str, Any], template: str) -> dict[str, int]:
    """Return the tokens that only a template may write: token → id.

    They are the special ones, and other added tokens that the template names.
    """
    return {
        token["content"]: token["id"]
        for token in data.get("added_tokens") or []
        if token["content"] and (token.get("special") or token["content"] in template)
    }


class ChatEncoder:
    """Chats → ids as Hugging Face's tokenizer gives them for the whole text of each."""

    def __init__(self, raw: bytes, template: str, resources: Resources) -> None:
        data = files.parse(raw, "tokenizer.json")
        self.control = control_tokens(data, template)
        added = [
            {**token, "special": token.get("special") or token["content"] in self.control}
            for token in data.get("added_tokens") or []
        ]
        data = {**data, "added_tokens": added}
        self.engine = "tokenizers"
        self.in_segments = _in_segments(data, self.control)
        if self.in_segments:
            self._encoder = make_encoder(
                msgspec.json.encode(data), engine=resources.engine, threads=resources.threads
            )
            self.engine = self._encoder.name
            names = sorted(self.control, key=len, reverse=True)
            marks = [re.escape(mark.encode()) for mark in (OPEN, CLOSE, BREAK, END)]
            self._events = re.compile(b"|".join([*marks, *(re.escape(n.encode()) for n in names)]))
            self._ids = {name.encode(): number for name, number in self.control.items()}
            lengths = {number: len(token) for number, token in files.token_bytes(data).items()}
            lengths |= {number: len(name) for name, number in self._ids.items()}
            self._lengths = np.zeros(max(lengths) + 1, np.int64)
            self._lengths[list(lengths)] = list(lengths.values())
        else:
            bare = {**data, "post_processor": None, "truncation": None, "padding": None}
            self._whole = TokenizersEncoder(bare, resources.threads)
            unknown = data["model"].get("unk_token")
            known = {name: n for name, n in self.control.items() if name != unknown}
            self._known_ids = list(known.values())
            longest = sorted(known, key=len, reverse=True)
            self._known_names = re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    def __call__(self, marked: Sequence[str], last: bool = False) -> Encoded:
        """Encode chats.

        Args:
            marked: texts with `OPEN` … `CLOSE` around what is learned and `BREAK` within names of
                special tokens that are text.
            last: of each chat only the last stretch is learned.
        """
        if not marked:
            none = np.zeros(0, np.int64)
            return none.astype(np.uint32), np.zeros(1, np.int64), none.astype(np.uint8), none
        return (self._segments if self.in_segments else self._texts)(marked, last)

    def plain(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Return (ids, offsets) of texts that are no chats."""
        if self.in_segments:
            ids, lengths = self._encoder(texts)
        else:
            ids, lengths = self._whole(texts)
        return ids, np.concatenate([[0], np.cumsum(lengths)])

    def odd(self, marked: Sequence[str], encoded: Encoded) -> Array:
        """Return which chats hold a special token that their text does not name, bool.

        A normalizer makes such a token of other text (`＜/s＞`, or `[sep]` in lower case).
        """
        if self.in_segments:
            return np.zeros(len(marked), bool)
        ids, offsets, *_ = encoded
        before = np.concatenate([[0], np.cumsum(np.isin(ids, self._known_ids))])
        named = [len(self._known_names.findall(MARKS.sub("", text))) for text in marked]
        odd: Array = np.diff(before[offsets]) > named
        return odd

    def _segments(self, marked: Sequence[str], last: bool) -> Encoded:
        """Encode the text between special tokens in one batch, and insert the special tokens.

        The bytes of a chat's tokens are those of its text, so the place of a token is a sum.
        """
        raw = "".join([text + END for text in marked]).encode()
        found = [(m.start(), m.end(), m.group()) for m in self._events.finditer(raw)]
        begin, end = (np.fromiter((f[i] for f in found), np.int64, len(found)) for i in (0, 1))
        kinds = np.fromiter((_KINDS.get(f[2], _SPECIAL) for f in found), np.int8, len(found))
        special = kinds == _SPECIAL
        numbers = np.fromiter(
            (self._ids[f[2]] for f, is_it in zip(found, special.tolist(), strict=True) if is_it),
            np.uint32,
        )
        # Bytes of text before each event: without marks; and without special tokens too.
        width = end - begin
        gone = np.cumsum(width) - width
        marks = np.cumsum(np.where(special, 0, width)) - np.where(special, 0, width)
        place, inner = begin - marks, begin - gone
        keep = np.ones(len(raw), bool)
        keep[ranges(begin, end - begin)] = False
        content = np.frombuffer(raw, np.uint8)[keep]
        cuts = special | (kinds == _END)
        offsets = np.concatenate([[0], inner[cuts]])
        segment_ids, lengths = self._encoder.encode_utf8(content, offsets)
        # Each segment is followed by a special token, or by the end of the chat.
        extra = special[cuts].astype(np.int64)
        stops = np.cumsum(lengths + extra)
        ids = np.empty(int(stops[-1]), np.uint32)
        is_text = np.ones(len(ids), bool)
        at = stops[special[cuts]] - 1
        is_text[at] = False
        ids[at] = numbers
        ids[is_text] = segment_ids
        tokens = np.concatenate([[0], stops[~special[cuts]]])
        texts = np.concatenate([[0], place[kinds == _END]])
        ends = np.cumsum(self._lengths[ids])
        if not np.array_equal(np.concatenate([[0], ends])[tokens], texts):
            raise TokmillError(
                "the bytes of a chat's tokens are not those of its text",
                where="tokenizer.json",
                hint="the tokenizer changes text in a way that is not known: please report it",
            )
        spans = np.stack([place[kinds == _OPEN], place[kinds == _CLOSE]], axis=1)
        if last:
            spans = _last_of(spans, texts)
        learned = mask(ends - self._lengths[ids], ends, spans)
        return ids, tokens, learned, np.diff(texts)

    def _texts(self, marked: Sequence[str], last: bool) -> Encoded:
        """Encode whole texts with `tokenizers`, whose encodings have the place of each token."""
        plain = [MARKS.sub("", text) for text in marked]
        encodings = self._whole.encodings(plain, places=True)
        ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        learned = []
        for text, encoding in zip(marked, encodings, strict=True):
            spans = _spans(text)[-1:] if last else _spans(text)
            places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            learned.append(mask(places[:, 0], places[:, 1], np.array(spans).reshape(-1, 2)))
        tokens = np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64)
        sizes = np.array([len(text.encode()) for text in plain], np.int64)
        return np.concatenate(ids), tokens, np.concatenate(learned), sizes


_SPECIAL, _OPEN, _CLOSE, _BREAK, _END = range(5)
_KINDS = {
    mark.encode(): kind
    for mark, kind in ((OPEN, _OPEN), (CLOSE, _CLOSE), (BREAK, _BREAK), (END, _END))
}


def mask(begins: Array, ends: Array, spans: Array) -> Array:
    """Return which tokens overlap a span, uint8.

    Args:
        begins: where tokens begin, ascending.
        ends: where they end.
        spans: (n, 2) places, in order, that do not overlap.
    """
    spans = spans[spans[:, 0] < spans[:, 1]]
    first = np.searchsorted(ends, spans[:, 0], side="right")
    stop = np.searchsorted(begins, spans[:, 1], side="left")
    change = np.zeros(len(begins) + 1, np.int8)
    np.add.at(change, first, 1)
    np.add.at(change, np.maximum(first, stop), -1)
    learned: Array = (np.cumsum(change, dtype=np.int8)[:-1] > 0).astype(np.uint8)
    return learned


def _last_of(spans: Array, texts: Array) -> Array:
    """Return the last span of each chat; `texts`: where chats begin, and the end of the last."""
    chat = np.searchsorted(texts, spans[:, 0], side="right")
    return spans[np.append(chat[1:] != chat[:-1], True)] if len(spans) else spans


def _spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of characters between marks; the marks are not counted."""
    spans, begin = [], 0
    for marks, found in enumerate(MARKS.finditer(text)):
        if found.group() == OPEN:
            begin = found.start() - marks
        elif found.group() == CLOSE:
            spans.append((begin, found.start() - marks))
    return spans


def _in_segments(data: Mapping[str, Any], control: Mapping[str, int]) -> bool:
    """Say whether the text between two special tokens gets the same ids as when it is alone."""
    steps = files.flatten(data.get("pre_tokenizer"), "pretokenizers")
    flags = ("lstrip", "rstrip", "single_word")
    return (
        data.get("normalizer") is None
        and data["model"]["type"] == "BPE"
        and not data["model"].get("unk_token")
        and bool(steps)
        and steps[-1]["type"] == "ByteLevel"
        and not any(step.get("add_prefix_space") for step in steps)
        and all(step["type"] in ("ByteLevel", "Split", "Digits") for step in steps)
        and all(
            step.get("behavior", "Isolated") != "Removed" and not step.get("invert")
            for step in steps
        )
        and not any(
            token.get(flag)
            for token in data["added_tokens"]
            if token["content"] in control
            for flag in flags
        )
    )
