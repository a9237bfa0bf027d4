"""Encode texts of chats with marks: ids, and a mask of the tokens that are learned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.builds.source import Frozen, Resources
from tokmill.store.checks.probe import Probe
from tokmill.store.mask import LOSS
from tokmill.store.schema import Array, Records, id_dtype
from tokmill.store.shards.strings import Strings, ranges
from tokmill.text.chats.chat_templates import BREAK, CLOSE, END, MARKS, OPEN
from tokmill.text.documents import column_name, surround
from tokmill.text.encoding.encoders import TokenizersEncoder, make_encoder
from tokmill.text.encoding.probe_texts import make_probe
from tokmill.text.make_document import Documents, select
from tokmill.text.tokenizers import tokenizer_json as files

Encoded = tuple[Array, Array, Array, Array]
"""ids (uint32), offsets (int64, chats + 1), learned (uint8, one per token), bytes of each chat."""
_KINDS = {mark.encode(): kind for kind, mark in enumerate((OPEN, CLOSE, BREAK, END))}
_OPEN, _CLOSE, _, _END, _SPECIAL = range(5)


def control_tokens(data: Mapping[str, Any], template: str) -> dict[str, int]:
    """Return the tokens that only a template may write: token → id.

    They are the special ones, and other added tokens that the template names.
    """
    return {
        token["content"]: token["id"]
        for token in data.get("added_tokens") or []
        if token["content"] and (token.get("special") or token["content"] in template)
    }


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches each of some names, the longest first."""
    longest = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


