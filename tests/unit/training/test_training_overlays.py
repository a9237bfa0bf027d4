"""`data.overlays`: a loss mask that was made after the store."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokmill
from making import here, rec, write_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.models.model import Inputs
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.store.schema import Column
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.training.data import make_feed, open_stores, open_to_evaluate
from tokmill.training.dataset import TokenDataset
from tokmill.training.evaluate import evaluate
from tokmill.training.recipe.config import DataConfig, TrainConfig
from tokmill.training.runs.run import read_run
from toy import cycles, losses, make_store, recipe

SIZES = {"token": 23}


def mask(store: Path, values: Any, name: str = "mask") -> None:
    """Lay a `loss` over a store."""
    file = store.parent / f"{name}.npy"
    np.save(file, values)
    how = How(quiet=True, amount=here(), yes=True)
    tokmill.build("overlay", store, values=str(file), column="loss", how=how)


@pytest.fixture
def learned(tmp_path: Path) -> Path:
    """A store of which every third token is learned."""
    path = make_store(tmp_path / "learned", cycles(40))
    mask(path, np.arange(Store(path).tokens) % 3 == 0)
    return path


def test_tokens_whose_loss_is_0_are_no_targets(learned: Path) -> None:
    model = Decoder(DecoderConfig(dim=4, layers=1, heads=2), Inputs(SIZES))
    task = NextToken(NextTokenConfig(length=16), model, Inputs(SIZES))
    seen = []
    for overlays in ((), ("mask",)):
        data = DataConfig(train=str(learned), overlays=overlays, batch=4, shuffle=False)
        feed = make_feed(TrainConfig(data=data), task, open_stores(data))
        prepared = task.prepare(feed.batch(0))
        assert list(prepared.columns) == ["token"]
        seen.append(prepared.targets["token"])
    place = np.arange(4)[:, None] * 16 + 1 + np.arange(16)
    assert (seen[1] == np.where(place % 3 == 0, seen[0], -1)).all()
    assert (seen[1] >= 0).sum() < (seen[0] >= 0).sum() / 2


def test_a_training_learns_what_the_mask_leaves(learned: Path, tmp_path: Path) -> None:
    plain = tokmill.train(recipe(learned, 2), tmp_path / "plain", quiet=True).path
    value = recipe(learned, 2, data={"overlays": ["mask"]})
    masked = tokmill.train(value, tmp_path / "masked", quiet=True).path
    tokens = [losses(run, "targets")[2] for run in (plain, masked)]
    assert tokens[1] < tokens[0] / 2
    # What a run remembers of its store is the fingerprint, and that of the mask.
    assert read_run(masked)[1].fingerprint == Store(learned, ["mask"]).content
    assert read_run(plain)[1].fingerprint == Store(learned).fingerprint


def test_a_resume_takes_no_other_mask(learned: Path, tmp_path: Path) -> None:
    value = recipe(learned, 4, data={"overlays": ["mask"]}, run={"checkpoint_every": 2})
    run = tokmill.train(value, tmp_path / "run", quiet=True).path
    assert tokmill.train(value, run, quiet=True).step == 4
    with pytest.raises(TokmillError, match=r"data\.overlays: \['mask'\] → \[\]"):
        tokmill.train(recipe(learned, 4, run={"checkpoint_every": 2}), run, quiet=True)
    mask(learned, np.ones(Store(learned).tokens, np.uint8))
    with pytest.raises(TokmillError, match="not the one that the run began with"):
        tokmill.train(value, run, quiet=True)


def test_a_store_to_evaluate_on_may_lack_it(learned: Path, tmp_path: Path) -> None:
    val = make_store(tmp_path / "val", cycles(10, seed=1))
    data = DataConfig(overlays=("mask",))
    assert open_to_evaluate(str(val), data).token_columns == ["token"]
    value = recipe(learned, 2, data={"overlays": ["mask"], "val": str(val)})
    run = tokmill.train(value, tmp_path / "run", quiet=True).path
    whole = evaluate(run, val, device="cpu")
    mask(val, np.arange(Store(val).tokens) % 2)
    assert open_to_evaluate(str(val), data).token_columns == ["token", "loss"]
    half = evaluate(run, val, device="cpu")
    assert "the store has no overlay 'mask', with which the run has learned" in whole["notes"]
    assert "bits_per_byte" in whole and "bits_per_byte" not in half
    assert half["notes"] == [
        "read with the overlay mask: tokens whose 'loss' is 0 are left out, "
        "so there are no bits_per_byte: the bytes of the rest are not known"
    ]
    assert 0.4 < half["targets"] / whole["targets"] < 0.6
    with pytest.raises(TokmillError, match="no overlay 'mask'"):
        open_stores(
            DataConfig(train=str(make_store(tmp_path / "x", cycles(3))), overlays=("mask",))
        )


def test_the_key_is_a_list(learned: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.overlays: a list is needed"):
        tokmill.train(recipe(learned, 2, data={"overlays": "mask"}), tmp_path / "run", quiet=True)


def test_a_dataset_of_others_reads_it(learned: Path) -> None:
    import pickle

    dataset = TokenDataset(Store(learned, ["mask"]), 16)
    labels = [item["labels"].tolist() for item in dataset]
    plain = [item["labels"].tolist() for item in TokenDataset(learned, 16)]
    assert sum(np.count_nonzero(np.asarray(x) >= 0) for x in labels) < 0.5 * sum(
        np.count_nonzero(np.asarray(x) >= 0) for x in plain
    )
    again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert [item["labels"].tolist() for item in again] == labels


@pytest.mark.parametrize(
    ("column", "values", "what"),
    [
        (Column("u1", per="record"), [1, 0], "one value per record; a loss mask needs one value"),
        (Column("u1"), [0, 1, 2, 0, 1], "holds 2"),
        (Column("i8"), [0, 1, -1, 0, 1], "holds -1"),
        (Column("f4"), [0, 0.5, 1, 0, 1], "floating-point"),
        (Column("u1"), [0] * 5, "is 0 everywhere, so there is no target"),
    ],
)
def test_what_is_no_mask(tmp_path: Path, column: Column, values: Any, what: str) -> None:
    """However it came into the store; in each loop that reads it, and before any step."""
    per = [values[:1], values[1:]] if column.per == "record" else [values[:3], values[3:]]
    rows = [
        rec(tokens, loss=value[0] if column.per == "record" else value)
        for tokens, value in zip([[1, 2, 3], [4, 5]], per, strict=True)
    ]
    store = write_store(tmp_path / "s", {"token": Column("u1"), "loss": column}, [rows])
    config = TrainConfig(data=DataConfig(train=str(store.path), batch=1))
    model = Decoder(DecoderConfig(dim=4, layers=1, heads=2), Inputs(SIZES))
    task = NextToken(NextTokenConfig(length=4), model, Inputs(SIZES))
    with pytest.raises(TokmillError, match=what) as error:
        make_feed(config, task, [store])
    assert error.value.hint and error.value.where == str(store.path)
    with pytest.raises(TokmillError, match=what):
        TokenDataset(store, 4)


def test_a_mask_that_leaves_nothing_begins_no_run(learned: Path, tmp_path: Path) -> None:
    mask(learned, np.zeros(Store(learned).tokens, np.uint8))
    value = recipe(learned, 2, data={"overlays": ["mask"]})
    with pytest.raises(TokmillError, match="0 everywhere") as error:
        tokmill.train(value, tmp_path / "run", quiet=True)
    assert error.value.where == str(learned / "overlays/mask")
    assert not (tmp_path / "run").exists()
