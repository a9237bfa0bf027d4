"""Stores with labels and references: what entries of several records are made of."""

from pathlib import Path
from typing import Any

import numpy as np

import tokmill
from making import here
from tokmill.builds.plan import How
from tokmill.store.store import Store
from toy import SIZE, make_store


def lay(base: Path, name: str, values: dict[str, Any], refer: Path | None = None) -> Store:
    """Put an overlay of values over a store, and return the store with it."""
    file = base.parent / f"{base.name}-{name}.npz"
    np.savez(file, **{column: np.asarray(value) for column, value in values.items()})
    told = tuple(f"{column}={refer}" for column in values) if refer else ()
    tokmill.build(
        "overlay", base, values=str(file), name=name, refer=told,
        how=How(quiet=True, amount=here()),
    )  # fmt: skip
    return Store(base, [name])


def labelled(path: Path, records: int = 40, classes: int = 4, seed: int = 0) -> Path:
    """A store whose records are mostly of the tokens of one class each; overlay `label`.

    Class c has the tokens 1 + 5 c … 5 + 5 c; a tenth of a record's tokens is of any class.
    """
    random = np.random.default_rng(seed)
    label = random.integers(0, classes, records).astype(np.uint32)
    documents = []
    for one in label:
        own = 1 + 5 * one + random.integers(0, 5, random.integers(3, 14))
        noise = random.integers(1, SIZE - 1, len(own))
        documents.append(np.where(random.random(len(own)) < 0.1, noise, own))
    make_store(path, documents)
    lay(path, "label", {"label": label})
    return path


def tuples_of(path: Path, functions: Path, count: int = 24, seed: int = 0) -> Path:
    """A store of `count` records that refers to a labelled one; overlay `entries`.

    Columns: `anchor`, `positive` (of the same label) and `negative`, a record each; `other`, which
    is of the same label where `same` is 1; and with a value per token `member`, 1 to 4 records of
    one label, which is `group`.
    """
    random = np.random.default_rng(seed)
    label = Store(functions, ["label"]).column("label")
    anchor = random.integers(0, len(label), count)
    same = [random.choice(np.flatnonzero(label == label[one])) for one in anchor]
    other = [random.choice(np.flatnonzero(label != label[one])) for one in anchor]
    groups = [
        random.choice(np.flatnonzero(label == label[one]), random.integers(1, 5)) for one in anchor
    ]
    make_store(path, [np.ones(len(group), np.int64) for group in groups])
    values = {"anchor": anchor, "positive": same, "negative": other}
    lay(path, "entries", {n: np.asarray(v, np.uint32) for n, v in values.items()}, functions)
    flips = random.integers(0, 2, count)
    mixed = np.where(flips, same, other)
    lay(path, "others", {"other": mixed.astype(np.uint32)}, functions)
    lay(path, "labels", {"same": flips.astype(np.uint32), "group": label[anchor]})
    lay(path, "groups", {"member": np.concatenate(groups).astype(np.uint32)}, functions)
    return path
