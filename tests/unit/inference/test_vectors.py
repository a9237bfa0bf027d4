"""A record's vector is its own: what is read beside it, and padding, change nothing."""

from typing import Any, get_args

import numpy as np
import pytest
import torch

from making import write_store
from small_models import KINDS, small_model
from tokmill.base.errors import UsageError
from tokmill.inference.vectors import Vectors
from tokmill.models.heads import Pool
from tokmill.models.model import Inputs
from tokmill.store.schema import Column, Schema
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.next_token import NextTokenConfig
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.device import Precision

LENGTHS = [5, 0, 31, 8, 1, 9, 16, 17, 2]
SIZES = {"token": 17, "kind": 5}
SCHEMA: Schema = {name: Column("u1", vocab=name) for name in SIZES}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of one shard, of two columns."""
    random = np.random.default_rng(0)
    rows = [
        {name: random.integers(0, n, length) for name, n in SIZES.items()} for length in LENGTHS
    ]
    path = tmp_path_factory.mktemp("vectors") / "s"
    vocabularies = {name: Vocabulary(f"{name}.json", "0" * 64, n) for name, n in SIZES.items()}
    write_store(path, SCHEMA, [rows], vocabularies=vocabularies)
    return Store(path)


def vectors_of(task: Task, store: Store, pool: Any, batch_tokens: int) -> np.ndarray:
    made = np.full((len(LENGTHS), task.model.dim), np.nan, np.float32)
    reader = Vectors(task, Precision("fp32", torch.device("cpu")), pool, batch_tokens)
    assert sum(reader.fill(store, 0, made)) == sum(LENGTHS)
    return made


@pytest.mark.parametrize("segment", [8, 64], ids=["cut", "whole"])
@pytest.mark.parametrize(
    ("kind", "pool"),
    [
        *((kind, pool) for kind in KINDS for pool in get_args(Pool) if pool != "signature"),
        ("set_transformer", "signature"),
        ("bag", "signature"),
    ],
)
def test_a_vector_does_not_depend_on_its_batch_mates(
    kind: str, pool: str, segment: int, store: Store
) -> None:
    inputs = Inputs(SIZES, made={"segment": 2})
    task = Task(NextTokenConfig(length=segment), small_model(kind, inputs), inputs)
    alone = vectors_of(task, store, pool, 1)
    assert np.abs(alone[np.array(LENGTHS) > 0]).max(1).min() > 0.01
    for batch_tokens in (40, 16_384):
        together = vectors_of(task, store, pool, batch_tokens)
        np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


def test_a_model_that_reads_vectors_makes_none() -> None:
    inputs = Inputs(SIZES, vectors={"block": 4})
    task = Task(NextTokenConfig(), small_model("encoder", inputs), inputs)
    with pytest.raises(UsageError, match="reads the vectors block"):
        Vectors(task, Precision("fp32", torch.device("cpu")), "mean")