class EncodeChats:
    """Texts of chats with marks → records: ids as Hugging Face's tokenizer gives them for the whole
    text of each chat, and which of them are learned. With `end` the token `eot` follows each chat.
    """

    def __init__(
        self,
        frozen: Frozen,
        template: str,
        resources: Resources,
        end: bool = False,
        learn_end: bool = False,
    ) -> None:
        data = files.parse(frozen.data, "tokenizer.json")
        self.dtype = np.dtype(id_dtype(frozen.vocabulary.size)).newbyteorder("<")
        self.end = [frozen.vocabulary.role("eot")] if end else []
        self.learn_end = [int(learn_end)] * len(self.end)
        self.control = control_tokens(data, template)
        added = [
            {**token, "special": token.get("special") or token["content"] in self.control}
            for token in data.get("added_tokens") or []
        ]
        data = {**data, "added_tokens": added}
        self.in_segments = _in_segments(data, self.control)
        if self.in_segments:
            self._encoder = make_encoder(
                msgspec.json.encode(data), engine=resources.engine, threads=resources.threads
            )
            self.engine = self._encoder.name
            events = any_of([*self.control, OPEN, CLOSE, BREAK, END]).pattern
            self._events = re.compile(events.encode())
            self._ids = {name.encode(): number for name, number in self.control.items()}
            lengths = {number: len(token) for number, token in files.token_bytes(data).items()}
            lengths |= {number: len(name) for name, number in self._ids.items()}
            self._lengths = np.zeros(max(lengths) + 1, np.int64)
            self._lengths[list(lengths)] = list(lengths.values())
        else:
            bare = {**data, "post_processor": None, "truncation": None, "padding": None}
            self._encoder = self._whole = TokenizersEncoder(bare, resources.threads)
            self.engine = "tokenizers"
            unknown = data["model"].get("unk_token")
            known = {name: n for name, n in self.control.items() if name != unknown}
            self._known_ids, self._known_names = list(known.values()), any_of(known)

    def __call__(self, documents: Documents) -> Records:
        encoded = self.encode(documents.texts)
        if not self.in_segments and (odd := self._odd(documents.texts, *encoded[:2])).any():
            reasons = ["special token" if one else "" for one in odd]
            documents = select(documents, reasons, rejected=True)
            encoded = self.encode(documents.texts)
        ids, offsets, learned, sizes = encoded
        lengths = np.diff(offsets)
        ids, offsets = surround(ids, lengths, [], self.end, self.dtype)
        learned, _ = surround(learned, lengths, [], self.learn_end, np.uint8)
        columns: dict[str, Array | Strings] = {"token": ids, LOSS: learned, "bytes": sizes}
        for name, values in documents.kept.items():
            columns[column_name(name)] = Strings.of(values)
        notes = {**documents.notes, "tokens that are learned": int(learned.sum())}
        return Records(
            offsets,
            columns,
            documents.starts,
            documents.drops,
            notes={note: count for note, count in notes.items() if count},
            ends_part=documents.ends_part,
            done=documents.done,
        )

    def probe(self, texts: Sequence[str]) -> Probe:
        """Return the ids of known texts without the template, which may refuse them; see
        `make_probe`.
        """

        def encode(some: Sequence[str]) -> tuple[Array, Array]:
            ids, lengths = self._encoder(some)
            return ids, np.concatenate([[0], np.cumsum(lengths)])

        return make_probe(encode, 0, 0, texts)

    def encode(self, marked: Sequence[str]) -> Encoded:
        """Encode chats: texts with `OPEN` … `CLOSE` around what is learned, and `BREAK` within
        names of special tokens that are text.
        """
        if not marked:
            none = np.zeros(0, np.int64)
            return none.astype(np.uint32), np.zeros(1, np.int64), none.astype(np.uint8), none
        return (self._segments if self.in_segments else self._texts)(marked)

    def _odd(self, marked: Sequence[str], ids: Array, offsets: Array) -> Array:
        """Return which chats hold a special token that only the template may write, bool.

        A tokenizer that encodes whole texts cannot keep its name as text, and a normalizer makes
        such a token of other text (`＜/s＞`, or `[sep]` in lower case).
        """
        before = np.concatenate([[0], np.cumsum(np.isin(ids, self._known_ids))])
        named = [len(self._known_names.findall(MARKS.sub("", text))) for text in marked]
        broken = np.array([BREAK in text for text in marked], bool)
        odd: Array = broken | (np.diff(before[offsets]) > np.array(named, np.int64))
        return odd

    def _segments(self, marked: Sequence[str]) -> Encoded:
        """Encode the text between special tokens in one batch, and insert the special tokens.

        The bytes of a chat's tokens are those of its text, so the place of a token is a sum.
        """
        raw = "".join([text + END for text in marked]).encode()
        events = [*self._events.finditer(raw)]
        begin, end = (
            np.fromiter((place(m) for m in events), np.int64, len(events))
            for place in (re.Match.start, re.Match.end)
        )
        names = [m[0] for m in events]
        kinds = np.array([_KINDS.get(name, _SPECIAL) for name in names], np.int8)
        special = kinds == _SPECIAL
        # Bytes of text before each event: without marks; and without special tokens too.
        width = end - begin
        gone = np.cumsum(width) - width
        marks = np.cumsum(np.where(special, 0, width)) - np.where(special, 0, width)
        place = begin - marks
        keep = np.ones(len(raw), bool)
        keep[ranges(begin, width)] = False
        cuts = special | (kinds == _END)
        offsets = np.concatenate([[0], (begin - gone)[cuts]])
        content = np.frombuffer(raw, np.uint8)[keep]
        segment_ids, lengths = self._encoder.encode_utf8(content, offsets)
        # Each segment is followed by a special token, or by the end of the chat.
        stops = np.cumsum(lengths + special[cuts])
        ids = np.empty(int(stops[-1]), np.uint32)
        is_text = np.ones(len(ids), bool)
        is_text[stops[special[cuts]] - 1] = False
        ids[~is_text] = [self._ids[name] for name in names if name in self._ids]
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
        learned = mask(ends - self._lengths[ids], ends, spans)
        return ids, tokens, learned, np.diff(texts)

    def _texts(self, marked: Sequence[str]) -> Encoded:
        """Encode whole texts with `tokenizers`, whose encodings have the place of each token."""
        plain = [MARKS.sub("", text) for text in marked]
        encodings = self._whole.encodings(plain, places=True)
        ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        learned = []
        for text, encoding in zip(marked, encodings, strict=True):
            places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            # Marks are no characters of the text.
            marks = [(m.start() - i, m[0]) for i, m in enumerate(MARKS.finditer(text))]
            spans = [place for place, mark in marks if mark in (OPEN, CLOSE)]
            learned.append(mask(places[:, 0], places[:, 1], np.array(spans).reshape(-1, 2)))
        tokens = np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64)
        sizes = np.array([len(text.encode()) for text in plain], np.int64)
        return np.concatenate(ids), tokens, np.concatenate(learned), sizes


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


def _in_segments(data: Mapping[str, Any], control: Mapping[str, int]) -> bool:
    """Say whether the text between two special tokens gets the same ids as when it is alone."""
    steps = files.flatten(data.get("pre_tokenizer"), "pretokenizers")
    tokens = [token for token in data["added_tokens"] if token["content"] in control]
    return (
        data.get("normalizer") is None
        and data["model"]["type"] == "BPE"
        and not data["model"].get("unk_token")
        and bool(steps)
        and steps[-1]["type"] == "ByteLevel"
        and all(
            step["type"] in ("ByteLevel", "Split", "Digits")
            and step.get("behavior") != "Removed"
            and not (step.get("add_prefix_space") or step.get("invert"))
            for step in steps
        )
        and not any(token.get(f) for token in tokens for f in ("lstrip", "rstrip", "single_word"))
    )
