"""How schedules are measured: in which process, in which order, on which inputs, kept for whom."""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokmill.mlir import measure
from tokmill.mlir.iree import compiler, executor
from tokmill.mlir.loops import execute
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.space import LOOPS, IreeDefault, Space

QUICK = Settings(runs=2, most_seconds=0.5)
RELU, TILED = problem.of_line("relu 8 8"), (actions.Tile("op_0", (4, 4)),)
PRODUCT = problem.of_line("matmul 16 16 16")
SUMMED = """
func.func @main(%a: tensor<32x48xf32>, %b: tensor<48x64xf32>, %c: tensor<32x64xf32>)
    -> tensor<32x64xf32> {
  %r = linalg.matmul ins(%a, %b : tensor<32x48xf32>, tensor<48x64xf32>)
    outs(%c : tensor<32x64xf32>) -> tensor<32x64xf32>
  return %r : tensor<32x64xf32>
}
"""
"""Adds a product to its last argument: a run that wrote there would change the next one."""


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "child", "telling_child:measure")


def request_of(given: problem.Problem, schedule: str) -> dict[str, Any]:
    return {
        "module": given.text,
        "schedule": schedule,
        "runs": 4,
        "seed": 3,
        "length": given.length,
        "most_seconds": 9.0,
    }


def test_no_schedule_gains_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lucky = Result(status="ok", nanoseconds=1e6, baseline=1.9e6, noise=0.1)
    monkeypatch.setattr(Measurements, "_measure", lambda self, problem, schedule: lucky)
    for _ in ("measured", "of the cache"):
        with Measurements(QUICK, tmp_path / "cache") as child:
            assert child(RELU, ()).gain == 1.0 and measure.reward(child(RELU, ())) == 0.0
            assert child(RELU, TILED).gain == 1.9


def test_what_is_measured_again_is_measured_in_another_process(
    telling: None, tmp_path: Path
) -> None:
    with Measurements(QUICK, tmp_path / "cache") as child:
        first = child(RELU, TILED).reason
        other = child(RELU, (actions.Tile("op_0", (4, 2)),)).reason
        again = child(RELU, TILED, again=True).reason
        # The cache keeps the first result, and the new process goes on.
        assert child(RELU, TILED).reason == first
        assert child(RELU, (actions.Tile("op_0", (2, 2)),)).reason == again
        assert child(RELU, TILED, again=True).reason not in (first, again)
    assert first == other != again
    assert str(os.getpid()) not in (first, again)


def test_candidate_and_baseline_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Seen(execute.Kernel):
        def __init__(self, text: str, schedule: str | None, seed: int) -> None:
            super().__init__(text, schedule, seed)
            self.name = "baseline" if schedule is None else "candidate"

        def run(self, times: int = 1) -> float:
            ran.append(self.name)
            return super().run(times)

    monkeypatch.setattr(execute, "Kernel", Seen)
    monkeypatch.setattr(execute, "_baselines", type(execute._baselines)())
    text = LOOPS.text(RELU, TILED)
    answer = execute.measure(request_of(RELU, text))
    assert answer["status"] == "ok"
    # Two pairs before: one for the results, and one that says how often a run is repeated.
    assert ran == ["baseline", "candidate"] * 6
    assert len(answer["times"]) == len(answer["baseline"]) == 4


def test_programs_of_iree_run_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[Any] = []

    class Seen(executor.Program):
        def run(self, times: int = 1) -> float:
            ran.append(self)
            return super().run(times)

    monkeypatch.setattr(executor, "Program", Seen)
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_bytes(compiler.compiled(PRODUCT.text))
    monkeypatch.setattr(executor, "LEAST_SECONDS", 0.0)
    asked = request_of(PRODUCT, "") | {
        "programs": [("iree", str(path)) for path in paths],
        "parameters": "",
    }
    assert [len(one["times"]) for one in executor.race(asked)] == [4, 4, 4]
    assert len(set(ran)) == 3 and ran == ran[:3] * 5
    # Short ones are compared for some time, however few rounds are asked for.
    monkeypatch.setattr(executor, "LEAST_SECONDS", 0.5)
    assert len(executor.race(asked)[0]["times"]) > 100


@pytest.mark.parametrize(
    "taken",
    [
        (),
        (actions.Tile("op_0", (8, 16, 8)), actions.Tile("op_0", (4, 4, 4))),
        (actions.Parallel("op_0", (8, 32, 0)),),
        (actions.Tile("op_0", (4, 16, 1)), actions.Vectorize("op_0")),
        (actions.Pack("op_0", (8, 8, 8)),),
    ],
)
def test_an_argument_that_takes_the_sum_is_the_same_in_every_run(taken: actions.Schedule) -> None:
    given = problem.of_text(SUMMED, "summed.mlir")
    kernel = execute.Kernel(SUMMED, LOOPS.text(given, taken), 3)
    a, b, c = before = [one.copy() for one in kernel.buffers[:3]]
    for _ in range(3):
        kernel.poison()
        kernel.run(2)
        for was, now in zip(before, kernel.buffers[:3], strict=True):
            assert np.array_equal(was, now)
        np.testing.assert_allclose(kernel.outputs[0], c + a @ b, atol=1e-4)


def test_an_argument_that_takes_the_sum_is_the_same_in_every_run_of_iree() -> None:
    entry, inputs = executor.inputs(SUMMED, 3)
    a, b, c = [one.copy() for one in inputs]
    program = executor.Program(compiler.compiled(SUMMED), inputs, entry)
    for _ in range(3):
        program.run(2)
        np.testing.assert_allclose(program.outputs()[0], c + a @ b, atol=1e-4)
    assert all(np.array_equal(was, now) for was, now in zip((a, b, c), inputs, strict=True))


def test_a_cache_keeps_results_of_each_processor_and_version_apart(
    telling: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described = tmp_path / "cpuinfo"
    monkeypatch.setattr(measure, "CPU", described)
    asked = importlib.metadata.version

    def hits(processor: str, **versions: str) -> int:
        described.write_text(f"processor : 0\nmodel name : {processor}\nmodel name : last\n")
        monkeypatch.setattr(
            importlib.metadata,
            "version",
            lambda name: versions.get(name.replace("-", "_")) or asked(name),
        )
        with Measurements(QUICK, tmp_path / "cache") as child:
            child(RELU, TILED)
            return child.hits

    assert [hits("Some 9000"), hits("Some 9000")] == [0, 1]
    assert [hits("Some 9001"), hits("Some 9001")] == [0, 1]
    assert [hits("Some 9000", torch_mlir="1.2"), hits("Some 9000", torch_mlir="1.2")] == [0, 1]
    # A package that makes no code of the space says nothing; and the first result is still there.
    assert hits("Some 9000", numpy="0.1") == 1
    described.unlink()
    assert measure.machine().startswith("unknown; ")


def test_each_space_has_the_version_of_its_own_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"of {name}")
    assert measure.machine().endswith("; torch-mlir of torch-mlir")
    space = IreeDefault()
    assert measure.machine(space).endswith(f"; {space.package} of {space.package}")
    assert space.package == "iree-base-compiler"
