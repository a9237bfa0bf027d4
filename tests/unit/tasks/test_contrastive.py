"""The task contrastive: rows of references and of keys, pooling as in `embed`, what it refuses."""

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
from entry_stores import labelled, lay, tuples_of
from making import rec, write_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import write_file
from tokmill.feed.feed import Batch, Feed
from tokmill.feed.rows import Whole
from tokmill.store.schema import ROLES, Column
from tokmill.store.store import Store
from tokmill.tasks.comparison.comparison_losses import query_entries, with_relations
from tokmill.tasks.task import to_tensors
from tokmill.training.data import open_stores
from tokmill.training.evaluate import evaluate
from tokmill.training.recipe.resolve import from_dict
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


@pytest.mark.parametrize("pool", ["mean", "last"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "rwkv7"])
def test_pooling_while_training_is_that_of_embed(
    kind: str, pool: str, stores: Path, tmp_path: Path
) -> None:
    model = {"kind": kind} | ({"head_dim": 8, "heads": None} if kind == "rwkv7" else {})
    value = recipe(stores, ["entries"], task={"pool": pool}, optim={"weight_decay": 0})
    value["model"] = {k: v for k, v in {**value["model"], **model}.items() if v is not None}
    tokmill.train(value, tmp_path / "run", quiet=True)
    vectors = vectors_of(tmp_path / "run", stores / "functions-val", device="cpu")
    store, task = Store(stores / "functions-val"), load_task(tmp_path / "run")
    feed = Feed(Whole(store, 16), len(store), shuffle=False, columns=["token"])
    batch = task.prepare(feed.batch(0))
    with torch.no_grad():
        found = task.act(to_tensors(batch, torch.device("cpu")))["vectors"]
    wanted = F.normalize(torch.from_numpy(vectors), dim=1)
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
    family = families(Store(stores / "functions"), store)
    assert batch.values["group"].tolist() == [family[i] for i in named.ravel()]
    assert task.count(batch) == 4
    left_out = task.nothing(batch, batch.entry == 1)
    assert task.count(left_out) == 3


