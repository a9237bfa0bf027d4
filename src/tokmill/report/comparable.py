"""Whether the values of several runs measure the same thing."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokmill.errors import TokmillError
from tokmill.report.runs import RunSummary
from tokmill.store.store import Store

PER_TOKEN = ("loss", "perplexity", "accuracy")
"""Metrics whose unit is a token: another vocabulary has others."""


@dataclass(frozen=True)
class ValidationStore:
    """The validation store of a run. It is known from its place, where it may have been removed."""

    path: str
    fingerprint: str
    """Of the store; of one that cannot be opened its path."""

    def text(self) -> str:
        """Return a digest of its documents' lengths in bytes, which are equal for any vocabulary.

        It is empty where they are not known.
        """
        if self.path == self.fingerprint:
            return ""
        store = Store(self.path)
        if "bytes" not in store.schema:
            return ""
        sizes = np.sort(store.column("bytes").astype(np.int64))
        return hashlib.sha256(sizes.tobytes()).hexdigest()


def validation(run: RunSummary) -> ValidationStore:
    """Return the validation store of a run; path and fingerprint are empty where it has none."""
    path = str(run.flat["data.val"])
    # Of a store that is gone the path is all that is known.
    with contextlib.suppress(TokmillError):
        if path:
            return ValidationStore(path, Store(path).fingerprint)
    return ValidationStore(path, path)


def doubts(
    metric: str, runs: Sequence[tuple[RunSummary, ValidationStore | None]]
) -> tuple[bool, list[str]]:
    """Say whether values must not be compared, and what has to be known of them.

    `runs`: those that have the metric, with their validation stores (None: not a metric of one).
    """
    notes = []
    several_vocabularies = len({tuple(sorted(run.vocabularies.items())) for run, _ in runs}) > 1
    measured_on = [on for _, on in runs if on is not None]
    several_stores = len({on.fingerprint for on in measured_on}) > 1
    rows = list(dict.fromkeys(run.flat["run.eval_rows"] for run, on in runs if on is not None))
    doubtful = False
    per_token = any(word in metric for word in PER_TOKEN)
    if several_vocabularies and per_token:
        doubtful = True
        notes.append(
            f"the runs have different vocabularies: {metric} is a token's and does not compare; "
            "--metric val_bits_per_byte does, on the same text"
        )
    elif several_vocabularies and several_stores and "bits_per_byte" in metric:
        texts = {on.text() for on in set(measured_on)}
        doubtful = len(texts) > 1 or "" in texts
        if doubtful:
            notes.append(f"not known to be validated on the same text: {_places(measured_on)}")
        elif rows != [0]:
            notes.append(
                "the vocabularies differ, so the rows that were evaluated hold other parts of the "
                "text; run.eval_rows=0 takes all of it"
            )
    elif several_stores:
        doubtful = True
        notes.append(
            f"the runs were validated on different stores: {_places(measured_on)}; "
            "`tokmill eval` measures each on one"
        )
    elif not measured_on and len({run.known.fingerprint for run, _ in runs}) > 1 and per_token:
        doubtful = True
        notes.append(f"the runs learned from different stores: {metric} is of different text")
    if len(rows) > 1:
        doubtful = True
        shown = ", ".join(str(count) if count else "all" for count in rows)
        notes.append(f"the runs were validated on different numbers of rows: {shown}")
    return doubtful, notes


def _places(measured_on: Sequence[ValidationStore]) -> str:
    places = {on.path: on.path == on.fingerprint for on in measured_on}
    return ", ".join(
        f"{path} (cannot be opened)" if gone else path for path, gone in places.items()
    )
