"""What a plan says: of the rows by counting them, of memory by doing the step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokmill.base.errors import TokmillError
from tokmill.feed.feed import Batch
from tokmill.models.model import Inputs
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken
from tokmill.tasks.task import to_tensors
from tokmill.training.budget.memory import (
    FIXED,
    Peak,
    computed,
    estimate,
    process_bytes,
    tensor_bytes,
)
from tokmill.training.data import STEP, make_feed
from tokmill.training.engines.engine import Engine
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import make_task
from toy import SIZE, cycles, make_store, recipe

SIZES = {"token": SIZE}


def plan(store: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    return estimate(from_dict(recipe(store, 30, **sections)))


def test_the_size_of_a_step(store: Path) -> None:
    found = plan(store, run={"micro_tokens": 48})
    assert (found["batch"], found["micro_batch"]) == ([8, 16], [3, 16])
    assert found["tokens"] == 30 * found["tokens_per_step"] == 30 * 8 * 16
    assert found["epochs"] == pytest.approx(30 * 8 / found["rows"])
    assert found["flops"] == found["flops_per_token"] * found["tokens"]
    assert plan(store, data={"batch_tokens": 64})["batch"] == [4, 16]


def test_how_stores_are_cut(store: Path) -> None:
    documents = cycles(120)
    (whole,) = plan(store, task={"rows": "whole"})["stores"]
    cut = [len(document) - 17 for document in documents if len(document) > 17]
    assert (whole["cut_records"], whole["cut_tokens"]) == (len(cut), sum(cut))
    empty = sum(max(0, 17 - len(document)) for document in documents)
    assert whole["padding"] == pytest.approx(empty / (120 * 17))
    (packed,) = plan(store, task={"rows": "packed", "length": 64})["stores"]
    filled = sum(map(len, documents)) / (packed["rows"] * 65)
    assert packed["padding"] == pytest.approx(1 - filled)
    (windows,) = plan(store)["stores"]
    assert windows["padding"] < 0.01 and windows["cut_tokens"] == 0 and windows["share"] == 1


def test_how_stores_are_mixed(store: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", cycles(40, seed=8))
    both = [str(store), str(other)]
    shares = [part["share"] for part in plan(store, data={"train": both})["stores"]]
    assert shares[0] > shares[1] > 0 and sum(shares) == pytest.approx(1)
    weighted = plan(store, data={"train": both, "weights": [1.0, 3.0]})
    assert [part["share"] for part in weighted["stores"]] == [0.25, 0.75]
    foreign = make_store(tmp_path / "foreign", cycles(9), vocabulary=b"another")
    with pytest.raises(TokmillError, match="the vocabulary 'token' differs"):
        plan(store, data={"train": [str(store), str(foreign)]})


STYLES: list[dict[str, Any]] = [
    {"model": {"dim": 32, "heads": 4, "kv_heads": 2}},
    {"model": {"dim": 32, "norm": "layer", "position": "learned", "context": 16, "bias": True}},
    {"run": {"recompute": True}},
    {"run": {"precision": "bf16"}},
    {"task": {"tied": False}},
]


@pytest.mark.parametrize("sections", STYLES, ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_memory_is_what_a_step_takes(sections: dict[str, Any], parts: int, store: Path) -> None:
    config = from_dict(recipe(store, **sections))
    rows, length = 6, config.task.length
    with Peak() as made:
        engine = Engine(config.run)
        engine.prepare(make_task(config, Inputs(SIZES)), config.optim)
        before = made.now
        made.most = 0
        ids = np.zeros((rows, length), np.int64)
        keys, document = np.zeros(rows, np.uint64), np.zeros((rows, length), np.int32)
        batch = Batch({"token": ids}, document, keys, targets={"token": ids})
        for part in range(parts):
            engine.micro(to_tensors(batch, engine.device), part == parts - 1, 0.1)
        most = made.most
        engine.step(1e-3)
    weights = sum(p.numel() * p.element_size() for p in engine.parameters)
    assert before == weights
    found = tensor_bytes(config, Inputs(SIZES), rows, parts)
    assert found == pytest.approx(most + 2 * weights, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("sections", STYLES[:4], ids=str)
def test_memory_is_what_the_process_grows_by(sections: dict[str, Any]) -> None:
    """Within 30 %; Python and torch are there before."""
    big: dict[str, Any] = {"dim": 256, "layers": 6, "heads": 8}
    model = {**big, **sections.get("model", {}), "dim": 256}
    if "context" in model:
        model["context"] = 256
    run = {"micro_tokens": 8192, "device": "cpu", **sections.get("run", {})}
    value = {"model": model, "task": {"length": 256}, "run": run}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(value)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    config = from_dict(value)
    tensors = tensor_bytes(config, Inputs({"token": 8192}), 32, 2)
    whole, before = map(float, done.stdout.split())
    assert before < FIXED["cpu"]
    assert whole == pytest.approx(process_bytes(tensors, "cpu", config.run.recompute), rel=0.3)


def grown(value: dict[str, Any]) -> tuple[int, int]:
    """Return the most bytes that this process takes during three steps, and those before."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    config = from_dict(value)
    ids = np.random.default_rng(0).integers(0, 8192, (32, 256))
    keys, document = np.zeros(32, np.uint64), np.zeros(ids.shape, np.int32)
    batch = Batch({"token": ids}, document, keys, targets={"token": ids})
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    engine = Engine(config.run)
    engine.prepare(make_task(config, Inputs({"token": 8192})), config.optim)
    for _ in range(3):
        for last in (False, True):
            engine.micro(to_tensors(batch, engine.device), last, 1e-4)
        engine.step(1e-3)
    return status("VmHWM"), before


if __name__ == "__main__":
    print(*grown(json.loads(sys.argv[1])))


def test_a_batch_is_computed_as_wide_as_its_longest_row(tmp_path: Path) -> None:
    documents = [np.arange(60 if number % 8 == 0 else 3) % SIZE for number in range(64)]
    store = make_store(tmp_path / "store", documents)
    config = from_dict(recipe(store, 30, task={"rows": "whole", "length": 64}, data={"batch": 32}))
    task = make_task(config, Inputs(SIZES))
    feed = make_feed(config, task, [Store(store)], 1)
    filled = [(feed.batch(step, 0, 1).document >= 0).sum(axis=1) for step in range(8)]
    widest = np.mean([-(-rows.max() // STEP) * STEP for rows in filled]) / 64
    assert computed(feed, task, config, 1) == pytest.approx(widest)
    assert widest > 0.9 and np.mean(np.concatenate(filled)) < 0.2 * 64


def test_what_depends_on_numbers_has_no_dry_run(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not said to take more memory than there is."""
    forward = NextToken.forward

    def choosing(self: NextToken, batch: Any) -> Any:
        assert batch.targets["token"].tolist()
        return forward(self, batch)

    monkeypatch.setattr(NextToken, "forward", choosing)
    with pytest.raises(TokmillError, match="depends on the values of a batch"):
        plan(store)
