"""Encode texts of chats with marks: ids, and a mask of the tokens that are learned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tokmill.builds.source import Frozen, Resources
from tokmill.store.checks.probe import Probe, make_probe
from tokmill.store.mask import LOSS
from tokmill.store.schema import Array, Records, Strings, id_dtype
from tokmill.text.chats.chat_templates import MARKS
from tokmill.text.documents import column_name
from tokmill.text.encoding.encoders import TokenizersEncoder
from tokmill.text.make_document import Documents, select
from tokmill.text.tokenizers import tokenizer_json as files

Encoded = tuple[Array, Array, Array, Array]
"""ids (uint32), offsets (int64, chats + 1), learned (uint8, one per token), bytes of each chat."""
_AT_ONCE = 1 << 18
"""Characters that are encoded at a time, about: a token and its place need some 300 bytes."""


def control_tokens(data: Mapping[str, Any], template: str) -> dict[str, int]:
    """Return the tokens that only a template may write: token → id.

    They are the special ones, and other added tokens that the template names.
    """
    return {
        token["content"]: token["id"]
        for token in data.get("added_tokens") or []
        if token["content"].strip() and (token.get("special") or token["content"] in template)
    }


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches each of some names, the longest first."""
    longest = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


class EncodeChats:
    """Texts of chats with marks → records: ids as Hugging Face's tokenizer gives them for the whole
    text of each chat, and which of them are learned.
    """

    engine = "tokenizers"

    def __init__(self, frozen: Frozen, template: str, resources: Resources) -> None:
        data = files.parse(frozen.data, "tokenizer.json")
        self.dtype = np.dtype(id_dtype(frozen.vocabulary.size)).newbyteorder("<")
        self.control = control_tokens(data, template)
        bare = {**data, "post_processor": None, "truncation": None, "padding": None}
        self._encoder = TokenizersEncoder(bare, resources.threads)
        unknown = data["model"].get("unk_token")
        names = {name: n for name, n in self.control.items() if name != unknown}
        self._known_ids, self._known_names = list(names.values()), any_of(names)

    def __call__(self, documents: Documents) -> Records:
        ids, offsets, learned, sizes = self.encode(documents.texts)
        if (odd := self._odd(documents.texts, ids, offsets)).any():
            reasons = ["special token" if one else "" for one in odd]
            documents = select(documents, reasons, rejected=True)
            ids, offsets, learned, sizes = self.encode(documents.texts)
        columns: dict[str, Array | Strings] = {
            "token": ids.astype(self.dtype),
            LOSS: learned,
            "bytes": sizes,
        }
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
        """Encode chats: texts with `OPEN` … `CLOSE` around what is learned."""
        plain = [MARKS.sub("", text) for text in marked]
        ids, learned = [np.zeros(0, np.uint32)], [np.zeros(0, np.uint8)]
        first = 0
        while first < len(plain):
            stop, size = first + 1, len(plain[first])
            while stop < len(plain) and size + len(plain[stop]) <= _AT_ONCE:
                size += len(plain[stop])
                stop += 1
            encodings = self._encoder.encodings(plain[first:stop], places=True)
            for text, encoding in zip(marked[first:stop], encodings, strict=True):
                places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                # Marks are no characters of the text.
                spans = [m.start() - i for i, m in enumerate(MARKS.finditer(text))]
                ids.append(np.array(encoding.ids, np.uint32))
                stretches = np.array(spans, np.int64).reshape(-1, 2)
                learned.append(mask(places[:, 0], places[:, 1], stretches))
            first = stop
        offsets = np.cumsum([0, *map(len, ids[1:])]).astype(np.int64)
        sizes = np.array([len(text.encode()) for text in plain], np.int64)
        return np.concatenate(ids), offsets, np.concatenate(learned), sizes

    def _odd(self, marked: Sequence[str], ids: Array, offsets: Array) -> Array:
        """Return which chats hold a special token that only the template may write, bool.

        A normalizer makes such a token of other text (`＜/s＞`, or `[sep]` in lower case).
        """
        before = np.concatenate([[0], np.cumsum(np.isin(ids, self._known_ids))])
        named = [len(self._known_names.findall(MARKS.sub("", text))) for text in marked]
        odd: Array = np.diff(before[offsets]) > np.array(named, np.int64)
        return odd


def mask(begins: Array, ends: Array, spans: Array) -> Array:
    """Return which tokens overlap a span, uint8.

    Args:
        begins: where tokens begin.
        ends: where they end.
        spans: (n, 2) places that do not overlap.
    """
    inside = np.zeros(int(max(ends.max(initial=0), spans.max(initial=0))) + 1, np.int64)
    np.add.at(inside, spans[:, 0], 1)
    np.add.at(inside, spans[:, 1], -1)
    before = np.concatenate([[0], np.cumsum(np.cumsum(inside))])
    learned: Array = (before[ends] > before[begins]).astype(np.uint8)
    return learned
