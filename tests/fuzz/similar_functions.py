"""Files of function similarity: a table of functions beside its vectors, and indexes."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

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
