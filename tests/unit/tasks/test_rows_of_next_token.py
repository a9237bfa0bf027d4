"""However rows are cut: which tokens are targets, from a store to prepared batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import rec, token_store, write_store
from tokmill.base.errors import UsageError
from tokmill.feed.feed import Feed
from tokmill.models.model import Inputs
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.store.schema import Column
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken, NextTokenConfig

LENGTHS = [[3, 0, 17, 1], [8, 9, 2, 40], [5, 5]]


def task(length: int, **options: Any) -> NextToken:
    sizes = {"token": 100}
    config = NextTokenConfig(length=length, **options)
    return NextToken(
        config, Decoder(DecoderConfig(dim=8, layers=1, heads=2), Inputs(sizes)), Inputs(sizes)
    )


def targets(learner: NextToken, store: Store, shards: int = 0) -> list[int]:
    """All targets of an epoch."""
    rows = learner.rows(store, 3, shards)
    columns = ["token", *learner.extra_columns(store.schema)]
    feed = Feed(rows, 1, seed=3, columns=columns)
    batches = [learner.prepare(feed.batch(step)) for step in range(len(rows))]
    assert all(batch.columns["token"].shape == (1, learner.length) for batch in batches)
    found = np.concatenate([batch.targets["token"].ravel() for batch in batches])
    return found[found >= 0].tolist()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Tokens are numbered through the store."""
    number = iter(range(100))
    return token_store(
        tmp_path / "store", [[[next(number) for _ in range(n)] for n in shard] for shard in LENGTHS]
    )


@pytest.fixture
def learned() -> list[int]:
    """Every token but the first one of each document."""
    ends = np.cumsum([n for shard in LENGTHS for n in shard])
    firsts = {0, *ends.tolist()}
    return [token for token in range(int(ends[-1])) if token not in firsts]


@pytest.mark.parametrize("shards", [0, 1, 2])
@pytest.mark.parametrize(
    "options",
    [{"rows": "windows"}, {"rows": "windows", "step": 3}, {"rows": "packed"}],
    ids=["windows", "step", "packed"],
)
@pytest.mark.parametrize("length", [4, 7, 64])
def test_every_token_but_first_ones_is_a_target_once(
    store: Store, learned: list[int], options: dict[str, Any], length: int, shards: int
) -> None:
    assert sorted(targets(task(length, **options), store, shards)) == learned


def test_whole_records_as_far_as_a_row_goes(store: Store, learned: list[int]) -> None:
    assert sorted(targets(task(64, rows="whole"), store)) == learned
    starts = np.cumsum([0, *(n for shard in LENGTHS for n in shard)])
    beyond = {t for a, b in zip(starts, starts[1:], strict=False) for t in range(a + 8, b)}
    assert sorted(targets(task(7, rows="whole"), store)) == [t for t in learned if t not in beyond]


@pytest.mark.parametrize("kind", ["windows", "packed", "whole", "stream"])
def test_the_column_loss_says_what_is_learned(tmp_path: Path, kind: str) -> None:
    schema = {"token": Column("u1"), "loss": Column("u1")}
    records = [
        rec([1, 2, 3, 4, 5], loss=[1, 0, 0, 1, 1]),
        rec([6, 7, 8], loss=[0, 1, 0]),
    ]
    store = write_store(tmp_path / "store", schema, [records])
    found = targets(task(7, rows=kind), store)
    assert set(found) == {4, 5, 7} if kind != "stream" else set(found) <= {4, 5, 7}


@pytest.mark.parametrize(
    "options",
    [
        {"length": 0},
        {"length": 4, "step": 5},
        {"length": 4, "step": -1},
        {"length": 4, "step": 2, "rows": "packed"},
    ],
)
def test_rows_that_lose_tokens_or_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        task(**options)
    assert caught.value.where.startswith("task.")
