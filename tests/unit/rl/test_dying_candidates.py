"""Candidates that crash, hang and fill the memory, in a real child: the training goes on."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest
import torch

import tokmill
from made_times import recipe
from tokmill.mlir.measure import Result
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
        rows = data.execute("SELECT result FROM results").fetchall()
    kept = {msgspec.msgpack.decode(row[0], type=Result).status for row in rows}
    # A timeout is not kept: the machine may have been busy.
    assert {"ok", "crashed"} <= kept <= {"ok", "crashed", "memory"}
