"""What was measured stands: a search that is repeated, or goes on, meets the same results."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tokmill.base.errors import UsageError
from tokmill.base.files import private_path, publish, remove_leftovers
from tokmill.cli import main
from tokmill.mlir import search
from tokmill.mlir.iree import executor, spec, tune
from tokmill.mlir.iree.tiles import Distribute, IreeSpace
from tokmill.mlir.iree.tuned_model import Model
from tokmill.mlir.loops import execute
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.modules.problem import Problem

GIVEN = problem.of_line("matmul 64 64 128")


class Made(Measurements):
    """Each new measurement says something else, as clocks do."""

    made = 0

    def _measure(self, given: Problem, schedule: str) -> Result:
        self.made += 1
        share = hashlib.sha256(f"{schedule} {self.made}".encode()).digest()[0] / 255
        return Result(status="ok", nanoseconds=1 + share, baseline=1.5, noise=0.001)


def test_a_search_meets_the_same_results_after_its_best_was_measured_again(
    tmp_path: Path,
) -> None:
    with Made(Settings(), tmp_path / "cache", IreeSpace()) as measure:
        first = list(search.evolution(GIVEN, measure, 48, 1))
        again = search.confirmed(GIVEN, [max(first, key=search.score).schedule], measure)
        assert again.result.nanoseconds != max(first, key=search.score).result.nanoseconds
        before = measure.made
        met = list(search.evolution(GIVEN, measure, 48, 1))
        assert [(one.schedule, one.result.nanoseconds) for one in met] == [
            (one.schedule, one.result.nanoseconds) for one in first
        ]
        assert measure.made == before


def test_a_tuning_goes_on_as_it_was_measured(tmp_path: Path) -> None:
    for runs, fresh in ((5, True), (5, False), (9, True)):
        with Made(Settings(runs=runs), tmp_path / "cache", IreeSpace()) as measure:
            until = time.monotonic() + 600
            tune.tune([GIVEN], [1], measure, until=until, most=24, seed=1)
            # The best are measured again, and the default beside them.
            assert (measure.made > 12) == fresh, measure.made


def test_times_of_a_model_are_those_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(Model, "_compared", lambda *_: compared.append(1) or [])
    weights = tmp_path / "weights.irpa"
    with Measurements(Settings(), tmp_path / "cache", IreeSpace()) as measure:
        for content, times in (("one", 1), ("one", 1), ("two", 2), ("one", 2)):
            weights.write_text(content)
            model = Model(GIVEN.text, measure, parameters=weights)
            model.compare([(model.ways()[0], "")], lambda: None)
            assert len(compared) == times
            weights = weights.rename(tmp_path / f"moved-{len(weights.name)}.irpa")


def test_no_time_is_that_of_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("LEAST_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(executor, limit, 0.0)
    path = tmp_path / "0.vmfb"
    executor.compiled({"module": GIVEN.text, "schedule": "", "flags": [], "path": str(path)})
    request = {"paths": [str(path)], "module": "", "parameters": "", "runs": 8}
    (one,) = executor.race(request | {"seed": 0, "length": 128})
    assert len(one["times"]) == execute.FEWEST

    class Clock:
        def run(self, times: int = 1) -> float:
            return 1e9

    times, baseline = execute.in_turns(Clock(), Clock(), 8, most_seconds=-1.0)
    assert len(times) == len(baseline) == execute.FEWEST


def test_matchers_with_the_same_tiles_are_told_apart() -> None:
    others = [GIVEN, problem.of_line("matmul 96 64 128")]
    change = (Distribute("op_0", (32, 32, 0)),)
    with Measurements(Settings(), space=IreeSpace()) as measure:
        space: Any = measure.space
        known = [measure.problem(one) for one in others]
        text = space.merged([(one, change) for one in known])
        (obeys, changed), (ignores, _) = (space._changed(one, change)[0] for one in known)
        (name,), (other,) = (space.matchers(one, change) for one in known)
    assert spec.hits(text, [replace(obeys, config=changed), ignores]) == {name: 1}
    assert name != other
    with Measurements(Settings(), space=IreeSpace()) as measure:
        with pytest.raises(UsageError, match="does not fit"):
            measure(GIVEN, (Distribute("op_7", (32, 32, 0)),))
        with pytest.raises(UsageError, match="does not fit"):
            measure(GIVEN, (Distribute("op_0", (32, 32)),))


def test_what_is_left_at_the_default_shows_no_gain() -> None:
    part = tune.Part(
        name="some", count=1, evaluations=8, status="tuned", default=4, tuned=2, gain=2
    )
    part.leave("slower")
    assert (part.status, part.gain, part.tuned) == ("default: slower", 1.0, 4)


def test_a_file_of_another_program_takes_its_place_and_leftovers_of_it_go(tmp_path: Path) -> None:
    path, other = tmp_path / "weights", tmp_path / "others"
    # Another process may be writing a file whose name begins with this one's.
    for name in (path, other, tmp_path / "weights-of-others"):
        private_path(name).write_text("left by one that was killed")
    private = private_path(path)
    private.write_text("new")
    publish(private, path)
    assert path.read_text() == "new"
    assert remove_leftovers(tmp_path, path.name) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_weights_belong_to_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "weights.irpa"
    weights.touch()
    with pytest.raises(SystemExit) as ended:
        main(["rl", "tune", "matmul 8 8 8", "-o", str(tmp_path / "spec"), "--parameters",
              str(weights)])  # fmt: skip
    assert ended.value.code == 2
    assert "--parameters names the weights of a model" in capsys.readouterr().err
