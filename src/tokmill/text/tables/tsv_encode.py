"""Encode sentences as records: `[CLS] a [SEP] b [SEP]`, segments, and cutting to a length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokmill.builds.source import Frozen, Resources
from tokmill.store.checks.probe import Probe, make_probe
from tokmill.store.schema import Array, Drops, Records, Strings, ranges
from tokmill.text.documents import Encoder, surround
from tokmill.text.make_document import Documents

LABEL = "\tlabel"
"""Key of the class names in `Documents.kept`; no field can have this name."""


class EncodeSentences(Encoder):
    """Sentences to records."""

    def __init__(
        self, frozen: Frozen, config: Any, classes: Sequence[str], resources: Resources
    ) -> None:
        super().__init__(frozen, config.specials_in_text, resources)
        self.cls, self.sep = (frozen.vocabulary.role(role) for role in ("cls", "sep"))
        self.most = config.max_tokens
        self.numbers = {name: number for number, name in enumerate(classes)}
        self.labelled = not config.unlabelled

    def __call__(self, documents: Documents) -> Records:
        """Return the records of a batch; records with a sentence without tokens are rejected."""
        documents = self.without_specials(documents)
        sentences = [text.split("\n") for text in documents.texts]
        count = len(sentences[0]) if sentences else 1
        ids, flat = self.encoder([one for record in sentences for one in record])
        lengths = flat.reshape(-1, count)
        begins = (np.cumsum(flat) - flat).reshape(-1, count)
        good = (lengths > 0).all(1)
        drops = list(documents.drops)
        if not good.all():
            drops.append(Drops(documents.starts[~good], "empty sentence", True))
        lengths, begins = lengths[good], begins[good]
        kept = fitted(lengths, self.most)
        tokens, segments, offsets = self._laid_out(ids, begins, kept)
        sizes = [len(text.encode()) - (count - 1) for text in documents.texts]
        columns: dict[str, Array | Strings] = {
            "token": tokens,
            "segment": segments,
            "bytes": np.array(sizes, np.int64)[good],
        }
        if self.labelled:
            names = documents.kept[LABEL]
            columns["label"] = np.array([self.numbers[name] for name in names], np.int64)[good]
        lost = lengths - kept
        notes = {
            "records that were cut to max_tokens": int(lost.any(1).sum()),
            "tokens cut off": int(lost.sum()),
        }
        return Records(
            offsets,
            columns,
            documents.starts[good],
            drops,
            notes={note: number for note, number in notes.items() if number},
            ends_part=documents.ends_part,
            done=documents.done,
        )

    def probe(self, texts: Sequence[str]) -> Probe:
        """Return the ids of known texts, each as the one sentence of a record; see `make_probe`."""

        def encode(some: Sequence[str]) -> tuple[Array, Array]:
            ids, lengths = self.encoder(some)
            return surround(ids, lengths, [self.cls], [self.sep], self.dtype)

        return make_probe(encode, 1, 1, texts)

    def _laid_out(self, ids: Array, begins: Array, kept: Array) -> tuple[Array, Array, Array]:
        """Return (tokens, segments, offsets) of records.

        Args:
            ids: of all sentences, flat.
            begins: (n, sentences), where the ids of each begin.
            kept: (n, sentences), how many of them are taken.
        """
        count = kept.shape[1]
        # A run is a sentence and the [SEP] after it, the first one with the [CLS] before it.
        runs = kept + 1
        runs[:, 0] += 1
        ends = np.cumsum(runs.reshape(-1))
        total = int(ends[-1]) if len(ends) else 0
        offsets = np.concatenate([[0], ends[count - 1 :: count]]).astype(np.int64)
        tokens = np.full(total, self.sep, self.dtype)
        tokens[offsets[:-1]] = self.cls
        number = np.repeat(np.arange(runs.size), runs.reshape(-1))
        segments = (number % count).astype(np.uint8)
        sizes = kept.reshape(-1)
        tokens[ranges(ends - 1 - sizes, sizes)] = ids[ranges(begins.reshape(-1), sizes)]
        return tokens, segments, offsets


def fitted(lengths: Array, most: int) -> Array:
    """Return how many tokens of each sentence are kept, so that a record has `most` at most.

    The longer sentence loses its last token until they fit, of equal ones the second (Google's
    `run_classifier.py`). `lengths`: (n, 1) or (n, 2); `most` counts the special tokens too, 0: any.
    """
    if not most:
        return lengths.copy()
    room = most - 1 - lengths.shape[1]
    if lengths.shape[1] == 1:
        alone: Array = np.minimum(lengths, room)
        return alone
    first, second = lengths.T
    a = np.minimum(first, np.maximum(room - second, (room + 1) // 2))
    both: Array = np.stack([a, np.minimum(second, room - a)], 1)
    return both
