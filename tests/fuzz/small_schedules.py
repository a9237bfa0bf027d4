"""Schedules, tuning specs and measurements of MLIR modules: made and read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

LINE = "matmul 16 16 16, relu"


def make_schedule(folder: Path) -> Iterable[Path]:
    """A schedule of two operations."""
    from tokmill.mlir.loops import schedule

    actions = (
        schedule.Fuse("op_1", (8, 4), "op_0"),
        schedule.Vectorize("op_1"),
        schedule.Interchange("op_0", (2, 0, 1)),
    )
    (folder / "a.schedule.mlir").write_text(schedule.text(actions))
    return [folder / "a.schedule.mlir"]


def read_schedule(folder: Path) -> Any:
    """The transform that is made of its actions: it holds no text of the file."""
    from tokmill.mlir.loops import schedule
    from tokmill.mlir.modules import problem
    from tokmill.mlir.space import LOOPS

    path = folder / "a.schedule.mlir"
    text = path.read_bytes().decode("utf-8", "replace")
    made = LOOPS.text(problem.of_line(LINE), schedule.read(text, str(path)))
    assert made.count("transform.structured.match attributes") <= 4 * 5
    return made


def make_measurements(folder: Path) -> Iterable[Path]:
    """A cache of one result and one answer."""
    from tokmill.mlir.measure import Cache, Result

    cache = Cache(folder / "a.db")
    cache.put(b"key", Result(status="ok", nanoseconds=2.0, baseline=3.0, noise=0.1))
    cache.put(b"other", [{"name": "linalg.matmul", "bounds": [1, 2, 3]}])
    cache.close()
    return [folder / "a.db"]


def read_measurements(folder: Path) -> Any:
    """What it knows; a result has times that can be compared, or is none."""
    import math

    from tokmill.mlir.measure import STATUSES, Cache, Result, reward

    cache = Cache(folder / "a.db")
    try:
        result, answer = cache.get(b"key", Result), cache.get(b"other", Any)
    finally:
        cache.close()
    assert result is None or result.status in STATUSES
    assert result is None or math.isfinite(reward(result))
    return repr((result, answer))
