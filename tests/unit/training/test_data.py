"""From a recipe to a feed: sizes of a step, several stores, groups of shards, further columns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import rec, token_store, write_store
from tokmill.base.errors import UsageError
from tokmill.models.model import Inputs
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.store.schema import Column
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.training.data import entries_per_step, make_feed
from tokmill.training.recipe.config import DataConfig, TrainConfig

SIZES = {"token": 9}


def task(**options: Any) -> NextToken:
    model = Decoder(DecoderConfig(dim=4, layers=1, heads=2), Inputs(SIZES))
    return NextToken(NextTokenConfig(length=5, **options), model, Inputs(SIZES))


@pytest.fixture
def stores(tmp_path: Path) -> list[Store]:
    return [
        token_store(tmp_path / str(number), [[[number + 1] * 11] * 8] * 3) for number in range(2)
    ]


@pytest.mark.parametrize(
    ("data", "world", "rows"),
    [
        ({"batch": 6}, 1, 6),
        ({"batch": 6}, 3, 6),
        ({"batch": 7, "batch_tokens": 30}, 1, 6),
        ({"batch_tokens": 30}, 2, 6),
    ],
)
def test_rows_a_step(data: dict[str, int], world: int, rows: int) -> None:
    assert entries_per_step(DataConfig(**data), 5, world) == rows


@pytest.mark.parametrize(
    ("data", "world", "what", "where", "hint"),
    [
        ({"batch": 7}, 2, "7 rows cannot be split over 2 processes", "", "sizes are 6 and 8"),
        ({"batch": 3}, 4, "3 rows cannot be split over 4 processes", "", "least size is 4"),
        ({"batch_tokens": 33}, 1, "33 tokens .* of 5 positions\\n", "d", "sizes are 30 and 35"),
        ({"batch_tokens": 35}, 2, "5 positions for each of 2 processes", "d", "30 and 40"),
        ({"batch_tokens": 4}, 1, "4 tokens", "d", "least size is 5"),
    ],
)
def test_steps_that_cannot_be(
    data: dict[str, int], world: int, what: str, where: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        entries_per_step(DataConfig(**data), 5, world)
    assert caught.value.where == ("data.batch_tokens" if where else "")
    assert hint in caught.value.hint


def test_the_recipe_reaches_the_feed(stores: list[Store]) -> None:
    data = DataConfig(batch_tokens=200, shards=2, seed=3, weights=(3, 1))
    feed = make_feed(TrainConfig(data=data), task(), stores, 2)
    assert (feed.batch_size, feed.seed) == (40, 3)
    assert [len(rows.groups) for rows in feed.sources] == [2, 2]
    source = feed.rows_of(5)[2]
    assert np.bincount(source).tolist() == [30, 10]
    assert feed.batch(5).columns["token"][:, 0].tolist() == (source + 1).tolist()
    plain = make_feed(TrainConfig(data=DataConfig(shuffle=False)), task(), stores[:1])
    assert plain.rows_of(0)[1].tolist() == list(range(16))


def test_streams_know_no_groups(stores: list[Store]) -> None:
    config = TrainConfig(data=DataConfig(shards=1))
    with pytest.raises(UsageError, match="begin anywhere") as caught:
        make_feed(config, task(rows="stream"), stores)
    assert caught.value.where == "data.shards"
    assert "windows" in caught.value.hint


def test_a_loss_column_is_read_beside_the_model_s(tmp_path: Path, stores: list[Store]) -> None:
    schema = {"token": Column("u2"), "loss": Column("u1")}
    masked = write_store(tmp_path / "masked", schema, [[rec([1] * 11, loss=[0] * 9 + [1] * 2)]])
    config = TrainConfig(data=DataConfig(batch=2, shuffle=False))
    feed = make_feed(config, task(), [masked])
    prepared = task().prepare(feed.batch(0))
    assert list(prepared.columns) == ["token"]
    assert prepared.targets["token"].tolist() == [[-1] * 5, [-1, -1, -1, 1, 1]]
    # Where one store has it all must, or tokens would be learned that another may not.
    for mixed in ([masked, stores[0]], [stores[0], masked]):
        with pytest.raises(UsageError, match="no column 'loss'") as caught:
            make_feed(config, task(), mixed)
        assert caught.value.where == str(stores[0].path)
