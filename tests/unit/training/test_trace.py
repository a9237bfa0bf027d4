"""Traces of steps, compared with a log of what the loader really hands to the model.

Every token of the stores has an id of its own, so a log of ids says which token was where.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokmill
import toy
from entry_stores import lay
from making import write_store
from task_cases import ROLES, triplets
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import write_file
from tokmill.report.comparison.run_summaries import read_run
from tokmill.report.describe.traced_steps import wanted
from tokmill.store.schema import Column, Schema
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.hidden.masked import PLACES, Masked
from tokmill.training.data import Loader, open_stores
from tokmill.training.recipe.resolve import resolve
from tokmill.training.runs import run as runs
from tokmill.training.trace import Trace
from toy import recipe, stop_after
from weighted_sets import blocks_store, intervals_store

STEPS, BATCH, SPECIAL = 30, 12, len(ROLES)
IDS = 9000
SCHEMA: Schema = {
    "token": Column("u2", vocab="token"),
    "program": Column("utf8", per="record"),
    "label": Column("u4", per="record"),
}
SESSIONS = [(0, 1), (7, 2), (20, 3), (13, 3)]
"""Steps that were done before a session, and its processes; the last one went back."""


def make_unique(path: Path, first: int, shards: Sequence[int], longest: int = 40) -> Path:
    """A store whose tokens are the ids from `first`; some records are empty."""
    random, rows = np.random.default_rng(first), []
    for count in shards:
        rows.append([])
        for _ in range(count):
            length = int(random.integers(0, longest))
            record = {"token": list(range(first, first + length)), "program": f"p{first % 3}"}
            rows[-1].append({**record, "label": first % 2})
            first += length
    assert first <= IDS
    data = b"unique"
    vocabulary = Vocabulary("token.json", hashlib.sha256(data).hexdigest(), IDS, ROLES)
    write_store(path, SCHEMA, rows, vocabularies={"token": vocabulary})
    write_file(path / "vocab/token.json", data)
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("unique")
    make_unique(root / "a", SPECIAL, (30, 1, 25, 40))
    make_unique(root / "b", 4000, (20, 20), longest=70)
    label = Store(root / "a").column("label")
    lay(root / "a", "entries", triplets(label, 1), root / "a")
    lay(root / "a", "number", {"number": label})
    lay(root / "a", "loss", {"loss": np.arange(Store(root / "a").tokens) % 3 > 0})
    random = np.random.default_rng(3)
    sizes = random.integers(1, 5, 30)
    toy.make_store(root / "groups", [np.ones(n, np.int64) for n in sizes.tolist()])
    members = random.integers(0, len(label), int(sizes.sum())).astype(np.uint32)
    lay(root / "groups", "members", {"member": members}, root / "a")
    tokmill.build("select", root / "b", root / "chosen", where=("label = 1",), min_length=3)
    blocks_store(root / "blocks")
    intervals_store(root / "sets", root / "blocks")
    return root


ENCODER = {"kind": "encoder", "context": 32}
CASES: dict[str, dict[str, Any]] = {
    "windows": {},
    "windows of a few shards": {"data": {"shards": 2}},
    "packed": {"task": {"rows": "packed"}},
    "packed, a few shards": {"task": {"rows": "packed"}, "data": {"shards": 2}},
    "stream": {"task": {"rows": "stream"}},
    "whole": {"task": {"rows": "whole", "length": 24}, "run": {"micro_tokens": 50}},
    "in order": {"data": {"shuffle": False, "shards": 1}},
    "a step": {"task": {"step": 5}},
    "longer than the store": {"task": {"length": 2000}, "steps": 9},
    "longer than a record": {"task": {"length": 300, "rows": "whole"}, "run": {"micro_tokens": 1}},
    "packed, longer": {"task": {"length": 700, "rows": "packed"}, "steps": 9},
    "left out": {"data": {"overlays": ["loss"]}, "task": {"rows": "packed"}},
    "a mix": {"data": {"train": ["a", "b", "chosen"], "weights": [3, 1, 0.5]}},
    "a packed mix": {"data": {"train": ["b", "a"]}, "task": {"rows": "packed"}},
    "a selection": {"data": {"train": "chosen"}},
    "masked": {"task": {"kind": "masked", "rows": "whole"}, "model": ENCODER},
    "masked packed": {"task": {"kind": "masked", "rows": "packed"}, "model": ENCODER},
    "halves": {"task": {"kind": "sentence_pair", "length": 24}, "model": ENCODER},
    "classify": {
        "task": {"kind": "classify", "column": "number"},
        "data": {"overlays": ["number"]},
        "model": ENCODER,
    },
    "triplets": {
        "task": {"kind": "contrastive", "loss": "triplet"},
        "data": {"overlays": ["entries"]},
        "model": ENCODER,
    },
    "members": {
        "task": {"kind": "contrastive"},
        "data": {"train": "groups", "overlays": ["members"]},
        "model": ENCODER,
    },
    "equal keys": {"task": {"kind": "contrastive", "same": ["program"]}, "model": ENCODER},
    "sets": {
        "task": {"kind": "signature", "length": 12, "cpi_weight": 1, "consistency_weight": 1},
        "data": {"train": "sets", "overlays": ["entries"]},
        "model": {"kind": "set_transformer", "layers": 1, "inducing": 3, "seeds": 2},
    },
}


def begin(stores: Path, out: Path, case: dict[str, Any], steps: int = 0) -> Path:
    """Write the folder of a run as a training does, without steps."""
    data = {"train": "a", "batch": BATCH, "seed": 5, **case.get("data", {})}
    named = data["train"]
    data["train"] = [str(stores / n) for n in named] if isinstance(named, list) else str(
        stores / named
    )  # fmt: skip
    steps = steps or case.get("steps", STEPS)
    value = recipe(
        stores, steps, data=data, model=case.get("model", {}), task=case.get("task", {}),
        run={"micro_tokens": 80, **case.get("run", {})},
    )  # fmt: skip
    config = resolve(value, out, {}, 1)
    opened = open_stores(config.data)
    runs.begin(out, config, opened, runs.facts_from(config, opened))
    lines = [json.dumps({"step": s, "processes": p}) + "\n" for s, p in SESSIONS]
    write_file(out / "sessions.jsonl", "".join(lines))
    return out


def world_of(step: int) -> int:
    return 1 if step <= 7 else 2 if step <= 13 else 3


Log = dict[tuple[int, int, int, int, int], Any]
"""Step, process, micro-batch, row, position → what the model read there."""


def log_of(trace: Trace) -> tuple[Log, Log]:
    """Read all steps by the loader; also the last tokens of rows, which are only predicted."""
    seen: Log = {}
    last: Log = {}
    for step in range(1, trace.steps + 1):
        world = world_of(step)
        for rank in range(world):
            loader = Loader(
                trace.feed, trace.task, range(step - 1, step), rank, world,
                micro_tokens=trace.config.run.micro_tokens, device=torch.device("cpu"),
            )  # fmt: skip
            with loader:
                parts, _ = loader.next()
            for number, part in enumerate(parts, 1):
                add_part(trace, (step, rank, number), part.tensors, seen, last)
    return seen, last


def add_part(trace: Trace, at: tuple[int, int, int], tensors: Any, seen: Log, last: Log) -> None:
    inside = tensors.document.numpy() >= 0
    if "vector" in tensors.columns:
        for row, position in np.argwhere(inside).tolist():
            seen[*at, row, position] = tensors.columns["vector"][row, position].numpy()
        return
    ids = tensors.columns["token"].numpy().astype(np.int64)
    if PLACES in tensors.targets:
        # The hidden tokens are the targets.
        for row, places in enumerate(tensors.targets[PLACES].tolist()):
            for k, place in enumerate(places):
                if place >= 0:
                    ids[row, place] = tensors.targets["token"][row, k]
    for row, position in np.argwhere(inside & (ids >= SPECIAL)).tolist():
        seen[*at, row, position] = int(ids[row, position])
    target = tensors.targets.get("token")
    if target is not None and target.shape == tensors.document.shape:
        width = trace.task.length
        for row in range(len(target)):
            if target.shape[1] == width and target[row, -1] >= 0:
                last[*at, row, width] = int(target[row, -1])


def claims_of(trace: Trace) -> Log:
    """What the trace says, token by token."""
    claims: Log = {}
    if "block" in (sets := trace.stores[0]).schema:
        # What the model reads of a block is its vector in another store.
        blocks = Store(sets.reference("block").path, ["vectors"]).column("embedding")
    for step in range(1, trace.steps + 1):
        before = (-1, -1, -1, -1)
        for one in trace.step(step):
            place = (one.process, one.micro_batch, one.row, one.position)
            assert place > before and one.stop > one.start
            before = place
            if "block" in one.store.schema:
                tokens = blocks[one.store.record(one.record)["block"][one.start : one.stop]]
            else:
                tokens = one.store.record(one.record)["token"][one.start : one.stop].tolist()
            for k, token in enumerate(tokens):
                key = (step, *place[:3], one.position + k)
                assert key not in claims
                claims[key] = token
    return claims


@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_what_the_loader_hands_to_the_model(
    name: str, stores: Path, tmp_path: Path
) -> None:
    trace = Trace(begin(stores, tmp_path / "run", CASES[name]))
    assert trace.feed.rows_in_all < trace.steps * BATCH or name in ("equal keys",)
    seen, last = log_of(trace)
    claims = claims_of(trace)
    width = trace.task.length
    if trace.config.task.kind == "next_token":
        targets = {key: claims.pop(key) for key in [*claims] if key[-1] == width}
        assert {key: targets[key] for key in last} == last
    assert claims.keys() == seen.keys() and len(seen) > 500
    assert all(np.array_equal(claims[key], seen[key]) for key in seen)


@pytest.mark.parametrize("name", [n for n in CASES if n != "sets"])
def test_the_steps_of_records_are_those_of_a_log(name: str, stores: Path, tmp_path: Path) -> None:
    trace = Trace(begin(stores, tmp_path / "run", CASES[name]))
    log = set()
    for step in range(trace.steps):
        batch = trace.feed.batch(step)
        ids = batch.columns["token"][batch.document >= 0]
        log |= {(step + 1, int(token)) for token in ids}
    several = {number: np.arange(len(one)) for number, one in enumerate(trace.stores)}
    found = list(trace.holding(several))
    assert [one.step for one in found] == sorted(one.step for one in found)
    claims = {
        (one.step, int(token))
        for one in found
        for token in one.store.record(one.record)["token"][one.start : one.stop]
    }
    assert claims == log
    some = {0: np.asarray([3, 17, 31])} if len(trace.stores[0]) > 31 else {0: np.asarray([3])}
    assert list(trace.holding(some)) == [
        one for one in found if one.store is trace.stores[0] and one.record in some[0]
    ]


def test_a_run_keeps_its_processes_and_is_traced(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = recipe(stores / "a", 6)
    with monkeypatch.context() as patch, pytest.raises(TokmillError):
        stop_after(4, patch)
        tokmill.train(value, tmp_path / "run", quiet=True)
    run = tokmill.train(value, tmp_path / "run", quiet=True)
    lines = (run.path / "sessions.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "processes": 1}, {"step": 4, "processes": 1}
    ]  # fmt: skip
    seen = run.trace(6)
    assert sum(one.stop - one.start for one in seen) == 8 * 17
    assert len(run.trace(1)) > 8
    for step in (0, 7, -1):
        with pytest.raises(UsageError, match="there is no step"):
            run.trace(step)


def test_a_store_that_is_gone_or_another_one_is_refused(stores: Path, tmp_path: Path) -> None:
    shutil.copytree(stores / "b", tmp_path / "b")
    run = begin(tmp_path, tmp_path / "run", {"data": {"train": "b"}})
    Trace(run)
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(TokmillError, match="there is no such store"):
        Trace(run)
    shutil.copytree(stores / "a", tmp_path / "b")
    with pytest.raises(TokmillError, match="not the one that the run began with"):
        Trace(run)
    value = json.loads((run / "recipe.json").read_text())
    value["data"]["train"] = ""
    (run / "recipe.json").write_text(json.dumps(value))
    with pytest.raises(UsageError, match="learned from no store"):
        Trace(run)


def test_a_task_that_does_not_say_where_tokens_go_is_refused(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(stores, tmp_path / "run", CASES["masked"])
    kept = Masked.placed
    placed = iter([False, True])
    monkeypatch.setattr(Masked, "placed", lambda self, b: kept(self, b) if next(placed) else b)
    with pytest.raises(TokmillError, match="cannot be traced"):
        Trace(run)


def test_conditions_and_records_of_several_stores(stores: Path, tmp_path: Path) -> None:
    trace = Trace(begin(stores, tmp_path / "run", CASES["a mix"]))
    found = wanted(trace, None, ["label = 1", "length > 3"], None)
    for number, store in enumerate(trace.stores):
        right = [i for i, r in enumerate(store) if r["label"] == 1 and len(r["token"]) > 3]
        assert found[number].tolist() == right
    assert list(wanted(trace, 2, [], stores / "b")) == [1]
    with pytest.raises(UsageError, match="each has a record"):
        wanted(trace, 2, [], None)
    with pytest.raises(UsageError, match="there is no record"):
        wanted(trace, 10**6, [], stores / "b")
    with pytest.raises(UsageError, match="reads no store"):
        wanted(trace, 2, [], stores / "sets")
    with pytest.raises(UsageError, match="no column"):
        wanted(trace, None, ["colour = 1"], None)


def test_sessions_without_numbers_and_steps_without_end(stores: Path, tmp_path: Path) -> None:
    run = begin(stores, tmp_path / "run", CASES["a mix"], steps=10**12)
    last = Trace(run).step(10**12)
    assert {one.process for one in last} == {0, 1, 2} and len(last) > BATCH
    found = Trace(run).holding({0: np.asarray([3]), 1: np.asarray([1, 2])})
    steps = [one.step for one in islice(found, 200)]
    assert steps == sorted(steps)
    assert next(Trace(run).holding({0: np.zeros(0, np.int64)}), None) is None
    for line in ('{"step": 0}', '{"step": 0, "processes": 0}', '{"step": 0, "processes": true}'):
        (run / "sessions.jsonl").write_text(line + "\n")
        with pytest.raises(TokmillError, match="no number of processes"):
            Trace(run)


def test_jumps_are_far_above_what_was_usual(stores: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    losses = 2 + np.exp(-np.arange(200) / 30) + random.normal(0, 0.02, 200)
    entries = [{"step": 5 * i, "loss": v, "grad_norm": 1.0} for i, v in enumerate(losses.tolist())]
    run = begin(stores, tmp_path / "run", {}, 1000)

    def found() -> list[tuple[int, str, float]]:
        lines = "".join(json.dumps(one) + "\n" for one in entries)
        (run / "metrics.jsonl").write_text(lines)
        return [(one.step, one.metric, one.value) for one in read_run(run).jumps]

    assert found() == []
    entries[100]["loss"] = 4.0
    entries[150]["grad_norm"] = 9.0
    entries[3]["loss"] = 9.0
    assert found() == [(500, "loss", 4.0), (750, "grad_norm", 9.0)]
