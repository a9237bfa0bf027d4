"""Whether the metrics of several runs can be compared."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.report.comparison.run_summaries import RunSummary
from tokmill.store.store import Store

PER_TOKEN = ("loss", "perplexity", "accuracy")
"""Metrics for each token, which depend on the vocabulary."""


@dataclass(frozen=True)
class ValidationStore:
    """The validation store of a run, which may have been removed since."""

    path: str
    fingerprint: str
    """Fingerprint of the store; if it cannot be opened, its path."""

    def text(self) -> str:
        """Return a digest of the lengths of its documents in bytes; "": they are not known.

        These lengths do not depend on the vocabulary.
        """
        if self.path == self.fingerprint:
            return ""
        store = Store(self.path)
        if "bytes" not in store.schema:
            return ""
        sizes = np.sort(store.column("bytes").astype(np.int64))
        return hashlib.sha256(sizes.tobytes()).hexdigest()


def validation(run: RunSummary) -> ValidationStore:
    """Return the validation store of a run; path and fingerprint are "" if there is none."""
    path = str(run.flat["data.val"])
    # If the store is gone, only its path is known.
    with contextlib.suppress(TokmillError):
        if path:
            return ValidationStore(path, Store(path).fingerprint)
    return ValidationStore(path, path)


def doubts(
    metric: str, runs: Sequence[tuple[RunSummary, ValidationStore | None]]
) -> tuple[bool, list[str]]:
    """Return whether values must not be compared, and notes on them.

    `runs`: runs with the metric, and their validation stores (None: it is no validation metric).
    """
    notes = []
    several_vocabularies = len({tuple(sorted(run.vocabularies.items())) for run, _ in runs}) > 1
    measured_on = [on for _, on in runs if on is not None]
    several_stores = len({on.fingerprint for on in measured_on}) > 1
    rows = list(dict.fromkeys(rows_of(run) for run, on in runs if on is not None))
    doubtful = False
    per_token = any(word in metric for word in PER_TOKEN)
    if several_vocabularies and per_token:
        doubtful = True
        notes.append(
            f"the runs have different vocabularies: {metric} is for each token, so it cannot be "
            "compared; --metric val_bits_per_byte can, on the same text"
        )
    elif several_vocabularies and several_stores and "bits_per_byte" in metric:
        texts = {on.text() for on in set(measured_on)}
        doubtful = len(texts) > 1 or "" in texts
        if doubtful:
            notes.append(f"not known to be validated on the same text: {_places(measured_on)}")
        elif rows != [0]:
            notes.append(
                "the vocabularies differ, so different parts of the text were evaluated; "
                "run.eval_rows=0 evaluates all of it"
            )
    elif several_stores:
        doubtful = True
        notes.append(
            f"the runs were validated on different stores: {_places(measured_on)}; "
            "`tokmill eval` measures each run on the same one"
        )
    elif not measured_on and len({run.known.fingerprint for run, _ in runs}) > 1 and per_token:
        doubtful = True
        notes.append(f"the runs learned from different stores: {metric} is of different text")
    if len(rows) > 1:
        doubtful = True
        shown = ", ".join(str(count) if count else "all" for count in rows)
        notes.append(f"the runs were validated on different numbers of rows: {shown}")
    return doubtful, notes


def rows_of(run: RunSummary) -> int:
    """Return on how many rows a run was validated at most; 0: on all of its validation store."""
    limit = int(run.flat["run.eval_rows"])
    return limit if run.latest.get("val_rows", limit) == limit else 0


def _places(measured_on: Sequence[ValidationStore]) -> str:
    places = {on.path: on.path == on.fingerprint for on in measured_on}
    return ", ".join(
        f"{path} (cannot be opened)" if gone else path for path, gone in places.items()
    )
