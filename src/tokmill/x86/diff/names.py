"""Functions that have the same symbol name in both programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tokmill.store.schema import Array

CLONE = re.compile(r"\.(isra|constprop|part|cold|llvm|lto_priv)(\.|$).*")
"""What compilers add to the name of a function that they changed or made from another."""


def same_names(a: Sequence[str], b: Sequence[str]) -> tuple[Array, Array]:
    """Return the pairs of functions (i, j: i8) that alone have a name in their programs.

    Where a name has no partner as it stands, it is looked for without what a compiler added to it.
    """
    i, j = _unique(list(a), list(b))
    left_a = [CLONE.sub("", name) for name in a]
    left_b = [CLONE.sub("", name) for name in b]
    for names, done in ((left_a, i), (left_b, j)):
        for number in done.tolist():
            names[number] = ""
    more_i, more_j = _unique(left_a, left_b)
    i, j = np.concatenate([i, more_i]), np.concatenate([j, more_j])
    order = np.argsort(i)
    return i[order], j[order]


def _unique(a: list[str], b: list[str]) -> tuple[Array, Array]:
    counts = Counter(a), Counter(b)
    place = {name: number for number, name in enumerate(b)}
    both = [
        (number, place[name])
        for number, name in enumerate(a)
        if name and counts[0][name] == 1 and counts[1][name] == 1
    ]
    pairs = np.asarray(both, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
