"""Candidates that crash, hang and fill the memory, in a real child: the training goes on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

import tokmill
from made_times import recipe
from tokmill.mlir.measure import Cache
from tokmill.mlir.space import Loops
from toy import losses

torch.set_num_threads(1)


@pytest.mark.long
def test_a_training_outlives_its_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loops, "child", "dying_child:measure")
    value = recipe(tmp_path / "cache", steps=3, eval_every=0)
    value["task"] |= {"seconds": 2.0, "memory_mb": 1024, "held_out": [], "bench_count": 12}
    run = tokmill.train(value, tmp_path / "run", quiet=True)
    assert run.step == 3
    failed = losses(run.path, "failed")
    assert any(0 < share < 1 for share in failed.values())
    assert run.metrics["best_speedup"] == pytest.approx(2)
    with sqlite3.connect(tmp_path / "cache") as data:
        keys = [row[0] for row in data.execute("SELECT key FROM results")]
    with closing(Cache(tmp_path / "cache")) as cache:
        found = [cache.get(key) for key in keys]
    kept = {one.status for one in found if one is not None}
    assert len(found) >= 3 and None not in found
    # A timeout is not kept: the machine may have been busy.
    assert {"ok", "crashed"} <= kept <= {"ok", "crashed", "memory"}
