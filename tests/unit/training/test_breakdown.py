"""Evaluations by column, instruction and program, against loops over the records."""

import hashlib
import math
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tokmill
from making import write_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.inference.embed import embed_store
from tokmill.models.model import Tensors
from tokmill.models.transformers.layers import Scores
from tokmill.store.schema import Column, Schema
from tokmill.store.shards.shard import Shard
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.next_token import NextToken
from tokmill.training.evaluate import GROUP, Breakdown, evaluate
from tokmill.training.runs.run import load_task
from toy import recipe

SIZES = {"asm": 12, "mne": 5}
LENGTH = 16
SCHEMA: Schema = {
    **{name: Column("u1", phrase=True, vocab=name) for name in SIZES},
    "border": Column("u1", phrase=True),
    "program": Column("utf8", per="record"),
    "level": Column("u1", per="record"),
    "score": Column("f4", per="record"),
}


def programs(path: Path, seed: int, count: int = 40) -> Path:
    """Functions of instructions of one to three tokens, of three programs."""
    random = np.random.default_rng(seed)
    sizes = [1, 2, 3, 2, 1, 3]
    # Ids are not equally frequent, and 11 does not occur.
    table = {name: [[*random.integers(1, n - 1, s)] for s in sizes] for name, n in SIZES.items()}
    rows = [
        {
            "phrases": [(int(i), i == 0) for i in random.integers(0, 6, random.integers(1, 12))],
            "program": f"p{random.integers(3)}",
            "level": int(random.integers(2)),
            "score": float(random.choice([1.5, 0.5, math.nan])),
        }
        for _ in range(count)
    ]
    vocabularies = {}
    for name, size in SIZES.items():
        digest = hashlib.sha256(name.encode()).hexdigest()
        vocabularies[name] = Vocabulary(f"{name}.json", digest, size, {})
    write_store(path, SCHEMA, [rows[:15], rows[15:]], table=table, vocabularies=vocabularies)
    for name in SIZES:
        (path / "vocab" / f"{name}.json").write_bytes(name.encode())
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("programs")
    return programs(folder / "train", 1), programs(folder / "val", 2)


