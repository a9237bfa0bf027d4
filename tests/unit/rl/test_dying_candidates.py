"""Candidates that crash, hang and fill the memory, in a real child: the training goes on."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
from made_times import recipe
from tokmill.mlir.measure import Cache, Measurements, Result
from tokmill.mlir.space import Space
from toy import losses

torch.set_num_threads(1)


@pytest.mark.parametrize(("steps", "count"), [(2, 6), pytest.param(3, 12, marks=pytest.mark.long)])
def test_a_training_outlives_its_candidates(
    steps: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Space, "child", "dying_child:measure")
    measured, seen = Measurements.file, Counter[str]()

    def counted(*given: Any, **other: Any) -> Result:
        result = measured(*given, **other)
        seen[result.status] += 1
        return result

    monkeypatch.setattr(Measurements, "file", counted)
    value = recipe(tmp_path / "cache", steps=steps, eval_every=0)
    value["task"] |= {"seconds": 2.0, "memory_mb": 1024, "held_out": [], "bench_count": count}
    run = tokmill.train(value, tmp_path / "run", quiet=True)
    assert {"ok", "crashed", "timeout"} <= set(seen)
    assert run.step == steps
    failed = losses(run.path, "failed")
    assert any(0 < share < 1 for share in failed.values())
    # Whatever is tiled is twice as fast here; no schedule is worth no gain.
    best = json.loads((run.path / "schedules.json").read_text())
    assert all(one["speedup"] == 2 and '"action"' in one["schedule"] for one in best.values())
    share = len(best) / len(value["task"]["modules"])
    assert best and run.metrics["best_speedup"] == pytest.approx(2**share)
    with sqlite3.connect(tmp_path / "cache") as data:
        keys = [row[0] for row in data.execute("SELECT key FROM results")]
    with closing(Cache(tmp_path / "cache")) as cache:
        found = [cache.get(key, Result) for key in keys]
    kept = {one.status for one in found if one is not None}
    assert len(found) >= 3 and None not in found
    assert {"ok", "crashed", "timeout"} <= kept <= {"ok", "crashed", "timeout", "memory"}
