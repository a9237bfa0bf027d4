"""Tuning: time goes to what is large, nothing slow gets in, and what was ended goes on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tokmill.errors import TokmillError, UsageError
from tokmill.mlir.iree import compiler, executor, tune
from tokmill.mlir.iree.tiles import Distribute, IreeSpace
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import cut, problem
from tokmill.mlir.modules.problem import Problem

QUICK = Settings(runs=2, most_seconds=0.5)


class Made(Measurements):
    """Results that follow from texts alone: the default takes its iterations in nanoseconds."""

    def __init__(self, best: float, **other: Any) -> None:
        super().__init__(QUICK, space=IreeSpace(), **other)
        self.best = best
        self.seen: list[str] = []

    def file(self, given: Problem, text: str, *, again: bool = False) -> Result:
        self.evaluations += 1
        self.seen.append(given.name)
        baseline = float(given.operations[0].iterations)
        share = hashlib.sha256(text.encode()).digest()[0] / 255
        gain = 1.0 if not text else 0.5 + share * (self.best - 0.5)
        return Result(status="ok", nanoseconds=baseline / gain, baseline=baseline, noise=0.001)


def tuned(best: float, evaluations: int, state: Path | None = None) -> tuple[tune.Tuned, Made]:
    """Tune until so many evaluations are done."""
    problems = [problem.of_line(line) for line in ("matmul 32 32 32", "matmul 64 64 128")]
    with Made(best) as measure:

        def count(_: float, done: int) -> None:
            if done >= evaluations:
                raise KeyboardInterrupt

        if state is None:
            return tune.tune(problems, [3, 1], measure, seconds=0.5, seed=1), measure
        try:
            found = tune.tune(
                problems, [3, 1], measure, seconds=1e6, seed=1, state=state, tick=count
            )
        except KeyboardInterrupt:
            found = tune.Tuned(spec="", parts=[])
        return found, measure


def test_time_goes_where_the_model_spends_its_own(tmp_path: Path) -> None:
    _, measure = tuned(2.0, 120, tmp_path / "state")
    assert measure.seen[: tune.BATCH] == ["matmul 64 64 128"] * tune.BATCH
    small = measure.seen.count("matmul 32 32 32")
    assert tune.BATCH <= small < len(measure.seen) - small


def test_what_was_ended_goes_on(tmp_path: Path) -> None:
    whole = tuned(2.0, 96, tmp_path / "whole")[1].seen
    _, first = tuned(2.0, 50, tmp_path / "parts")
    _, second = tuned(2.0, 96, tmp_path / "parts")
    assert first.seen == whole[:50]
    assert second.seen == whole


def test_operations_that_gain_nothing_stay_out() -> None:
    found, _ = tuned(1.01, 0)
    assert found.spec == ""
    assert {part.status for part in found.parts} == {"default"}
    found, _ = tuned(3.0, 0)
    assert [part.status for part in found.parts] == ["tuned", "tuned"]
    assert all(part.gain > 1.5 for part in found.parts)
    assert found.spec.count("transform.iree.match.contraction") == 2


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    tuned(2.0, 20, state)
    with Made(2.0) as measure, pytest.raises(UsageError, match="something else"):
        tune.tune([problem.of_line("matmul 8 8 8")], [1], measure, seconds=1, seed=1, state=state)
    state.write_text("{")
    with pytest.raises(TokmillError, match="cannot be read"):
        tuned(2.0, 20, state)


def test_what_cannot_be_tuned_is_said() -> None:
    with Made(2.0) as measure:
        with pytest.raises(UsageError, match="element by element"):
            tune.tune([problem.of_line("relu 64 64")], [1], measure, seconds=0.1)
        given = [problem.of_line("relu 64 64"), problem.of_line("matmul 8 16 32")]
        found = tune.tune(given, [1, 1], measure, seconds=0.1)
        assert found.parts[0].status == "left: element by element"


def test_a_merged_spec_is_obeyed_in_the_whole_model() -> None:
    text = problem.of_line("matmul 64 32 48, relu, matmul 64, relu").text
    cuts = cut.cut(text, "model")
    with Measurements(QUICK, space=IreeSpace()) as measure:
        chosen = []
        for each in cuts.problems:
            made = measure.problem(each)
            if not all(made.operations[0].parallel):
                chosen.append((made, (Distribute("op_0", (16, 16, 0)),)))
        spec = measure.space.merged(chosen)  # type: ignore[attr-defined]
        assert measure.space.merged(chosen * 2).count("@match_") == spec.count("@match_")  # type: ignore[attr-defined]
    found = tune.whole(text, spec, runs=2, seed=0, length=48)
    assert (found.status, found.obeyed, found.dispatches) == ("ok", 2, 2)
    assert found.default > 0 < found.tuned


def test_a_model_that_computes_something_else_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    text = problem.of_line("matmul 16 16 16").text
    other = problem.of_line("matmul 16 16 16, relu").text
    made = compiler.whole
    monkeypatch.setattr(
        compiler, "whole", lambda module, spec, flags=(): made(other if spec else module)
    )
    request = {"module": text, "schedule": "", "parameters": "", "runs": 1, "seed": 0}
    assert executor.whole(request | {"length": 16})["status"] == "ok"
    with Measurements(QUICK, space=IreeSpace()) as measure:
        given = measure.problem(problem.of_line("matmul 16 16 16"))
        spec = measure.space.text(given, (Distribute("op_0", (8, 0, 0)),))
    assert executor.whole(request | {"schedule": spec, "length": 16})["status"] == "wrong"
