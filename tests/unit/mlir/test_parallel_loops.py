"""Parallel loops on threads of OpenMP: as many as were asked for, and the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokmill import child_calls
from tokmill.child import Limits
from tokmill.errors import MachineError, UsageError
from tokmill.mlir import search
from tokmill.mlir.iree.tiles import IreeSpace
from tokmill.mlir.loops import lower, openmp
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import MOST, Measurements, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.space import LOOPS

P, T = actions.Parallel, actions.Tile
CASES: dict[str, tuple[str, actions.Schedule]] = {
    "parallel": ("matmul 64 64 64", (P("op_0", (16, 16, 0)),)),
    "parallel, vectors": (
        "matmul 64 64 64",
        (P("op_0", (16, 32, 0)), T("op_0", (4, 16, 1)), actions.Vectorize("op_0")),
    ),
    "fused": ("matmul 32 32 16, relu", (actions.Fuse("op_1", (8, 8), "op_0"),)),
    "nothing parallel": ("matmul 32 32 16", (T("op_0", (8, 8, 8)),)),
}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_parallel_loop_has_the_threads(threads: int) -> None:
    given = problem.of_line("matmul 64 64 64")
    text = LOOPS.text(given, CASES["parallel"][1])
    found = child_calls.call(
        "parallel_kernels:threads_of", given.text, text, threads, limits=Limits(seconds=100)
    )
    assert found["right"]
    assert found["after"] - found["before"] == threads - 1


@pytest.mark.parametrize("name", CASES)
def test_results_on_two_threads_are_those_on_one(name: str) -> None:
    line, taken = CASES[name]
    with Measurements(Settings(runs=2, threads=2)) as measurements:
        result = search.measured(problem.of_line(line), taken, measurements).result
    assert result.status == "ok", result
    assert result.nanoseconds > 0


def test_one_thread_is_lowered_as_before() -> None:
    assert lower.machine_passes(1) == lower.MACHINE
    assert "convert-scf-to-openmp" in lower.machine_passes(2)


def test_wrong_numbers_of_threads_are_refused() -> None:
    for threads in (0, -1, MOST + 1):
        with pytest.raises(UsageError, match="threads"):
            Measurements(Settings(threads=threads))
    with pytest.raises(UsageError, match="iree"):
        Measurements(Settings(threads=2), None, IreeSpace())


def test_a_cache_of_one_thread_is_another_one(tmp_path: Path) -> None:
    given, taken = problem.of_line("relu 8 8"), (P("op_0", (4, 4)),)
    for threads, hits in ((1, 0), (1, 1), (2, 0)):
        settings = Settings(runs=1, threads=threads)
        with Measurements(settings, tmp_path / "cache") as measurements:
            search.measured(given, taken, measurements)
            assert measurements.hits == hits


def test_without_a_library_it_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "NAMES", ())
    monkeypatch.setattr(openmp, "PLACES", ())
    openmp.library.cache_clear()
    with pytest.raises(MachineError, match="libomp") as caught:
        openmp.use(2)
    assert "libomp5" in caught.value.hint
