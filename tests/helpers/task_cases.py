"""What each task is tried with: stores of walks, sentences and labels, and a recipe on them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import toy
from entry_stores import lay
from tokmill.store.vocab import Vocabulary
from weighted_sets import blocks_store, intervals_store

ROLES = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
SIZE = 31
STEPS = 6


def special_store(path: Path, documents: Sequence[np.ndarray]) -> Path:
    """A store whose vocabulary has the special tokens of BERT; other ids are 5 to 30."""
    digest = hashlib.sha256(b"special").hexdigest()
    vocab = Vocabulary("token.json", digest, SIZE, ROLES)
    return toy.make_store(path, documents, vocabulary=b"special", vocab=vocab)


def walks(count: int, seed: int = 0, length: int = 30) -> list[np.ndarray]:
    """Documents in which a token follows from the one before, without special tokens."""
    found = toy.cycles(count, length=length, seed=seed, size=SIZE - 4)
    return [document[:-1] + 4 for document in found]


def make_stores(root: Path) -> Path:
    """Stores to learn from and, ending in `-val`, to evaluate on: 13 are not whole batches."""
    for name, count, seed in (("walks", 40, 0), ("walks-val", 13, 5)):
        documents = walks(count, seed)
        special_store(root / name, documents)
        # Whether the first token is among the smaller half.
        label = np.asarray([document[0] < 18 for document in documents], np.uint32)
        lay(root / name, "label", {"label": label})
        lay(root / name, "number", {"number": label.astype(np.float32) - 0.5})
        lay(root / name, "entries", triplets(label, seed), root / name)
    blocks_store(root / "blocks")
    intervals_store(root / "sets", root / "blocks")
    intervals_store(root / "sets-val", root / "blocks", 13, seed=5)
    return root


def triplets(label: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """A triplet for each record: another one with its label, and one with the other label."""
    random, numbers = np.random.default_rng(seed), np.arange(len(label))
    similar = [random.choice(np.flatnonzero((label == one) & (numbers != i))) for i, one in
             enumerate(label)]  # fmt: skip
    apart = [random.choice(np.flatnonzero(label != one)) for one in label]
    found = {"anchor": numbers, "positive": np.asarray(similar), "negative": np.asarray(apart)}
    return {name: value.astype(np.uint32) for name, value in found.items()}


CASES: dict[str, dict[str, Any]] = {
    "next_token": {"model": {}, "task": {}},
    "masked": {"task": {"rows": "whole"}},
    "sentence_pair": {"task": {"length": 24}},
    # Dropout would be drawn by each process for itself.
    "classify": {"task": {"dropout": 0}, "data": {"overlays": ["label"]}},
    "contrastive": {"task": {"loss": "triplet"}, "data": {"overlays": ["entries"]}},
    "signature": {
        "store": "sets",
        "model": {"kind": "set_transformer", "layers": 1, "inducing": 3, "seeds": 2},
        "task": {"cpi_weight": 1, "consistency_weight": 1},
        "data": {"overlays": ["entries"]},
    },
}
"""Task → sections over the recipe. A new task needs a line here."""
WITHOUT_STORES = {"schedules"}
"""Tasks that act in an environment: tests/conformance/test_environments.py."""
ROWS = {"contrastive": 3, "signature": 3}
"""Rows of an entry, if they are several."""
ENCODER = {"kind": "encoder", "context": 32}


def store_of(name: str) -> str:
    """The store of a task, in the folder of `make_stores`."""
    return str(CASES[name].get("store", "walks"))


def recipe(stores: Path, name: str, **run: Any) -> dict[str, Any]:
    """The recipe of a small training of a task, of six steps."""
    case = CASES[name]
    return toy.recipe(
        stores / store_of(name),
        STEPS,
        data={"val": str(stores / f"{store_of(name)}-val"), **case.get("data", {})},
        model=case.get("model", ENCODER),
        optim={"lr": 3e-3},
        task={"kind": name, "length": 16, **case["task"]},
        run={"eval_every": 3, "eval_rows": 0, **run},
    )