def test_groups_and_several_negatives(stores: Path, tmp_path: Path) -> None:
    """A column of vectors names several negatives; groups link entries, also of negatives."""
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
    family = families(Store(stores / "functions"), store, np.arange(24) // 2)
    rows = np.column_stack([*names.values()])[:4].ravel()
    assert batch.values["group"].tolist() == [family[i] for i in rows]


def families(functions: Store, entries: Store, group: Any = None) -> list[int]:
    """Return the smallest record that each is linked to: by entries, and by groups or by tokens."""
    label, again = [*range(len(functions))], True
    pairs = [*zip(entries.column("anchor"), entries.column("positive"), strict=True)]
    if group is None:
        first: dict[bytes, int] = {}
        for i, record in enumerate(functions):
            pairs.append((i, first.setdefault(record["token"].tobytes(), i)))
    else:
        whose = dict(zip(group, entries.column("anchor"), strict=True))
        pairs += [(a, whose[g]) for g, (a, _) in zip(group, [*pairs], strict=True)]
    while again:
        again = False
        for a, b in pairs:
            again |= label[a] != label[b]
            label[a] = label[b] = min(label[a], label[b])
    return label


def load_like(value: dict[str, Any]) -> Any:
    config = from_dict(value)
    return make_task(config, inputs_of(config, facts_from(config, open_stores(config.data))))


def test_an_evaluation_ranks_all_records(stores: Path, tmp_path: Path) -> None:
    """13 triplets: one positive, and those of the 26 + 12 other rows of another family."""
    tokmill.train(recipe(stores, ["entries"]), tmp_path / "run", quiet=True)
    found = evaluate(tmp_path / "run", stores / "val", device="cpu")
    store = Store(stores / "val", ["entries"])
    names = [store.column(n).astype(int) for n in ("anchor", "positive", "negative")]
    sizes, family = [], families(Store(stores / "functions"), store)
    for i in range(13):
        others = [int(c[j]) for c in names for j in range(13) if j != i] + [int(names[2][i])]
        sizes.append(1 + sum(family[one] != family[int(names[0][i])] for one in others))
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
    assert query_entries(batch.entry, values) == 2
    assert query_entries(np.asarray([-1, -1, -1, 2, -1]), values) == 0


@pytest.mark.parametrize(
    ("task", "match"),
    [
        ({"temperature": float("nan")}, "task.temperature"),
        ({"margin": 3}, "task.margin"),
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
    with pytest.raises(UsageError, match="the similar records are unknown"):
        tokmill.train(value, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("what", ["triplets", "groups"])
def test_stores_that_build_mine_makes(what: str, tmp_path: Path) -> None:
    """Families are never negatives of each other, also where one is dealt to several groups."""
    drawn = Store(labelled(tmp_path / "drawn"), ["label"])
    label = drawn.column("label")
    write_store(
        tmp_path / "functions",
        {
            "token": Column("u1", vocab="token"),
            "label": Column("u4", per="record"),
            "build": Column("u4", per="record"),
        },
        [[rec(drawn.record(n)["token"], label=label[n], build=n) for n in range(len(drawn))]],
        vocabularies=drawn.manifest.vocabularies,
    )
    write_file(tmp_path / "functions" / "vocab" / "token.json", b"toy")
    tokmill.build(
        "mine", tmp_path / "functions", tmp_path / "mined",
        what=what, same=("label",), differ=("build",), apart=("label",),
        **({"members": 4} if what == "groups" else {}),
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
    named = [store.record(n) for n in range(len(store))][:2]
    rows = [i for n in named for i in (n["member"] if what == "groups" else [n[r] for r in ROLES])]
    pairs = set(zip(batch.values["group"].tolist(), label[np.asarray(rows)].tolist(), strict=True))
    assert len(pairs) == len({one for one, _ in pairs}) == len({one for _, one in pairs})
    assert len(np.unique(store.column("group"))) == 4 < len(store)
    tokmill.train(value, tmp_path / "run", quiet=True)
    assert losses(tmp_path / "run", "val_pool")[4] > 1


def test_equal_functions_of_other_projects_are_no_wrong_answers(tmp_path: Path) -> None:
    """Two projects with one function each that is the same, token for token, in all four builds."""
    random = np.random.default_rng(1)
    own = [random.integers(1, 20, 9) for _ in range(12)]
    # Function 0 of project 1 is that of project 0.
    own[8:] = own[:4]
    toy.make_store(tmp_path / "functions", own)
    project, function = np.repeat([0, 0, 1], 4), np.repeat([0, 1, 0], 4)
    lay(tmp_path / "functions", "key", {"project": project.astype(np.uint32)})
    lay(tmp_path / "functions", "what", {"function": function.astype(np.uint32)})
    store = Store(tmp_path / "functions", ["key", "what"])
    keys = {"same": ["project", "function"], "size": 2}
    value = toy.recipe(
        tmp_path / "functions", 2,
        data={"val": str(tmp_path / "functions"), "overlays": ["key", "what"], "batch": 3},
        task={"kind": "contrastive", "length": 16, **keys},
    )  # fmt: skip
    task = load_like(value)
    columns = [*task.sizes, *task.extra_columns(store.schema)]
    rows = task.rows(store)
    assert rows.families().tolist() == [0] * 4 + [4] * 4 + [0] * 4
    batch = task.prepare(Feed(rows, 3, shuffle=False, columns=columns).batch(0))
    assert batch.values["group"].tolist() == [0, 0, 4, 4, 0, 0]
    tokmill.train(value, tmp_path / "run", quiet=True)
    # Rows of 0 and 2 are told from the two of 1, and these from all four.
    pools = [1 + 2, 1 + 4, 1 + 2]
    assert losses(tmp_path / "run", "val_pool")[2] == pytest.approx(
        np.average(pools, weights=[2, 2, 2])
    )


def test_a_referred_store_that_changed_ends_a_resume(stores: Path, tmp_path: Path) -> None:
    shutil.copytree(stores, tmp_path / "stores")
    value = recipe(tmp_path / "stores", ["entries"], steps=2)
    tokmill.train(value, tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "stores/functions")
    labelled(tmp_path / "stores/functions", seed=9)
    with pytest.raises(TokmillError, match="refers to"):
        tokmill.train(value, tmp_path / "run", quiet=True)
