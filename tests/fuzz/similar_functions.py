"""Files of function similarity: vectors of functions, and indexes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from made_functions import f, functions
from making import token_store
from tokmill.similarity.evaluation import Choice, evaluate
from tokmill.similarity.index import Index, write_index
from tokmill.similarity.pool_measures import Method
from tokmill.similarity.vector_rows import Rows, read_vectors

RECORDS = 40


def make_vectors(folder: Path) -> Iterable[Path]:
    np.save(folder / "v.npy", np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32))
    return [folder / "v.npy"]


def read_scored(folder: Path) -> Any:
    made = functions(*(f(f"f{i}", level) for level in ("O0", "O3") for i in range(12)))
    matrix = read_vectors(folder / "v.npy", len(made))
    choice = Choice(pools=(2, 10), resamples=0)
    return evaluate(made, [Method("v", Rows(matrix), False)], choice)


def make_near(folder: Path) -> Iterable[Path]:
    store = token_store(folder / "s", [[[1]] * RECORDS])
    matrix = np.random.default_rng(0).normal(size=(RECORDS, 6)).astype(np.float32)
    write_index(folder / "ix", store, matrix, of="v")
    return [folder / "ix"]


def read_near(folder: Path) -> Any:
    index = Index(folder / "ix")
    found = [index.nearest(index.vectors[row], 5) for row in range(0, RECORDS, 9)]
    for rows, scores in found:
        assert ((rows >= 0) & (rows < RECORDS)).all() and np.isfinite(scores).all()
    return [(rows.tolist(), scores.tolist()) for rows, scores in found]
