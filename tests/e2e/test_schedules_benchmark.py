"""The benchmark of schedules: peers compute what modules compute, and its tables say what is so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tokmill.base import recipe
from tokmill.mlir.iree import executor
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import problem


@pytest.fixture(scope="module")
def peers(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("schedule_peers")


def computed(line: str, path: Path) -> np.ndarray[Any, Any]:
    """Return what IREE's default computes of a module on the inputs of the benchmark."""
    text = problem.of_line(line).text
    entry, inputs = executor.inputs(text, 0)
    executor.compiled({"module": text, "flags": [], "path": str(path)})
    return executor.Program(path.read_bytes(), inputs, entry).outputs()[0]


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("matmul 8 12 16", "numpy torch"),
        ("matmul 8 12 16, relu", "numpy torch"),
        ("batch_matmul 2 4 6 8", "numpy torch"),
        ("add 4 16", "numpy torch"),
        ("relu 4 16", "numpy torch"),
        ("exp 4 16", "numpy torch"),
        ("reduce 4 16", "numpy torch"),
        ("softmax 4 16", "torch"),
        ("conv_2d_nchw 1 3 9 4 3 2", "torch"),
        ("conv_2d_nhwc 1 3 8 4 3", "torch"),
        ("pooling 1 2 9 3 2", "torch"),
        ("matmul 8 12 16, relu, matmul 4", ""),
    ],
)
def test_a_peer_computes_what_the_module_computes(
    peers: Any, tmp_path: Path, line: str, known: str
) -> None:
    made = {"numpy": peers.numpy_of, "torch": peers.torch_of}
    found = {name: make(line, peers.inputs(line)) for name, make in made.items()}
    assert [name for name, one in found.items() if one is not None] == known.split()
    for run in found.values():
        if run is not None:
            given = np.asarray(run())
            if "nhwc" in line:
                given = given.transpose(0, 2, 3, 1)
            np.testing.assert_allclose(given, computed(line, tmp_path / "p"), 1e-4, 1e-5)


def test_shapes_of_kernelbench_are_small_and_have_a_peer(
    peers: Any, benchmark_script: Callable[[str], ModuleType]
) -> None:
    shapes = benchmark_script("kernelbench")
    for line in shapes.LEVEL_1.values():
        found = problem.of_line(line)
        assert sum(each.iterations for each in found.operations) <= shapes.MOST
    lines = [line for line in shapes.LEVEL_1.values() if len(line) < 24]
    assert lines and all(peers.torch_of(line, peers.inputs(line)) for line in lines)


