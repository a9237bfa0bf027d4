"""The task masked: frames, roles, several columns, and what hides nothing."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import tokmill
from small_models import small_model
from task_cases import ROLES, SIZE, recipe, special_store, walks
from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch, Feed
from tokmill.models.model import Inputs
from tokmill.store.store import Store
from tokmill.tasks.hidden.masked import PLACES, Masked, MaskedConfig
from tokmill.tasks.task import to_tensors
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import facts_from, inputs_of, make_task

torch.set_num_threads(1)
CPU = torch.device("cpu")


def made(
    ids: dict[str, int], roles: dict[str, dict[str, int]] | None = None, **keys: Any
) -> Masked:
    inputs = Inputs(ids, roles=roles or dict.fromkeys(ids, ROLES))
    task = Masked(MaskedConfig(**keys), small_model("encoder", inputs), inputs)
    return task.eval()


def batch_of(columns: dict[str, np.ndarray], document: np.ndarray | None = None) -> Batch:
    shape = next(iter(columns.values())).shape
    document = np.zeros(shape, np.int32) if document is None else document
    return Batch(columns, document, tokmill.feed.order.key(1, np.arange(shape[0])))


def test_special_tokens_are_found_by_role_and_stay() -> None:
    ids = np.random.default_rng(0).integers(0, SIZE, (8, 64))
    swapped = {"mask": 9, "pad": 12, "unk": 30, "sep": 7}
    task = made({"token": SIZE}, {"token": swapped}, share=1.0, length=64, rows="windows")
    batch = task.prepare(batch_of({"token": ids}))
    special = np.isin(ids, list(swapped.values()))
    assert (batch.columns["token"][special] == ids[special]).all()
    assert task.count(batch) == (~special).sum()
    hidden = batch.columns["token"][~special] == 9
    assert 0.7 < hidden.mean() < 0.9
    with pytest.raises(UsageError, match="no 'mask' token"):
        made({"token": SIZE}, {"token": {"pad": 0}})


def test_columns_are_hidden_together_and_some_are_predicted() -> None:
    random = np.random.default_rng(0)
    ids = {name: random.integers(5, size, (4, 32)) for name, size in (("asm", 31), ("mne", 12))}
    ids["mne"][:, 3] = ROLES["unk"]
    sizes = {"asm": 31, "mne": 12}
    task = made(sizes, share=1.0, mask_share=1.0, random_share=0.0, length=32)
    batch = task.prepare(batch_of(ids))
    assert all((batch.columns[name] == 4).all() for name in ids)
    # What a vocabulary lacks is not a target, and its position is hidden for the other column.
    assert (batch.targets["mne"] < 0).sum() == 4 and (batch.targets["asm"] >= 0).all()
    one = made(sizes, columns=("asm",), length=32)
    batch = one.prepare(batch_of(ids))
    assert batch.targets.keys() == {PLACES, "asm"}
    places, row = batch.targets[PLACES], np.arange(4)[:, None]
    assert (batch.targets["asm"] == ids["asm"][row, places]).all()
    loss, sums = one.train()(to_tensors(batch, CPU))
    assert loss.isfinite() and sums.keys() == {"loss"}


def test_only_hidden_positions_are_scored_and_exactly() -> None:
    """The loss is that of a head over all positions, from which those hidden are taken."""
    ids = np.random.default_rng(0).integers(5, SIZE, (4, 32))
    document = np.where(np.arange(32) < [[32], [20], [9], [1]], 0, -1).astype(np.int32)
    task = made({"token": SIZE}, length=32)
    batch = task.prepare(batch_of({"token": np.where(document < 0, 0, ids)}, document))
    tensors = to_tensors(batch, CPU)
    with torch.no_grad():
        (loss, sums), trained = task(tensors), task.train()(tensors)[0]
        whole = task.heads.logits(task.model, task.model(tensors), "token").log_softmax(-1)
    places = batch.targets[PLACES]
    found = [
        -whole[row, place, ids[row, place]]
        for row in range(4)
        for place in places[row]
        if place >= 0
    ]
    assert len(found) == task.count(batch) == 5 + 3 + 1 + 1
    assert float(loss) == pytest.approx(float(sum(found)), rel=1e-5)
    assert float(trained) == pytest.approx(float(loss), rel=1e-5)
    metrics = task.report({name: float(value) for name, value in sums.items()}, len(found))
    assert metrics.keys() == {"loss", "accuracy", "pseudo_perplexity"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return special_store(tmp_path / "walks", walks(30))


def task_on(store: Path, **keys: Any) -> Masked:
    value = recipe(store.parent, "masked")
    value["data"] = {"train": str(store), "batch": 8}
    value["task"] = {"kind": "masked", "length": 32, **keys}
    config = from_dict(value)
    task = make_task(config, inputs_of(config, facts_from(config, [Store(store)])))
    assert isinstance(task, Masked)
    return task


def test_records_stand_between_cls_and_sep(store: Path) -> None:
    task = task_on(store, rows="whole", length=20)
    feed = Feed(task.rows(Store(store)), 8, columns=["token"])
    raw = feed.batch(0)
    batch = task.prepare(raw)
    assert raw.document.shape == (8, 18) and batch.document.shape == (8, 20)
    for row in range(8):
        size = int((raw.document[row] >= 0).sum())
        assert (batch.document[row] >= 0).sum() == size + 2
        assert batch.columns["token"][row, 0] == ROLES["cls"]
        assert batch.columns["token"][row, size + 1] == ROLES["sep"]
        places = batch.targets[PLACES][row]
        for place, target in zip(places, batch.targets["token"][row], strict=True):
            assert place < 0 or raw.columns["token"][row, place - 1] == target
    # Windows over records have no frame.
    windows = task_on(store, rows="windows", length=20)
    assert windows.prepare(Feed(windows.rows(Store(store)), 8).batch(0)).document.shape == (8, 20)


def test_masks_are_new_each_epoch_and_fixed_in_evaluations(store: Path) -> None:
    task = task_on(store, rows="whole")
    feed = Feed(task.rows(Store(store)), 8, columns=["token"], shuffle=False)
    rows = np.arange(8)
    first, again, later = (task.prepare(feed.make(rows * 0 + e, rows)) for e in (0, 0, 1))
    assert (first.targets[PLACES] == again.targets[PLACES]).all()
    assert (first.targets[PLACES] != later.targets[PLACES]).any()
    assert (first.document == later.document).all()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"share": 0.0}, "no token is hidden"),
        ({"mask_share": 0.0, "random_share": 0.0}, "stay as they are"),
        ({"mask_share": 0.8, "random_share": 0.3}, "more than all"),
        ({"columns": ["tokn"]}, "has no token column"),
        ({"rows": "whole", "length": 2}, "no room between"),
        ({"rows": "packed", "step": 3}, "take no step"),
    ],
)
def test_what_hides_nothing_is_told(store: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        task_on(store, **keys).rows(Store(store))
    assert caught.value.hint and (caught.value.where or "").startswith(("task.", str(store)))


def test_a_store_of_special_tokens_alone_is_told(tmp_path: Path) -> None:
    store = special_store(tmp_path / "s", [np.asarray([2, 1, 3])] * 4)
    with pytest.raises(UsageError, match="holds special tokens alone"):
        task_on(store).rows(Store(store))


def test_the_example_takes_what_a_step_takes(store: Path) -> None:
    task = task_on(store, rows="whole", length=32)
    made = task.example(4)
    assert made.targets[PLACES].shape == (4, 5)
    task.train()(made)[0].backward()
    assert msgspec.structs.asdict(task.config)["share"] == 0.15


def test_tokens_with_a_loss_of_0_are_never_hidden(store: Path) -> None:
    task = task_on(store, rows="windows", share=1.0)
    ids = np.random.default_rng(0).integers(5, SIZE, (4, 32))
    mask = (np.arange(32) % 3 == 0) * np.ones((4, 1), np.uint8)
    batch = task.prepare(batch_of({"token": ids, "loss": mask.astype(np.uint8)}))
    assert set(batch.targets[PLACES].ravel().tolist()) == set(range(0, 32, 3))
