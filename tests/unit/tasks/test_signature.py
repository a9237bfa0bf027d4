"""The task signature: sets of blocks of another store, their CPI, and their vectors."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tokmill
import toy
from embedded import vectors_of
from making import quick_build, write_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.feed.feed import Feed
from tokmill.inference.embed import embed_store
from tokmill.models.model import WEIGHT
from tokmill.store.checks.validate import validate
from tokmill.store.references import reference_to, written_in
from tokmill.store.schema import ROLES
from tokmill.store.store import Store
from tokmill.tasks.comparison.signature import VECTOR, heaviest
from tokmill.tasks.task import to_tensors
from tokmill.training.data import open_stores
from tokmill.training.evaluate import evaluate
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import facts_from, inputs_of, load_task, make_task
from toy import losses
from weighted_sets import SCHEMA, WIDTH, blocks_store, intervals_store

torch.set_num_threads(1)
MODEL = {"kind": "set_transformer", "layers": 1, "inducing": 4, "seeds": 2}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stores")
    blocks_store(root / "blocks")
    intervals_store(root / "sets", root / "blocks")
    intervals_store(root / "sets-val", root / "blocks", 13, seed=5)
    return root


def recipe(stores: Path, steps: int = 8, **sections: Any) -> dict[str, Any]:
    return toy.recipe(
        stores / "sets",
        steps,
        data={
            "val": str(stores / "sets-val"),
            "overlays": ["entries"],
            **sections.pop("data", {}),
        },
        model=MODEL,
        task={"kind": "signature", "length": 64, **sections.pop("task", {})},
        run={"eval_every": max(1, steps // 5), "eval_rows": 0},
        **sections,
    )


def task_of(value: dict[str, Any]) -> Any:
    config = from_dict(value)
    return make_task(config, inputs_of(config, facts_from(config, open_stores(config.data))))


def batch_of(task: Any, store: Store, size: int = 4) -> Any:
    columns = task.extra_columns({**task.token_store(task.config, store).schema, **store.schema})
    vectors = [task.vectors(task.config, store)]
    feed = Feed(task.rows(store), size, shuffle=False, columns=columns, vectors=vectors)
    return task.prepare(feed.batch(0))


@pytest.mark.parametrize("loss", ["triplet", "in_batch", "circle"])
def test_signatures_and_cpi_are_learned(loss: str, stores: Path, tmp_path: Path) -> None:
    task = {"loss": loss, "cpi_weight": 1, "margin": 0.45}
    tokmill.train(recipe(stores, 60, task=task), tmp_path / "run", quiet=True)
    # The circle loss is so large that the little CPI does not count here.
    for name in ("loss", "loss_likeness", *["loss_cpi"] * (loss != "circle")):
        found = [*losses(tmp_path / "run", name).values()]
        assert np.isfinite(found).all() and sum(found[-8:]) < sum(found[:8]), name
    errors = losses(tmp_path / "run", "val_cpi_error")
    assert loss != "triplet" or errors[60] < errors[12]
    told = evaluate(tmp_path / "run", stores / "sets-val", device="cpu")
    assert told["cpi_error"] == pytest.approx(errors[60], rel=1e-4)
    assert told["loss"] == pytest.approx(
        told["loss_likeness"] + told["loss_cpi"] + 0.01 * told["loss_consistency"], rel=1e-5
    )


def test_a_row_is_its_blocks_their_shares_and_the_cpi(stores: Path) -> None:
    store, blocks = Store(stores / "sets", ["entries"]), Store(stores / "blocks", ["vectors"])
    batch = batch_of(task_of(recipe(stores, task={"length": 4096})), store)
    vectors, native = blocks.column("embedding"), Store(stores / "sets")
    assert (
        batch.columns.keys() == {VECTOR, WEIGHT} and batch.values["role"].tolist() == [0, 1, 2] * 4
    )
    for row, number in enumerate(np.stack([store.column(r)[:4] for r in ROLES], axis=1).ravel()):
        record, filled = native.record(number), batch.document[row] >= 0
        np.testing.assert_array_equal(batch.columns[VECTOR][row][filled], vectors[record["block"]])
        share = record["count"] / record["count"].sum()
        np.testing.assert_allclose(batch.columns[WEIGHT][row][filled, 0], share, rtol=1e-6)
        log = np.log(record["cpi"])
        np.testing.assert_allclose(batch.values["log_cpi"][row], log, rtol=1e-6)
    assert not batch.columns[WEIGHT][batch.document < 0].any()


def test_a_batch_across_two_epochs(stores: Path) -> None:
    """40 intervals, 12 a step: the fourth step has some of both epochs."""
    store, task = Store(stores / "sets", ["entries"]), task_of(recipe(stores))
    columns = task.extra_columns({**store.reference("anchor").schema, **store.schema})
    vectors = [task.vectors(task.config, store)]
    feed = Feed(task.rows(store), 12, columns=columns, vectors=vectors)
    epochs, rows, _ = feed.rows_of(3)
    assert set(epochs) == {0, 1}
    found = feed.batch(3)
    parts = [feed.make(epochs[i : i + 1], rows[i : i + 1]) for i in range(12)]
    for name in ("vector", "count", "block"):
        alone = np.concatenate([part.columns[name] for part in parts])
        np.testing.assert_array_equal(found.columns[name], alone)


def test_the_heaviest_blocks_are_kept() -> None:
    document = np.asarray([[0] * 5, [0, 0, -1, -1, -1]], np.int32)
    weight = np.asarray([[1, 5, 2, 4, 3], [2, 7, 0, 0, 0]], np.float32)[..., None]
    columns = {WEIGHT: weight, VECTOR: np.repeat(weight * 10, 2, axis=2)}
    found, kept = heaviest(columns, document, 3)
    assert found[WEIGHT][..., 0].tolist() == [[5, 4, 3], [7, 2, 0]]
    assert (found[VECTOR] == found[WEIGHT] * 10).all()
    assert kept.tolist() == [[0, 0, 0], [0, 0, -1]]
    assert heaviest(columns, document, 5)[1] is document


def test_embed_makes_the_signatures_of_the_training(stores: Path, tmp_path: Path) -> None:
    """An overlay; whatever the batch, and whatever the order of the blocks in a record."""
    value = recipe(stores)
    tokmill.train(value, tmp_path / "run", quiet=True)
    made = embed_store(tmp_path / "run", stores / "sets-val", name="signatures", device="cpu")
    assert (made.pool, made.records, made.width) == ("signature", 13, 16)
    store = Store(stores / "sets-val", ["signatures"])
    assert validate(store).ok
    for tokens in (1, 300):
        keys = {"device": "cpu", "batch_tokens": tokens}
        found = vectors_of(tmp_path / "run", stores / "sets-val", **keys)
        np.testing.assert_allclose(found, store.column("embedding"), atol=1e-5)
    task = load_task(tmp_path / "run")
    batch = batch_of(task, Store(stores / "sets-val", ["entries"]), 13)
    with torch.no_grad():
        found = task.act(to_tensors(batch, torch.device("cpu")))["vectors"][::3, :16]
    anchors = Store(stores / "sets-val", ["entries"]).column("anchor")
    wanted = F.normalize(torch.from_numpy(store.column("embedding")[anchors]))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_other_vectors_of_blocks_are_noticed(tmp_path: Path) -> None:
    """By the model that made them."""
    stores = tmp_path
    blocks_store(stores / "blocks")
    intervals_store(stores / "sets", stores / "blocks")
    intervals_store(stores / "sets-val", stores / "blocks", 13, seed=5)
    lm = toy.recipe(stores / "blocks", 2, data={"batch": 2}, model={"dim": WIDTH, "heads": 1})
    tokmill.train(lm, tmp_path / "one", quiet=True)
    tokmill.train({**lm, "run": {**lm["run"], "seed": 1}}, tmp_path / "two", quiet=True)
    for run in ("one", "two"):
        embed_store(tmp_path / run, stores / "blocks", name=run, device="cpu")
    value = recipe(stores, task={"overlay": "one"})
    tokmill.train(value, tmp_path / "run", quiet=True)
    assert evaluate(tmp_path / "run", stores / "sets-val", device="cpu")["rows"] == 13
    shutil.rmtree(stores / "blocks/overlays/one")
    embed_store(tmp_path / "two", stores / "blocks", name="one", device="cpu")
    for use in (evaluate, embed_store):
        with pytest.raises(TokmillError, match="were made by the model"):
            use(tmp_path / "run", stores / "sets-val", device="cpu")
    with pytest.raises(UsageError, match="several overlays of the store of blocks"):
        tokmill.train(recipe(stores), tmp_path / "other", quiet=True)


@pytest.mark.parametrize(
    ("task", "data", "match"),
    [
        ({}, {"overlays": []}, "the similar intervals are unknown"),
        ({"overlay": "vectors", "vector": "embeding"}, {}, "has no column 'embeding'"),
        ({"block": "count"}, {}, "no column 'count' that refers to another store"),
        ({"weight": "counts"}, {}, "no column 'counts' with a number for each block"),
        ({"cpi": "ipc"}, {}, "no column 'ipc' with a number for each interval"),
        ({"cpi_weight": -1}, {}, "task.cpi_weight"),
    ],
)
def test_what_cannot_be_is_refused(
    task: dict[str, Any], data: dict[str, Any], match: str, stores: Path, tmp_path: Path
) -> None:
    value = recipe(stores, task={"overlay": "vectors", **task}, data=data)
    with pytest.raises(UsageError, match=match):
        tokmill.train(value, tmp_path / "run", quiet=True)


def test_another_model_is_refused(stores: Path, tmp_path: Path) -> None:
    value = recipe(stores, task={"overlay": "vectors"})
    value["model"] = {"kind": "encoder", "dim": 16, "layers": 1, "heads": 2}
    with pytest.raises(UsageError, match="only a model of sets"):
        tokmill.train(value, tmp_path / "run", quiet=True)


def test_the_cpi_alone_and_no_cpi(stores: Path, tmp_path: Path) -> None:
    """Without columns of references, also to evaluate; and without a CPI or weights."""
    alone = {"likeness_weight": 0, "consistency_weight": 0, "cpi_weight": 1, "overlay": "vectors"}
    value = recipe(stores, 40, task=alone, data={"overlays": []})
    tokmill.train(value, tmp_path / "cpi", quiet=True)
    found = [*losses(tmp_path / "cpi", "loss_cpi").values()]
    assert sum(found[-5:]) < sum(found[:5])
    assert "val_mrr" not in losses(tmp_path / "cpi", "val_mrr")
    cpi = Store(stores / "sets-val").column("cpi").astype(np.float64)
    cpi = cpi[np.isfinite(cpi) & (cpi > 0)]
    assert len(cpi) % 2 == 0 and len(set(cpi)) == len(cpi), "two different ones in the middle"
    constant = (abs(np.median(cpi) - cpi) / cpi).mean()
    told = losses(tmp_path / "cpi", "val_cpi_error_constant")
    assert told[40] == pytest.approx(constant, rel=1e-5)
    bare = {"cpi": "", "weight": "", "overlay": "vectors"}
    tokmill.train(recipe(stores, 4, task=bare), tmp_path / "bare", quiet=True)
    assert losses(tmp_path / "bare", "val_mrr") and not losses(tmp_path / "bare", "val_cpi_error")


def test_intervals_that_are_equal_in_a_column_are_alike(stores: Path, tmp_path: Path) -> None:
    task = {"same": ["phase"], "overlay": "vectors", "loss": "in_batch", "size": 3}
    value = recipe(stores, 30, task=task, data={"overlays": [], "batch": 4})
    tokmill.train(value, tmp_path / "run", quiet=True)
    found = [*losses(tmp_path / "run", "loss_likeness").values()]
    assert sum(found[-5:]) < sum(found[:5])
    assert losses(tmp_path / "run", "val_mrr")[30] > 0


def test_an_interval_without_blocks(tmp_path: Path) -> None:
    """It has no signature: zeros, which are counted."""
    blocks_store(tmp_path / "blocks")
    intervals_store(tmp_path / "sets", tmp_path / "blocks")
    intervals_store(tmp_path / "sets-val", tmp_path / "blocks", 13, seed=5)
    tokmill.train(recipe(tmp_path, 2), tmp_path / "run", quiet=True)
    cells = {"phase": 0, "interval": 0, "cpi": 1.0}
    rows = [{"block": [], "count": [], **cells}, {"block": [3], "count": [2**63], **cells}]
    rows.append({"block": [3, 4], "count": [0, 0], **cells})
    (tmp_path / "odd").mkdir()
    references = written_in(tmp_path / "odd", {"blocks": reference_to(tmp_path / "blocks")})
    write_store(tmp_path / "odd", SCHEMA, [rows], references=references)
    made = embed_store(tmp_path / "run", tmp_path / "odd", device="cpu")
    found = Store(tmp_path / "odd", [made.overlay]).column("embedding")
    assert made.empty == 1 and np.isfinite(found).all()
    assert found.any(1).tolist() == [False, True, False]


@pytest.fixture(scope="module")
def imported(stores: Path) -> Path:
    """The entries of the stores as pickles, and these as stores: with vectors, with numbers."""
    vectors = Store(stores / "blocks", ["vectors"]).column("embedding")
    for name in ("sets", "sets-val"):
        store, native = Store(stores / name, ["entries"]), Store(stores / name)
        entries, numbers = [], []
        for row in range(len(store)):
            three = [native.record(int(store.column(role)[row])) for role in ROLES]
            if any(not np.isfinite(one["cpi"]) for one in three):
                continue
            parts = [(one["block"], one["count"].tolist()) for one in three]
            cpi = [float(one["cpi"]) for one in three]
            entries.append((*(p for b, w in parts for p in ([*vectors[b]], w)), *cpi))
            numbers.append((*(p for b, w in parts for p in (b.tolist(), w)), *cpi))
        for kind, value in (("vectors", entries), ("numbers", numbers)):
            path = stores / f"{name}.{kind}.pkl"
            path.write_bytes(pickle.dumps(value, 4))
            more = {"blocks": str(stores / "blocks")} if kind == "numbers" else {}
            quick_build("triplets", path, stores / f"{name}-{kind}", **more)
    return stores


def of_imported(stores: Path, kind: str, steps: int = 8, **task: Any) -> dict[str, Any]:
    value = recipe(stores, steps, task=task)
    value["data"] |= {"val": str(stores / f"sets-val-{kind}"), "overlays": []}
    value["data"]["train"] = str(stores / f"sets-{kind}")
    return value


@pytest.mark.parametrize("kind", ["vectors", "numbers"])
def test_imported_entries_are_rows_like_mined_ones(kind: str, imported: Path) -> None:
    """The batches of both have the same vectors, shares and CPI, and the same relations."""
    native = Store(imported / "sets")
    mined = Store(imported / "sets", ["entries"])
    store = Store(imported / f"sets-{kind}")
    task = task_of(of_imported(imported, kind, length=4096))
    mine = batch_of(task, store, len(store) // 3)
    known = [
        row for row in range(len(mined))
        if all(np.isfinite(native.record(int(mined.column(r)[row]))["cpi"]) for r in ROLES)
    ]  # fmt: skip
    numbers = [int(mined.column(role)[row]) for row in known for role in ROLES]
    assert mine.values["role"].tolist() == [0, 1, 2] * len(known)
    vectors = Store(imported / "blocks", ["vectors"]).column("embedding")
    for row, number in enumerate(numbers):
        record, filled = native.record(number), mine.document[row] >= 0
        np.testing.assert_array_equal(mine.columns[VECTOR][row][filled], vectors[record["block"]])
        share = record["count"] / record["count"].sum()
        np.testing.assert_allclose(mine.columns[WEIGHT][row][filled, 0], share, rtol=1e-6)
        np.testing.assert_allclose(mine.values["log_cpi"][row], np.log(record["cpi"]), rtol=1e-6)
    # Equal intervals are one family, and so are anchor and positive, also through others.
    family = {number: number for number in numbers}
    for _ in numbers:
        for a, p, _ in np.reshape(numbers, (-1, 3)).tolist():
            family[a] = family[p] = min(family[a], family[p])
    theirs = [family[number] for number in numbers]
    pairs = set(zip(theirs, mine.values["group"].tolist(), strict=True))
    assert len(pairs) == len(set(theirs)) == len(set(mine.values["group"].tolist()))


@pytest.mark.parametrize("loss", ["triplet", "in_batch", "circle"])
def test_imported_entries_are_learned(loss: str, imported: Path, tmp_path: Path) -> None:
    """With vectors or with numbers of blocks: the same losses, and signatures of all intervals."""
    found = []
    for kind in ("vectors", "numbers"):
        out = tmp_path / kind
        tokmill.train(of_imported(imported, kind, 8, loss=loss), out, quiet=True)
        told = evaluate(out, imported / f"sets-val-{kind}", device="cpu")
        found.append([*losses(out).values(), told["loss"], told["mrr"], told["cpi_error"]])
    assert np.isfinite(found).all() and len(found[0]) == 11
    np.testing.assert_allclose(*found, rtol=1e-5)
    embed_store(tmp_path / "vectors", imported / "sets-vectors", name=loss, device="cpu")
    signatures = Store(imported / "sets-vectors", [loss]).column("embedding")
    content = Store(imported / "sets-vectors").column("content")
    for number in np.unique(content)[:5]:
        same = signatures[content == number]
        np.testing.assert_allclose(same, np.broadcast_to(same[0], same.shape), atol=1e-5)


def test_imported_entries_that_cannot_be_learned(imported: Path, tmp_path: Path) -> None:
    alone = quick_build("triplets", imported / "sets.numbers.pkl", tmp_path / "alone")
    value = of_imported(imported, "numbers")
    value["data"] |= {"train": str(alone.path), "val": ""}
    with pytest.raises(UsageError, match="no column 'block' that refers") as error:
        tokmill.train(value, tmp_path / "run", quiet=True)
    assert "--blocks" in (error.value.hint or "")
    with pytest.raises(UsageError, match="say already which records are similar"):
        tokmill.train(of_imported(imported, "vectors", same=["cpi"]), tmp_path / "s", quiet=True)
