"""What is said of a policy: means of a step by what they count, and results of an evaluation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import made_times
import tokmill
from made_times import recipe
from tokmill.cli import main
from tokmill.mlir import search
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.search import Trial
from tokmill.models.model import Tensors
from tokmill.rl import evaluate_policy as evaluate
from tokmill.rl import ppo_loop as loop
from tokmill.rl.commands import rl_eval, rl_problems
from tokmill.rl.rollout import Episode
from tokmill.rl.schedule_task import SchedulesConfig
from tokmill.training.runs.run import load_task

torch.set_num_threads(1)
SETTINGS = {"runs": 4, "seconds": 7.0, "most_seconds": 0.25, "memory_mb": 512}


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurements, "_measure", made_times.made)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    value = recipe(folder / "cache", steps=1, eval_every=0)
    value["task"] |= SETTINGS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurements, "_measure", made_times.made)
        tokmill.train(value, folder / "run", quiet=True)
    return folder / "run"


class Counting:
    """A session whose sums count rows: 1 for each that a metric is about."""

    def update(self, parts: Any, total: int) -> dict[str, float]:
        (part,) = parts
        values = part.tensors.values
        acts, judges = (float(values[name].sum()) for name in ("acts", "judges"))
        return {
            "loss": float(len(values["acts"])),
            "policy_loss": acts,
            "value_loss": judges,
            "imitation_loss": 0.5 * float((values["imitates"] > 0).sum()),
            "entropy": acts,
            "most_entropy": 2 * acts,
            "kl": acts,
            "clipped": 0.25 * acts,
        }


@pytest.mark.parametrize("imitated", [0, 6, 100])
def test_each_metric_is_a_mean_over_the_moves_that_it_counts(imitated: int) -> None:
    own, rows = 20, 20 + imitated
    plays = torch.tensor([1.0] * own + [0.0] * imitated)
    values = {"acts": plays, "judges": plays, "imitates": 0.3 * (1 - plays)}
    column = torch.zeros(rows, 1, dtype=torch.int64)
    moves = Tensors(
        {}, column, column, whole=True, values=values,
        targets={"action": torch.zeros(rows, 3, dtype=torch.int64)}, entry=torch.arange(rows),
    )  # fmt: skip
    one = object.__new__(loop.ScheduleLoop)
    one.task_config = SchedulesConfig(ppo_batch_size=8, ppo_epochs=3, max_kl=0)
    report = one._improve(Counting(), moves)  # type: ignore[arg-type]
    assert report["passes"] == 3 and report["moves"] == own
    for name, value in {
        "loss": 1, "policy_loss": 1, "value_loss": 1, "kl": 1, "clipped": 0.25, "entropy": 0.5,
        "imitation_loss": 0.5 if imitated else 0,
    }.items():  # fmt: skip
        assert report[name] == pytest.approx(value), name
    # It is what `task.max_kl` is compared with.
    for most, passes in ((0.999, 1), (1.001, 3)):
        one.task_config = SchedulesConfig(ppo_batch_size=8, ppo_epochs=3, max_kl=most)
        assert one._improve(Counting(), moves)["passes"] == passes  # type: ignore[arg-type]


def test_what_is_found_without_a_measurement_does_not_depend_on_samples(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it stays the best, and is measured again as such."""
    monkeypatch.setattr(made_times, "noise", float)
    task: Any = load_task(run)
    problems = [problem.of_line("matmul 32 64 64")]
    worse = Result(status="ok", nanoseconds=9e6, baseline=1e6, noise=0.0)
    monkeypatch.setattr(
        search, "best_of", lambda problem, trials, measure: Trial(trials[0].schedule, worse)
    )
    failed = [Episode(0, result=Result(status="crashed"))]
    monkeypatch.setattr(evaluate, "play_new_schedules", lambda *given: failed)
    with Measurements(Settings()) as measure:
        (alone,) = evaluate.evaluate(task, problems, measure)
        (some,) = evaluate.evaluate(task, problems, measure, samples=1)
    assert alone.first.result.status == "ok"
    assert some.first.result == some.tried[0].result == alone.first.result
    assert some.best.result == worse and some.best.schedule == alone.first.schedule
    assert evaluate.facts(some)["zero_shot"] == evaluate.facts(alone)["zero_shot"]


@pytest.mark.parametrize("samples", [0, 2])
def test_the_best_is_never_slower_than_no_schedule(
    samples: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: Measurements, module: Any, schedule: str) -> Result:
        time = 2e6 if '"action"' in schedule else 1e6
        return Result(status="ok", nanoseconds=time, baseline=1e6, noise=0.0)

    monkeypatch.setattr(Measurements, "_measure", slow)
    task: Any = load_task(run)
    problems = [problem.of_line("matmul 32 64 64")]
    with Measurements(Settings()) as measure:
        (one,) = evaluate.evaluate(task, problems, measure, samples=samples, seed=3)
    assert any(each.gain == 0.5 for each in one.tried) == any(each.schedule for each in one.tried)
    assert (one.best.schedule, one.best.gain, one.text) == ((), 1.0, "")
    assert evaluate.summary([one])["best"] == {"speedup": 1.0, "regressions": 0.0, "failed": 0.0}


@pytest.mark.parametrize(("words", "runs"), [([], 4), (["--runs", "9"], 9)])
def test_a_policy_is_measured_as_it_was_trained(
    words: list[str],
    runs: int,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    used = []

    class Noted(Measurements):
        def __init__(self, settings: Settings, *others: Any) -> None:
            used.append(settings)
            super().__init__(settings, *others)

    monkeypatch.setattr("tokmill.mlir.measure.Measurements", Noted)
    with pytest.raises(SystemExit) as ended:
        main(["rl", "eval", str(run), "-q", "--json", *words])
    assert ended.value.code == 0
    (row,) = json.loads(capsys.readouterr().out)["modules"]
    assert np.isfinite(row["best"]["milliseconds"])
    # The own lowering's, and those of IREE's default.
    assert used == [Settings(**SETTINGS | {"runs": runs})] * 2


def test_what_gives_no_result_counts_beside_iree_as_the_module_without_a_schedule() -> None:
    def row(iree: float, first: float) -> dict[str, Any]:
        times = {"baseline_milliseconds": 4.0, "milliseconds": first}
        return {rl_problems.IREE: iree, "zero_shot": times, "best": times}

    nan = float("nan")
    assert ", 1.000 times" in rl_eval._against_iree([row(2, 1), row(2, nan)], "zero_shot")
    said = rl_eval._against_iree([row(2, 1), row(nan, 1)], "zero_shot")
    assert said.endswith("2.000 times as fast as by IREE's default in 1 of them")
    assert rl_eval._against_iree([row(nan, 1)], "zero_shot") == ""
