"""Pairs of halves with hidden tokens: rows, losses, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tokmill
import toy
from task_cases import ROLES, make_stores, recipe, special_store, walks
from tokmill.base.errors import UsageError
from tokmill.feed.feed import Feed
from tokmill.feed.halves import OTHER
from tokmill.store.store import Store
from tokmill.tasks.hidden.masked import PLACES
from tokmill.tasks.hidden.sentence_pair import RELATION, SentencePair
from tokmill.tasks.task import to_tensors
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import facts_from, inputs_of, make_task

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stores(tmp_path_factory.mktemp("stores"))


def made(stores: Path, **keys: Any) -> SentencePair:
    value = recipe(stores, "sentence_pair")
    value["task"] |= keys
    config = from_dict(value)
    facts = facts_from(config, [Store(stores / "walks")])
    task = make_task(config, inputs_of(config, facts))
    assert isinstance(task, SentencePair)
    return task


def test_a_row_is_cls_a_sep_b_sep(stores: Path) -> None:
    task = made(stores)
    feed = Feed(task.rows(Store(stores / "walks")), 16, columns=["token"])
    raw = feed.batch(0)
    batch = task.prepare(raw)
    assert raw.document.shape == (16, 21) and batch.document.shape == (16, 24)
    assert set(batch.targets[RELATION].tolist()) == {0, 1}
    for row in range(16):
        a, b = (raw.document[row] == 0).sum(), (raw.document[row] > 0).sum()
        ids = batch.columns["token"][row].copy()
        places = batch.targets[PLACES][row]
        hidden = places[places >= 0]
        ids[hidden] = batch.targets["token"][row][: len(hidden)]
        own = raw.columns["token"][row]
        expected = [ROLES["cls"], *own[:a], ROLES["sep"], *own[a : a + b], ROLES["sep"]]
        assert ids[: a + b + 3].tolist() == expected
        segment = batch.columns["segment"][row]
        assert segment[: a + b + 3].tolist() == [0] * (a + 2) + [1] * (b + 1)
        assert (batch.document[row] >= 0).sum() == a + b + 3
        assert batch.targets[RELATION][row] == (OTHER in raw.document[row])


def test_the_loss_is_the_mean_of_both(stores: Path) -> None:
    """Rows with as many hidden tokens each: the mean over tokens, and that over pairs."""
    task = made(stores, most=1, pair_weight=2.0).eval()
    feed = Feed(task.rows(Store(stores / "walks")), 16, columns=["token"])
    batch = task.prepare(feed.batch(0))
    tensors = to_tensors(batch, torch.device("cpu"))
    with torch.no_grad():
        loss, sums = task(tensors)
        states = task.model(tensors)
        logits = task.relation(torch.tanh(task.pooler.linear(states[:, 0])))
        pair = F.cross_entropy(logits, tensors.targets[RELATION])
        tokens = task.heads.logits(task.model, states, "token")
        at = tokens[torch.arange(16), tensors.targets[PLACES][:, 0]]
        token = F.cross_entropy(at, tensors.targets["token"][:, 0])
    assert float(loss) / 16 == pytest.approx(float(token + 2 * pair), rel=1e-5)
    metrics = task.report({name: float(value) for name, value in sums.items()}, 16)
    assert metrics["loss_masked"] == pytest.approx(float(token), rel=1e-5)
    assert metrics["loss_pair"] == pytest.approx(float(pair), rel=1e-5)
    right = (logits.argmax(1) == tensors.targets[RELATION]).float().mean()
    assert metrics["pair_accuracy"] == pytest.approx(float(right))
    trained = task.train()(tensors)[0]
    assert float(trained.detach()) == pytest.approx(float(loss), rel=1e-5)


def test_what_makes_no_pairs_is_refused(stores: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no room for two halves"):
        made(stores, length=15).rows(Store(stores / "walks"))
    with pytest.raises(UsageError, match="no column 'file'"):
        made(stores, group="file").rows(Store(stores / "walks"))
    framed = special_store(tmp_path / "s", [np.asarray([2, *d, 3]) for d in walks(9)])
    with pytest.raises(UsageError, match=r"begin with \[CLS\]"):
        made(stores).rows(Store(framed))
    value = recipe(stores, "sentence_pair")
    value["model"] = {"kind": "decoder"}
    with pytest.raises(UsageError, match="takes models that look both ways"):
        tokmill.train(value, tmp_path / "run", quiet=True)
    plain = toy.make_store(tmp_path / "plain", toy.cycles(9))
    value = recipe(stores, "sentence_pair")
    value["data"] = {"train": str(plain)}
    with pytest.raises(UsageError, match="no 'mask' token"):
        tokmill.train(value, tmp_path / "run", quiet=True)
