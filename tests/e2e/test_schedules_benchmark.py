"""The benchmark of schedules: peers compute what modules compute, and its tables say what is so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tokmill.mlir.iree import executor
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import kernelbench, problem


@pytest.fixture(scope="module")
def peers(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("schedule_peers")


def computed(line: str, path: Path) -> np.ndarray[Any, Any]:
    """Return what IREE's default computes of a module on the inputs of the benchmark."""
    text = problem.of_line(line).text
    entry, inputs = executor.inputs(text, 0)
    executor.compiled({"module": text, "schedule": "", "flags": [], "path": str(path)})
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


def test_shapes_of_kernelbench_have_a_peer(peers: Any) -> None:
    lines = [line for line in kernelbench.LEVEL_1.values() if len(line) < 24]
    assert lines and all(peers.torch_of(line, peers.inputs(line)) for line in lines)


def test_best_flags_are_timed_beside_the_default(peers: Any, tmp_path: Path) -> None:
    with Measurements(Settings(runs=2), tmp_path / "cache") as measure:
        default, best = peers.best_flags("matmul 16 16 16", measure)
        assert 0 < best <= 3 * default
        # What was timed is kept.
        assert peers.best_flags("matmul 16 16 16", measure) == (default, best)


TVM = """#!{python}
import json, sys
if "8 8 8" in sys.argv[-1]:
    raise SystemExit("no schedule was found")
print(json.dumps({{"ns": 2e6}}))
"""


def test_tvm_gets_products_alone_and_may_fail(
    peers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["matmul 8 8 8", "matmul 4 4 4", "matmul 4 4 4, relu", "batch_matmul 2 4 4 4", "add 4"]
    products = peers.products(lines)
    assert products == ["matmul 8 8 8", "matmul 4 4 4", "batch_matmul 2 4 4 4"]
    script = tmp_path / "python"
    script.write_text(TVM.format(python=sys.executable))
    script.chmod(0o755)
    trials = dict.fromkeys(products, 16)
    wanted = {"matmul 4 4 4": 2.0, "batch_matmul 2 4 4 4": 2.0}
    assert peers.meta_schedules(str(script), trials, tmp_path) == wanted
    assert "matmul 8 8 8" in capsys.readouterr().err
    # What was found, and what was not, is kept: nothing could run now.
    assert peers.meta_schedules("/no/such/python", trials, tmp_path) == wanted