@pytest.fixture(scope="module")
def run(stores: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = {"length": LENGTH, "tied": False}
    plain = recipe(stores[0], 60, data={"val": str(stores[1])}, task=task, run={"eval_rows": 0})
    return tokmill.train(plain, tmp_path_factory.mktemp("runs") / "run", quiet=True).path


Hit = dict[str, tuple[float, bool]]
"""Column → loss, and whether the likeliest id was right."""


def by_hand(task: NextToken, store: Store) -> dict[tuple[int, int], Hit]:
    """(record, place in it) → what is predicted there; rows of the store end to end."""
    ribbon = [(r, i) for r in range(len(store)) for i in range(len(store.record(r)["asm"]))]
    found = {}
    for start in range(0, len(ribbon) - 1, LENGTH):
        row = ribbon[start : start + LENGTH + 1]
        for record in dict.fromkeys(r for r, _ in row):
            places = [i for r, i in row if r == record]
            values = store.record(record)
            if len(places) < 2:
                continue
            part = {n: torch.from_numpy(values[n][places].astype(np.int64))[None] for n in SIZES}
            read = {name: ids[:, :-1] for name, ids in part.items()}
            place = torch.arange(len(places) - 1)[None]
            with torch.no_grad():
                hidden = task.model(Tensors(read, torch.zeros_like(place), place, whole=True))
                for name, ids in part.items():
                    logits = task.logits(hidden, name)[0]
                    lost = F.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
                    right = (logits.argmax(-1) == ids[0, 1:]).tolist()
                    for i, one, hit in zip(places[1:], lost, right, strict=True):
                        found.setdefault((record, i), {})[name] = (one, hit)
    return found


@pytest.mark.parametrize("by", ["program", "level", "score"])
def test_it_is_what_loops_over_the_records_find(
    by: str, run: Path, stores: tuple[Path, Path]
) -> None:
    task, store = load_task(run), Store(stores[1])
    assert isinstance(task, NextToken)
    hits = by_hand(task, store)
    found = evaluate(run, store.path, device="cpu", by=by, batch=5)
    assert found["targets"] == len(hits) and found["notes"] == []
    counts = {name: Counter[int]() for name in SIZES}
    for record in Store(stores[0]):
        for name in SIZES:
            counts[name].update(record[name].tolist())
    groups: dict[Any, list[list[float]]] = defaultdict(list)
    for (record, i), hit in hits.items():
        values = store.record(record)
        chances = [
            (counts[n][int(values[n][i])] + 1) / (counts[n].total() + size)
            for n, size in SIZES.items()
        ]
        lost = sum(loss for loss, _ in hit.values())
        groups[str(values[by])].append([lost, -sum(map(math.log, chances))])
    assert found["by"]["column"] == by
    lines = {str(line["value"]): line for line in found["by"]["values"]}
    # What is not a number is one line, the last.
    assert list(lines) == sorted(groups) and len(lines) == len(found["by"]["values"]) > 1
    for value, parts in groups.items():
        loss, unigram = np.mean(parts, 0)
        assert lines[value]["targets"] == len(parts)
        assert lines[value]["loss"] == pytest.approx(loss, rel=1e-5)
        assert lines[value]["unigram"] == pytest.approx(unigram, rel=1e-9)
    every = [part for parts in groups.values() for part in parts]
    together = found["next_token"]
    assert together["loss"] == pytest.approx(np.mean(every, 0)[0], rel=1e-5)
    assert together["unigram"] == pytest.approx(np.mean(every, 0)[1], rel=1e-9)
    all_right = [all(right for _, right in hit.values()) for hit in hits.values()]
    assert together["accuracy"] == pytest.approx(np.mean(all_right))
    for name in SIZES:
        mine = found["columns"][name]
        lost = np.mean([hit[name][0] for hit in hits.values()])
        assert mine["loss"] == pytest.approx(lost, rel=1e-5)
        assert mine["loss"] == pytest.approx(found[f"loss_{name}"], rel=1e-6)
        assert mine["perplexity"] == pytest.approx(math.exp(lost), rel=1e-5)
        assert mine["accuracy"] == pytest.approx(np.mean([h[name][1] for h in hits.values()]))


def test_a_column_without_a_target_where_another_has_one() -> None:
    targets = {
        "a": np.array([[-1, 2, 3]]),
        "b": np.array([[1, -1, 4]]),
        GROUP: np.zeros((1, 3), np.int64),
    }
    right = {"a": [False, True, False], "b": [True, False, True]}
    losses = {"a": [0.0, 1.0, 2.0], "b": [4.0, 0.0, 8.0]}
    breakdown = Breakdown({}, predicted="hidden_token")
    breakdown.add(
        targets,
        {name: Scores(torch.tensor([losses[name]]), torch.tensor([right[name]])) for name in right},
    )
    found = breakdown.report()
    assert found["hidden_token"] == {"loss": 5.0, "unigram": None, "accuracy": 2 / 3}
    assert found["columns"]["a"]["loss"] == 1.0 and found["columns"]["b"]["loss"] == 4.0
    assert found["columns"]["a"]["accuracy"] == 0.5 and found["columns"]["b"]["accuracy"] == 1.0


def test_without_the_training_store_there_is_no_baseline(
    run: Path, stores: tuple[Path, Path], tmp_path: Path
) -> None:
    train, val = stores
    away = shutil.move(train, tmp_path / "away")
    found = evaluate(run, val, device="cpu", by="program")
    assert found["next_token"]["unigram"] is None and "no such store" in found["notes"][0]
    assert {line["unigram"] for line in found["by"]["values"]} == {None}
    # Another store in its place is not counted.
    shutil.copytree(val, train)
    found = evaluate(run, val, device="cpu")
    assert (
        found["columns"]["asm"]["unigram"] is None and "not the training store" in found["notes"][0]
    )
    shutil.rmtree(train)
    shutil.move(away, train)
    assert evaluate(run, val, device="cpu")["columns"]["asm"]["unigram"] > 0


def test_a_column_that_is_not_there(run: Path, stores: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="no column 'progam'") as caught:
        evaluate(run, stores[1], by="progam")
    assert "program" in (caught.value.hint or "")


def test_phrases_that_were_damaged_are_told_wherever_they_are_read(
    run: Path, stores: tuple[Path, Path], tmp_path: Path
) -> None:
    store = shutil.copytree(stores[0], tmp_path / "s")
    for path in store.glob("shards/*.safetensors"):
        shard = Shard(path)
        data = bytearray(path.read_bytes())
        place = data.index(shard["phrase"].tobytes())
        data[place : place + shard["phrase"].nbytes] = b"\x7f" * shard["phrase"].nbytes
        path.write_bytes(data)
    for read in (
        lambda: evaluate(run, store, device="cpu"),
        lambda: embed_store(run, store, device="cpu"),
        lambda: tokmill.train(recipe(store, 2), tmp_path / "run", quiet=True),
    ):
        with pytest.raises(TokmillError, match="the shard is damaged") as error:
            read()
        assert "tokmill store validate" in error.value.hint
