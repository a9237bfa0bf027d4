"""The task contrastive: rows of references and of keys, pooling as in `embed`, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tokmill
import toy
from entry_stores import labelled, lay, tuples_of
from tokmill.errors import UsageError
from tokmill.feed.feed import Batch, Feed
from tokmill.feed.rows import Whole
from tokmill.inference.embed import embed
from tokmill.store.store import Store
from tokmill.tasks.entries import asking_entries, with_relations
from tokmill.tasks.task import to_tensors
from tokmill.training.data import open_stores
from tokmill.training.estimate import estimate
from tokmill.training.evaluate import evaluate
from tokmill.training.recipe.check import from_dict
from tokmill.training.runs.run import facts_from, inputs_of, load_task, make_task
from toy import losses

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stores")
    tuples_of(root / "tuples", labelled(root / "functions"))
    tuples_of(root / "val", root / "functions", 13, seed=5)
    labelled(root / "functions-val", 13, seed=5)
    return root


def recipe(stores: Path, overlays: list[str], **sections: Any) -> dict[str, Any]:
    pair = ("functions", "functions-val") if overlays == ["label"] else ("tuples", "val")
    return toy.recipe(
        stores / pair[0],
        sections.pop("steps", 12),
        data={"val": str(stores / pair[1]), "overlays": overlays, "batch": 8},
        task={"kind": "contrastive", "length": 16, **sections.pop("task", {})},
        run={"eval_every": 6, "eval_rows": 0, **sections.pop("run", {})},
        **sections,
    )


@pytest.mark.parametrize("loss", ["in_batch", "triplet", "circle"])
@pytest.mark.parametrize("overlay", ["entries", "groups", "label"])
def test_it_learns_from_columns_and_from_keys(
    loss: str, overlay: str, stores: Path, tmp_path: Path
) -> None:
    task = {"loss": loss, "negatives": "step"}
    if overlay == "label":
        # A record of each of the four classes is a step.
        task |= {"same": ["label"], "size": 5}
    value = recipe(stores, [overlay], task=task, steps=24, run={"eval_every": 12})
    if overlay == "label":
        value["data"]["batch"] = 4
    tokmill.train(value, tmp_path / "run", quiet=True)
    found = [*losses(tmp_path / "run").values()]
    assert np.isfinite(found).all() and sum(found[-4:]) < sum(found[:4]), found
    pool = losses(tmp_path / "run", "val_pool")
    assert set(pool) == {12, 24} and 0 < losses(tmp_path / "run", "val_mrr")[24] <= 1


@pytest.mark.parametrize("pool", ["mean", "last", "attention"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "rwkv7"])
def test_pooling_while_training_is_that_of_embed(
    kind: str, pool: str, stores: Path, tmp_path: Path
) -> None:
    model = {"kind": kind} | ({"head_dim": 8, "heads": None} if kind == "rwkv7" else {})
    value = recipe(stores, ["entries"], task={"pool": pool}, optim={"weight_decay": 0})
    value["model"] = {k: v for k, v in {**value["model"], **model}.items() if v is not None}
    tokmill.train(value, tmp_path / "run", quiet=True)
    made = embed(tmp_path / "run", stores / "functions-val", npy=tmp_path / "v.npy", device="cpu")
    assert made.pool == pool
    store, task = Store(stores / "functions-val"), load_task(tmp_path / "run")
    if pool == "attention":
        assert task.attention.query.abs().max() > 0
    feed = Feed(Whole(store, 16), len(store), shuffle=False, columns=["token"])
    batch = task.prepare(feed.batch(0))
    with torch.no_grad():
        found = task.act(to_tensors(batch, torch.device("cpu")))["vectors"]
    wanted = F.normalize(torch.from_numpy(np.load(tmp_path / "v.npy")), dim=1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_roles_and_records_of_rows(stores: Path) -> None:
    store = Store(stores / "tuples", ["entries"])
    value = recipe(stores, ["entries"])
    task = load_like(value)
    rows = task.rows(store)
    columns = ["token", *task.extra_columns(store.schema)]
    batch = task.prepare(Feed(rows, 4, shuffle=False, columns=columns).batch(0))
    assert batch.values["role"].tolist() == [0, 1, 2] * 4
    named = np.stack([store.column(n)[:4] for n in ("anchor", "positive", "negative")], axis=1)
    assert batch.values["record"].tolist() == named.ravel().tolist()
    assert batch.values["members"].tolist() == np.repeat(named[:, :2], 3, axis=0).tolist()
    assert set(batch.values["group"].tolist()) == {-1} and task.count(batch) == 4
    left_out = task.nothing(batch, batch.entry == 1)
    assert task.count(left_out) == 3


def test_groups_and_several_negatives(stores: Path, tmp_path: Path) -> None:
    """A column of vectors names several negatives; entries of one group are not compared."""
    random = np.random.default_rng(0)
    names = {"anchor": random.integers(0, 40, 24), "positive": random.integers(0, 40, 24)}
    names["negative"] = random.integers(0, 40, (24, 3))
    path = toy.make_store(tmp_path / "entries", [np.ones(2, np.int64)] * 24)
    lay(path, "e", {n: v.astype(np.uint32) for n, v in names.items()}, stores / "functions")
    lay(path, "g", {"group": (np.arange(24) // 2).astype(np.uint32)})
    store = Store(path, ["e", "g"])
    task = load_like(recipe(stores, ["entries"]))
    columns = ["token", *task.extra_columns(store.schema)]
    batch = task.prepare(Feed(task.rows(store), 4, shuffle=False, columns=columns).batch(0))
    assert batch.values["role"].tolist() == [0, 1, 2, 2, 2] * 4
    assert batch.values["group"].tolist() == [g for e in (0, 0, 1, 1) for g in (e, e, -1, -1, -1)]
    assert batch.values["record"].tolist()[2:5] == names["negative"][0].tolist()


def load_like(value: dict[str, Any]) -> Any:
    config = from_dict(value)
    return make_task(config, inputs_of(config, facts_from(config, open_stores(config.data))))


def test_an_evaluation_ranks_all_records(stores: Path, tmp_path: Path) -> None:
    """13 triplets: one positive, and the 26 + 12 rows that are no record of the query's."""
    tokmill.train(recipe(stores, ["entries"]), tmp_path / "run", quiet=True)
    found = evaluate(tmp_path / "run", stores / "val", device="cpu")
    store = Store(stores / "val", ["entries"])
    names = [store.column(n).astype(int) for n in ("anchor", "positive", "negative")]
    sizes = []
    for i in range(13):
        mine = {int(names[0][i]), int(names[1][i])}
        others = [int(c[j]) for c in names for j in range(13) if j != i] + [int(names[2][i])]
        sizes.append(1 + sum(one not in mine for one in others))
    assert found["pool"] == pytest.approx(np.mean(sizes)) and found["rows"] == 13
    # The same vectors, whatever the batch.
    again = evaluate(tmp_path / "run", stores / "val", device="cpu", batch=5)
    assert {k: found[k] for k in ("mrr", "recall_1", "pool")} == pytest.approx(
        {k: again[k] for k in ("mrr", "recall_1", "pool")}
    )