@pytest.fixture(scope="module")
def tables(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("schedule_tables")


def found(tables: Any, trained: list[float], **other: Any) -> Any:
    made = {
        "held": trained, "zero": [], "curve": [1.0, 2.0], "seconds": 1.0, "wall": 60.0,
        "fresh": True, "rows": 1,
    }  # fmt: skip
    return tables.Found(trained=trained, **made | other)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def test_a_schedule_is_slower_if_it_takes_over_two_per_cent_longer(tables: Any) -> None:
    assert tables.slower([0.97, 0.985, 1.0, 2.0]) == 0.25
    assert tables.both([[0.5, 2.0], [1.0, 1.0]]) == ["1.00 (1.00 to 1.00)", "25%"]
    # A search has no schedules without measurements.
    assert tables.both([[], []]) == ["–", "–"]


def test_means_are_geometric_with_an_interval_over_seeds(tables: Any) -> None:
    assert tables.shown([[2.0, 8.0]]) == "4.00"
    # Logs 0 and log 4: mean log 2, s = log 4 / √2, t = 12.7062 of one degree, n = 2.
    half = np.tan(0.475 * np.pi) * np.log(4) / 2
    low, high = (np.exp(np.log(2) + sign * half) for sign in (-1, 1))
    assert tables.shown([[1.0], [4.0]]) == f"2.00 ({low:.2f} to {high:.2f})"


def test_a_peer_that_lacks_modules_says_on_how_many_it_is(tables: Any) -> None:
    lines = ["a", "b", "c"]
    assert tables.beside({"a": 2.0, "b": 0.5, "c": 1.0}, lines) == ["1.00", "33%"]
    assert tables.beside({"a": 4.0}, lines) == ["4.00 (on 1)", "0%"]
    assert tables.beside({}, lines) == ["–", "–"]


def test_a_step_of_several_evaluations_is_known_at_its_end(tables: Any) -> None:
    assert tables.by_evaluation([2.0, 3.0], 2) == [1.0, 2.0, 2.0, 3.0]
    assert tables.by_evaluation([2.0, 3.0], 1) == [2.0, 3.0]
    assert tables.curve_of([[1.0, 4.0], [4.0, 9.0]]) == [2.0, 6.0]


def test_shapes_that_a_policy_refuses_count_for_nobody_and_are_named(tables: Any) -> None:
    whole = {"a": 4.0, "b": 100.0}
    given = {
        "policy": {"zero": {"a": 0.5}, "best": {"a": 2.0}, "refused": {"b": "7 loops"}},
        "random": {"zero": {}, "best": whole, "refused": {}},
    }
    *rows, _, note = tables.kernelbench(given, ["a", "b"], 16)
    assert cells(rows[2]) == ["policy", "0.50", "100%", "2.00", "0%"]
    assert cells(rows[3]) == ["random", "–", "–", "4.00", "0%"]
    assert "1 of 2" in note and "`b` by policy (7 loops)" in note
    given["policy"] = {"zero": whole, "best": whole, "refused": {}}
    *rows, _, note = tables.kernelbench(given, ["a", "b"], 16)
    assert cells(rows[2])[1] == "20.00" and "0 of 2" in note


@pytest.fixture(scope="module")
def contests(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("schedules")


def test_a_contest_has_its_recipes(contests: Any) -> None:
    recipes = [recipe.read_toml(one) for one in contests.LOOPS.recipes.values()]
    kinds = {one["model"]["model_type"] for one in recipes}
    assert kinds == {"lstm", "distilbert", "loop_transformer"}
    # Of the same modules with the same settings.
    assert all(one["task"] == recipes[0]["task"] for one in recipes)


def test_confirmed_gains_below_one_count(contests: Any) -> None:
    slow = Result(status="ok", nanoseconds=200.0, baseline=100.0, noise=0.01)
    assert contests.gain(slow, ("a",)) == 0.5
    # Without a schedule, and without a result, the module runs as it is.
    assert contests.gain(slow, ()) == 1.0
    assert contests.gain(Result(status="refused"), ("a",)) == 1.0


class Slow(Measurements):
    """Every schedule takes twice the time; nothing is run."""

    def file(self, problem: Any, text: str, *, again: bool = False) -> Result:
        time = 100.0 if text == self.space.text(problem, ()) else 200.0
        return Result(status="ok", nanoseconds=time, baseline=100.0, noise=0.0)


def test_a_search_that_finds_only_what_is_slower_ends_with_no_schedule(contests: Any) -> None:
    with Slow(Settings()) as measure:
        final, curve = contests.searched(problem.of_line("matmul 8 8 8"), "random", measure, 4, 0)
    # Nothing was gained: the module runs without a schedule.
    assert final == 1.0
    assert curve == [1.0] * 4


class Interrupted(Exception):
    pass


def test_a_contest_goes_on_and_knows_how_long_an_empty_cache_takes(
    contests: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []
    most = 3

    def play(contest: Any, name: str, seed: int, cache: Path) -> dict[str, Any]:
        if len(played) == most:
            raise Interrupted
        played.append(f"{name}, {seed}")
        with contest.measure(cache) as measure:
            measure._cache.put(f"{name}, {seed}".encode(), 1)
        return {"trained": [0.5], "held": [2.0], "zero": [], "curve": [1.0], "seconds": 0.0}

    monkeypatch.setattr(contests, "learned", play)
    monkeypatch.setattr(contests, "searching", play)
    contest = contests.LOOPS._replace(effort=contests.Effort(1, 1, (0, 1)))
    with pytest.raises(Interrupted):
        contests.compare(contest, tmp_path, 1e9)
    with pytest.raises(SystemExit, match="loop transformer, seed 0, and others are left"):
        contests.compare(contest, tmp_path, -1)
    most = 99
    table = contests.compare(contest, tmp_path, 1e9)
    assert len(played) == len(set(played)) == 12
    assert [[one.fresh for one in each] for each in table.values()] == [[True, False]] * 6
    assert all(one.wall >= 0 and one.trained == [0.5] for each in table.values() for one in each)
    # With other measurements in the cache the first seed does not begin with an empty one.
    other = tmp_path / "other"
    with contest.measure(other) as measure:
        measure._cache.put(b"something else", 1)
    table = contests.compare(contest, other, 1e9)
    assert not any(one.fresh for each in table.values() for one in each)
