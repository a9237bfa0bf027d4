"""Files of function similarity: a table of functions beside its vectors, and indexes."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from reader import Make

from making import token_store
from tokmill.similarity.evaluation import Choice, evaluate
from tokmill.similarity.index import Index, write_index
from tokmill.similarity.keys_csv import read_keys
from tokmill.similarity.pool_measures import Method
from tokmill.similarity.vector_rows import Rows, read_vectors

RECORDS = 40


def make_keys(folder: Path) -> Iterable[Path]:
    with open(folder / "keys.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["project", "function", "compiler", "level", "blocks", "code"])
        for level in ("O0", "O3"):
            for i in range(12):
                lines.writerow([f"p{i % 3}", f'f, "{i}"', "gcc-12", level, 9, f"{level}{i}"])
    np.save(folder / "v.npy", np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32))
    return [folder / "keys.csv", folder / "v.npy"]


def read_scored(folder: Path) -> Any:
    functions, _ = read_keys(folder / "keys.csv")
    matrix = read_vectors(folder / "v.npy", len(functions))
    choice = Choice(pools=(2, 10), resamples=0)
    return evaluate(functions, [Method("v", Rows(matrix), False)], choice)


def make_near(kind: str) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        store = token_store(folder / "s", [[[1]] * RECORDS])
        matrix = np.random.default_rng(0).normal(size=(RECORDS, 6)).astype(np.float32)
        matrix[np.abs(matrix) < 1] = 0
        rows = scipy.sparse.csr_array(matrix) if kind == "sparse" else matrix
        keys = (np.arange(6, dtype=np.uint64), np.ones(6, np.float32)) if kind == "sparse" else None
        bounds = {"all": 6} if kind == "sparse" else {}
        write_index(folder / "ix", store, rows, of="v", bounds=bounds, keys=keys)
        return [folder / "ix"]

    return make


def read_near(folder: Path) -> Any:
    index = Index(folder / "ix")
    found = [index.nearest(row, 5, exact=exact) for row in range(0, RECORDS, 9) for exact in (0, 1)]
    for rows, scores, _ in found:
        assert ((rows >= 0) & (rows < RECORDS)).all() and np.isfinite(scores).all()
    return [(rows.tolist(), scores.tolist(), shares) for rows, scores, shares in found]