def test_entries_of_one_record_ask_nothing() -> None:
    batch = Batch({}, np.zeros((5, 2), np.int32), np.zeros(5, np.uint64))
    batch.entry = np.asarray([0, 0, 1, 2, 2])
    values = with_relations(batch, (), "")
    assert asking_entries(batch.entry, values) == 2
    assert asking_entries(np.asarray([-1, -1, -1, 2, -1]), values) == 0


def test_a_dry_run_of_each_loss(stores: Path) -> None:
    for loss in ("in_batch", "triplet", "circle"):
        found = estimate(from_dict(recipe(stores, ["entries"], task={"loss": loss})))
        assert found["tensor_bytes"] > 0


@pytest.mark.parametrize(
    ("task", "match"),
    [
        ({"temperature": 0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"gamma": -1}, "gamma must be above 0"),
        ({"margin": 3}, "margin of cosines"),
        ({"margin": float("nan")}, "margin of cosines"),
        ({"columns": ["anchor", "bytes"]}, "no column 'bytes' that refers"),
        ({"group": "token"}, "'token' does not have a whole number for each entry"),
    ],
)
def test_impossible_keys_are_refused(
    task: dict[str, Any], match: str, stores: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=match):
        tokmill.train(recipe(stores, ["entries"], task=task), tmp_path / "run", quiet=True)


def test_a_store_that_says_nothing_of_likeness_is_refused(stores: Path, tmp_path: Path) -> None:
    value = recipe(stores, ["label"])
    with pytest.raises(UsageError, match="nothing says which records are alike"):
        tokmill.train(value, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("what", ["triplets", "groups"])
def test_stores_that_build_mine_makes(what: str, tmp_path: Path) -> None:
    """Families are never negatives of each other, also where one is dealt to several groups."""
    labelled(tmp_path / "functions")
    lay(tmp_path / "functions", "build", {"build": np.arange(40).astype(np.uint32)})
    tokmill.build(
        "mine", tmp_path / "functions", tmp_path / "mined",
        what=what, overlays=("label", "build"), same=("label",), differ=("build",),
        apart=("label",), **({"members": 4} if what == "groups" else {}),
    )  # fmt: skip
    value = toy.recipe(
        tmp_path / "mined",
        4,
        data={"val": str(tmp_path / "mined"), "batch": 4},
        task={"kind": "contrastive", "length": 16},
    )
    task, store = load_like(value), Store(tmp_path / "mined")
    columns = [*task.sizes, *task.extra_columns(store.schema)]
    batch = task.prepare(Feed(task.rows(store), 2, shuffle=False, columns=columns).batch(0))
    wanted = store.column("group")[batch.entry]
    assert len(np.unique(store.column("group"))) == 4 < len(store)
    alike = batch.values["role"] != 2
    assert batch.values["group"][alike].tolist() == wanted[alike].tolist()
    tokmill.train(value, tmp_path / "run", quiet=True)
    assert losses(tmp_path / "run", "val_pool")[4] > 1
