"""PPO on the session: it improves, stops, goes on to the bit, and outlives its candidates."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import made_times
import tokmill
from made_times import LINES, recipe
from tokmill.base.errors import Interrupted, TokmillError, UsageError
from tokmill.cli import main
from tokmill.mlir.loops.schedule import Interchange, Tile, Vectorize
from tokmill.mlir.measure import Measurements, Result
from tokmill.mlir.modules import problem
from tokmill.report.pages.schedules import in_words
from tokmill.rl import ppo_loop as loops
from tokmill.rl.evaluate_policy import evaluate, summary
from tokmill.training.budget.memory import estimate
from tokmill.training.engines.tensors import read_metadata, read_tensors, write_tensors
from tokmill.training.recipe.read_recipe import RECIPE, read_recipe
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import load_task
from toy import losses, stop_after

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurements, "_measure", made_times.made)


def record(folder: Path, kind: str) -> Path:
    """Make a run, and the cache that it fills beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurements, "_measure", made_times.made)
        tokmill.train(recipe(folder / "cache", kind), folder / "run", quiet=True)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and the cache that it filled beside it."""
    return record(tmp_path_factory.mktemp("recorded"), "lstm")


def test_it_improves_and_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_times, "noise", float)
    value = recipe(tmp_path / "cache", steps=30, eval_every=0)
    run = tokmill.train(value, tmp_path / "run", quiet=True)
    rewards = [losses(run.path, "reward")[step] for step in range(1, 31)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert run.metrics["val_speedup"] > 1.2 and run.metrics["evaluations"] == 240
    assert run.metrics["val_loss"] == pytest.approx(-np.log10(run.metrics["val_speedup"]))
    best = json.loads((run.path / loops.BEST).read_text())
    assert set(best) == set(LINES)
    found = np.exp(np.mean([np.log(one["speedup"]) for one in best.values()]))
    assert run.metrics["best_speedup"] == pytest.approx(found)


def test_lost_measurements_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = recipe(tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(2, patch)
        tokmill.train(value, tmp_path / "run", quiet=True)
    for file in tmp_path.glob("cache*"):
        file.unlink()
    capsys.readouterr()
    tokmill.train(None, tmp_path / "run", quiet=True)
    assert "measured anew" in capsys.readouterr().err


def test_a_module_that_became_another_one_is_noticed(tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    for name, line in (("a", "matmul 32 16 8"), ("b", "add 8 16")):
        (modules / f"{name}.mlir").write_text(problem.of_line(line).text)
    value = recipe(tmp_path / "cache")
    value["task"] |= {"modules": [], "benchmarks_folder_path": str(modules)}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(2, patch)
        tokmill.train(value, tmp_path / "run", quiet=True)
    kept = (modules / "b.mlir").read_text()
    for what, name in (("has changed", "b"), ("is gone", "b"), ("is new", "c")):
        if what == "is gone":
            (modules / "b.mlir").unlink()
        else:
            (modules / f"{name}.mlir").write_text(problem.of_line("matmul 8 16 32").text)
        match = rf"the module .*{name}.* {what} since the run began"
        with pytest.raises(TokmillError, match=match):
            tokmill.train(None, tmp_path / "run", quiet=True)
        (modules / "b.mlir").write_text(kept)
        (modules / "c.mlir").unlink(missing_ok=True)
    tokmill.train(None, tmp_path / "run", quiet=True)


def test_what_gives_no_result_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = iter(["crashed", "timeout", "wrong", "memory", "refused"] * 100)

    def fails(*arguments: Any) -> Result:
        return Result(status=next(statuses))

    monkeypatch.setattr(Measurements, "_measure", fails)
    value = recipe(tmp_path / "cache", steps=3)
    run = tokmill.train(value, tmp_path / "run", quiet=True)
    assert run.metrics["reward"] == -1 and run.metrics["failed"] == 1
    assert run.metrics["speedup"] == run.metrics["best_speedup"] == 1
    assert json.loads((run.path / loops.BEST).read_text()) == {}


def test_a_collapse_of_the_entropy_is_told_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = recipe(tmp_path / "cache", steps=3)
    value["task"] |= {"entropy_floor": 1.0}
    value["optim"]["lr"] = 0.3
    run = tokmill.train(value, tmp_path / "run", quiet=True)
    alarms = losses(run.path, "entropy_alarm")
    assert any(alarms.values()) and "nearly certain" in capsys.readouterr().err
    assert max(losses(run.path, "entropy_coef").values()) > 0.01


def test_passes_end_where_the_policy_has_moved_far(tmp_path: Path) -> None:
    for most, passes in ((1e-9, 1), (0.0, 4)):
        value = recipe(tmp_path / "cache", steps=1)
        value["task"] |= {"max_kl": most, "value_batch_size": 8}
        run = tokmill.train(value, tmp_path / str(passes), quiet=True)
        assert run.metrics["passes"] == passes


def test_each_module_comes_equally_often() -> None:
    drawn = [one for step in range(9) for one in loops.drawn(6, step, 4, 7)]
    assert sorted(drawn) == sorted([*range(6)] * 6)
    assert loops.drawn(6, 3, 4, 7) == loops.drawn(6, 3, 4, 7) != loops.drawn(6, 3, 4, 8)
    assert loops.drawn(1, 5, 3, 0) == [0, 0, 0]


def test_evaluation_of_a_run(recorded: Path, tmp_path: Path) -> None:
    task: Any = load_task(recorded / "run")
    problems = [problem.of_line(line) for line in ("matmul 32 64 64", "add 64 512, relu")]
    with Measurements(loops.settings_of(task.config), tmp_path / "cache") as measure:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        found = evaluate(task, problems, measure, samples=4, seed=1)
        assert torch.equal(before, torch.get_rng_state())
        again = evaluate(task, problems, measure, samples=4, seed=1)
    assert [len(one.tried) for one in found] == [5, 5]
    assert [[e.schedule for e in one.tried] for one in found] == [
        [e.schedule for e in one.tried] for one in again
    ]
    means = summary(found)
    gains = [one.first.gain for one in found]
    assert means["zero_shot"]["speedup"] == pytest.approx(np.exp(np.mean(np.log(gains))))


def test_the_commands(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["rl", *words])
        shown = capsys.readouterr()
        return int(str(ended.value.code)), shown.out + shown.err

    run = str(recorded / "run")
    code, text = command(
        "eval", run, "--samples", "2", "--cache", str(tmp_path / "cache"), "--json"
    )
    found = json.loads(text)
    assert code == 0 and found["modules"][0]["module"] == "matmul 32 64 64"
    code, text = command("eval", run, "add 64 64", "-o", str(tmp_path / "best"))
    assert code == 0 and "geometric mean" in text and (tmp_path / "best/000.mlir").exists()
    code, text = command("eval", run, "add 2 2 2 2 2 2")
    assert code == 2 and "6 dimensions of 5" in text and "model.dimensions" in text
    code, text = command("eval", str(tmp_path))
    assert code == 1 and "no run" in text
    code, text = command("train", "schedules-lstm")
    assert code == 2 and "needs a folder" in text
    code, text = command("train", "schedules-lstm", "--dry-run")
    assert code == 0 and "policy, schedules" in text
    assert "most of their time is that of measurements" in text and "time, about" not in text


def test_actions_in_words() -> None:
    assert (
        in_words((Tile("op_1", (8, 0)), Interchange("op_0", (1, 0)), Vectorize("op_0")))
        == "op_1: tile 8 × 0; op_0: interchange (1, 0), vectorize"
    )


def test_one_process_alone(recorded: Path) -> None:
    class Two:
        world = 2

    value = from_dict(recipe(recorded / "cache"))
    with pytest.raises(UsageError, match="one process"):
        loops.ScheduleLoop(value, None, [], None, Two(), recorded)  # type: ignore[arg-type]


def test_mistakes_in_recipes(tmp_path: Path) -> None:
    for change, what in (
        ({"task": {"modules": []}}, "no module to learn from"),
        ({"task": {"held_out": [LINES[0]]}}, "also a training module"),
        ({"task": {"bench_count": 0}}, "bench_count"),
        ({"task": {"gamma": float("nan")}}, "gamma"),
        ({"model": {"model_type": "gru"}}, "gru"),
        ({"model": {"model_config": {"lstm": {"width": 3}}}}, "width"),
        ({"model": {"loops": 2}}, "loops"),
        ({"model": {"hidden": 0}}, "hidden"),
        ({"task": {"benchmarks_folder_path": str(tmp_path)}}, "no .mlir file"),
    ):
        value = recipe(tmp_path / "cache")
        for table, keys in change.items():
            value[table] |= keys  # type: ignore[operator]
        with pytest.raises(tokmill.base.errors.TokmillError, match=what):
            tokmill.train(value, tmp_path / "run", quiet=True)
        # `--dry-run` says the same.
        with pytest.raises(tokmill.base.errors.TokmillError, match=what):
            estimate(from_dict(value))
    value = recipe(tmp_path / "cache") | {"model": {"kind": "encoder"}}
    with pytest.raises(UsageError, match="needs a policy"):
        tokmill.train(value, tmp_path / "run", quiet=True)


def cut_history(run: Path) -> None:
    """Make the weights those of a version whose policies saw less of what was done."""
    file = run / "model" / "model.safetensors"
    tensors, said = read_tensors(file), read_metadata(file)
    name = next(one for one, tensor in tensors.items() if tensor.dim() == 2)
    write_tensors(file, tensors | {name: tensors[name][:, :-2].contiguous()}, said)


def drop_tensor(run: Path) -> None:
    """Make the weights those of a policy without one of its layers."""
    file = run / "model" / "model.safetensors"
    tensors, said = read_tensors(file), read_metadata(file)
    tensors.pop(next(iter(tensors)))
    write_tensors(file, tensors, said)


def other_room(run: Path) -> None:
    """Make the recipe one of larger operations."""
    recipe_of(run, lambda value: value["model"].update(loops=9))


def unknown_key(run: Path) -> None:
    """Make the recipe that of a version with another key."""
    recipe_of(run, lambda value: value["task"].update(penalty=2.0))


def recipe_of(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = read_recipe(run)
    change(value)
    (run / RECIPE).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut_history, "does not fit the model"),
        (drop_tensor, "does not fit the model"),
        (other_room, "does not fit the model"),
        (unknown_key, "penalty"),
    ],
)
def test_a_policy_of_other_sizes_or_of_another_version_is_refused(
    change: Callable[[Path], None], says: str, recorded: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded / "run", run)
    change(run)
    with pytest.raises(SystemExit) as ended:
        main(["rl", "eval", str(run), LINES[0], "--quiet"])
    said = capsys.readouterr().err
    assert ended.value.code in (1, 2), said
    assert says in said and "hint:" in said and "Traceback" not in said, said
