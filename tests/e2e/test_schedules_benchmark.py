"""The benchmark of schedules: peers compute what modules compute, and its tables say what is so."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tokmill.mlir.iree import executor
from tokmill.mlir.measure import Result
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


@pytest.fixture(scope="module")
def tables(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("schedule_tables")


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


@pytest.fixture(scope="module")
def contests(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("schedules")


def test_confirmed_gains_below_one_count(contests: Any) -> None:
    slow = Result(status="ok", nanoseconds=200.0, baseline=100.0, noise=0.01)
    assert contests.gain(slow, ("a",)) == 0.5
    # Without a schedule, and without a result, the module runs as it is.
    assert contests.gain(slow, ()) == 1.0
    assert contests.gain(Result(status="refused"), ("a",)) == 1.0
