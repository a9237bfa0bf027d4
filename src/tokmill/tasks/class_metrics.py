"""Metrics that compare predicted labels with the right ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokmill.store.schema import Array

MOST_SHOWN = 20
"""With more classes, metrics of single classes are left out."""


def class_metrics(found: Array, label: Array, names: Sequence[str]) -> dict[str, float]:
    """Return F1 and counts by class.

    Args:
        found: (N,) integers, the predicted class of each record.
        label: (N,) integers, the right class.
        names: of the classes.

    Returns:
        `f1_macro`, the mean over the classes that occur in either; `f1`, with two classes the F1 of
        the second one, as in GLUE's MRPC, else the same mean. With at most `MOST_SHOWN` classes
        also `f1_NAME`, `count_NAME` (records of the class) and `found_NAME` (predicted records).
    """
    size = max(len(names), int(max(found.max(initial=0), label.max(initial=0))) + 1)
    right = np.bincount(label[found == label], minlength=size)
    of_label, of_found = np.bincount(label, minlength=size), np.bincount(found, minlength=size)
    total = of_label + of_found
    each = 2 * right / np.maximum(total, 1)
    macro = float(each[total > 0].mean()) if total.any() else 0.0
    metrics = {"f1": float(each[1]) if len(names) == 2 else macro, "f1_macro": macro}
    if len(names) <= MOST_SHOWN:
        for number, name in enumerate(names):
            metrics[f"f1_{name}"] = float(each[number])
            metrics[f"count_{name}"] = int(of_label[number])
            metrics[f"found_{name}"] = int(of_found[number])
    return metrics


def pearson(found: Array, label: Array) -> float:
    """Return the correlation of predicted and right numbers; 0 if one side is constant."""
    known = ~np.isnan(label)
    x, y = (side[known].astype(np.float64) for side in (found, label))
    if len(x) < 2:
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / norm if norm else 0.0
