"""Schedules on real execution: every action keeps the results, and no failure counts as a gain."""

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.mlir import measure, search
from tokmill.mlir.loops import execute, legal, lower
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import dtypes, problem
from tokmill.mlir.space import Space

QUICK = Settings(runs=2, most_seconds=0.5)


@pytest.fixture(scope="module")
def measurements() -> Iterator[Measurements]:
    with Measurements(QUICK) as made:
        yield made


def one(line: str, *taken: actions.AnyAction) -> tuple[problem.Problem, actions.Schedule]:
    return problem.of_line(line), taken


T, P, F = actions.Tile, actions.Parallel, actions.Fuse
CASES = {
    "tile": one("matmul 16 16 16", T("op_0", (4, 8, 2))),
    "tile twice, vectorize": one(
        "matmul 32 32 32", T("op_0", (16, 16, 0)), T("op_0", (4, 8, 1)), actions.Vectorize("op_0")
    ),
    "parallel": one("conv_2d_nchw 1 2 10 4 3", P("op_0", (0, 2, 4, 0, 0, 0, 0))),
    "fuse": one("matmul 16 16 16, relu", F("op_1", (4, 8), "op_0"), T("op_0", (2, 4, 1))),
    "interchange": one("batch_matmul 2 8 8 4", actions.Interchange("op_0", (3, 1, 0, 2))),
    "pack": one("matmul 16 16 16", actions.Pack("op_0", (4, 8, 2))),
    "im2col nchw": one("conv_2d_nchw 1 2 10 4 3", actions.Im2col("op_0")),
    "im2col nhwc": one(
        "conv_2d_nhwc 2 2 10 4 3",
        actions.Im2col("op_0"),
        T("op_0", (1, 8, 0, 2)),
        actions.Vectorize("op_0"),
    ),
    "decompose and vectorize": one(
        "conv_2d_nchw 1 4 10 4 3", T("op_0", (0, 2, 1, 0, 2, 1, 0)), actions.Vectorize("op_0")
    ),
    "pooling": one("pooling 1 4 10 3 1", T("op_0", (0, 0, 1, 0, 1, 0)), actions.Vectorize("op_0")),
    "softmax": one(
        "softmax 8 16",
        T("op_2", (1, 0)),
        actions.Vectorize("op_2"),
        T("op_1", (4, 8)),
        actions.Vectorize("op_1"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_action_keeps_the_results(name: str, measurements: Measurements) -> None:
    given, taken = CASES[name]
    trial = search.measured(given, taken, measurements)
    assert trial.result.status == "ok", trial.result
    assert trial.result.error <= trial.result.allowed
    assert trial.result.nanoseconds > 0


SHARED = """
#id = affine_map<(d0, d1) -> (d0, d1)>
#turned = affine_map<(d0, d1) -> (d1, d0)>
func.func @main(%a: tensor<32x32xf32>) -> (tensor<32x32xf32>, tensor<32x32xf32>) {
  %c = arith.constant 1.0 : f32
  %e = tensor.empty() : tensor<32x32xf32>
  %f = linalg.fill ins(%c : f32) outs(%e : tensor<32x32xf32>) -> tensor<32x32xf32>
  %0 = linalg.matmul ins(%a, %a : tensor<32x32xf32>, tensor<32x32xf32>)
      outs(%f : tensor<32x32xf32>) -> tensor<32x32xf32>
  %1 = linalg.matmul ins(%0, %a : tensor<32x32xf32>, tensor<32x32xf32>)
      outs(%f : tensor<32x32xf32>) -> tensor<32x32xf32>
  %2 = linalg.generic {indexing_maps = [#turned, #id, #id],
                       iterator_types = ["parallel", "parallel"]}
      ins(%1, %a : tensor<32x32xf32>, tensor<32x32xf32>) outs(%e : tensor<32x32xf32>) {
  ^bb0(%x: f32, %w: f32, %y: f32):
    %s = arith.addf %x, %w : f32
    linalg.yield %s : f32
  } -> tensor<32x32xf32>
  return %2, %2 : tensor<32x32xf32>, tensor<32x32xf32>
}
"""
"""Operations that share a `tensor.empty` and a `linalg.fill`; a result that is returned twice."""


@pytest.mark.parametrize(
    "taken",
    [
        (),
        (F("op_2", (8, 16), "op_1"), actions.Vectorize("op_2")),
        (F("op_1", (4, 2, 0), "op_0"),),
        (actions.Interchange("op_1", (2, 0, 1)), F("op_1", (0, 4, 2), "op_0")),
        (actions.Interchange("op_2", (1, 0)), F("op_2", (4, 8), "op_1"), P("op_1", (2, 1, 0))),
    ],
)
def test_operations_that_share_a_buffer_keep_their_results(
    taken: actions.Schedule, measurements: Measurements
) -> None:
    given = problem.of_text(SHARED, "shared")
    assert measurements(given, taken).status == "ok"


def test_a_schedule_is_read_from_its_own_file() -> None:
    given, taken = CASES["fuse"]
    states = legal.replay(given.operations, taken)
    text = actions.text(taken, legal.decomposed(states))
    assert actions.read(text, "x") == taken


@pytest.mark.parametrize(
    "text",
    ["", "module {}", actions.HEADER, actions.HEADER + "[{}] []", actions.HEADER + "[[" * 9999],
)
def test_other_files_are_no_schedules(text: str) -> None:
    with pytest.raises(TokmillError) as caught:
        actions.read(text, "given")
    assert caught.value.hint


def test_another_result_is_wrong_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    given, taken = CASES["tile"]
    other = problem.of_line("matmul 16 16 16, relu")
    made = execute.Kernel

    def swapped(text: str, schedule: str | None, seed: int) -> execute.Kernel:
        return made(other.text if schedule is not None else text, None, seed)

    monkeypatch.setattr(execute, "Kernel", swapped)
    answer = execute.measure(
        {
            "module": given.text,
            "schedule": actions.text(taken),
            "runs": 1,
            "seed": 5,
            "length": 16,
            "most_seconds": 1.0,
        }
    )
    assert answer["status"] == "wrong"
    assert measure.reward(Result(status="wrong")) == measure.PENALTY
    gains = np.logspace(-6, 3, 500)
    found = [
        measure.reward(Result(status="ok", nanoseconds=1 / g, baseline=1.0, noise=0)) for g in gains
    ]
    # The faster the more, and each more than a crash; but for the slowest ones it is log10.
    assert (np.diff(found) > 0).all() and min(found) > measure.PENALTY
    some = gains > 0.12
    np.testing.assert_allclose(np.asarray(found)[some], np.log10(gains)[some], atol=1e-9)


def test_what_mlir_declines_is_refused(measurements: Measurements) -> None:
    given = problem.of_line("conv_2d_nchw 1 4 10 4 3, relu")
    result = measurements.file(given, actions.text((actions.Vectorize("op_0"),)))
    assert result.status == "refused"
    assert np.isnan(result.ratio)


@pytest.mark.parametrize(
    ("settings", "status"),
    [(Settings(seconds=0.001), "timeout"), (Settings(memory_mb=1), "memory")],
)
def test_a_child_beyond_its_limits_is_a_result(settings: Settings, status: str) -> None:
    given, taken = CASES["tile"]
    with Measurements(settings) as limited:
        assert search.measured(given, taken, limited).result.status == status


def test_what_llvm_makes_no_code_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a result of one schedule, and no end of a search."""
    made, given = lower.compiled, problem.of_line("relu 8")

    class Engine:
        def lookup(self, name: str) -> Any:
            raise RuntimeError(f"Unknown function {name}")

    base = execute.Kernel(given.text, None, 1)
    monkeypatch.setattr(execute, "_baseline", lambda *_: base)
    monkeypatch.setattr(lower, "compiled", lambda module: [made(module), Engine()][-1])
    request = {"module": given.text, "schedule": actions.text(()), "seed": 1, "length": 1}
    answer = execute.measure(request)
    assert answer["status"] == "refused" and "no code of the module" in answer["reason"]


def test_differences_that_are_allowed() -> None:
    ones = [np.ones(4, np.float32)]
    near = [np.float32(1) + np.array([0, 0, 0, 1e-6], np.float32)]
    far = [np.array([1, 1, 1, 1.01], np.float32)]
    for given, fine in ((ones, True), (near, True), (far, False)):
        error, allowed = dtypes.difference(ones, given, 1)
        assert (error <= allowed) == fine
    nothing = [np.array([1, 1, 1, np.nan], np.float32)]
    assert dtypes.difference(ones, nothing, 1)[0] == np.inf
    assert dtypes.difference(nothing, nothing, 1)[0] == 0
    whole = [np.array([1, 2])]
    assert dtypes.difference(whole, [np.array([1, 3])], 99) == (1.0, 0.0)


def test_a_result_comes_from_the_cache(tmp_path: Path) -> None:
    given, taken = CASES["tile"]
    with Measurements(QUICK, tmp_path / "cache") as first:
        result = search.measured(given, taken, first).result
    with Measurements(QUICK, tmp_path / "cache") as second:
        assert search.measured(given, taken, second).result == result
        assert (second.evaluations, second.hits) == (1, 1)
    with Measurements(Settings(runs=1), tmp_path / "cache") as third:
        search.measured(given, taken, third)
        assert third.hits == 0


def test_a_timeout_is_kept_for_its_limit(tmp_path: Path) -> None:
    """A search that goes on must meet what it met before, without waiting for it again."""
    given, taken = CASES["tile"]
    for _ in range(2):
        with Measurements(Settings(seconds=0.001), tmp_path / "cache") as limited:
            assert search.measured(given, taken, limited).result.status == "timeout"
            # It was the module itself that took too long.
            assert limited._cache is not None and limited.hits == 0
            key = limited._key(given.text, Space().text(given, ()))
            assert limited._cache.get(key, Result).status == "timeout"
    with Measurements(Settings(seconds=60), tmp_path / "cache") as patient:
        assert search.measured(given, taken, patient).result.status == "ok"


def test_a_damaged_cache_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"no database" * 100)
    with pytest.raises(MachineError, match="cache of measurements"):
        Measurements(QUICK, tmp_path / "cache")


@pytest.mark.parametrize(
    "wrong",
    [
        {"nanoseconds": 0.0},
        {"nanoseconds": -1.0},
        {"nanoseconds": float("nan")},
        {"baseline": float("inf")},
        {"baseline": 0.0},
        {"noise": -1.0},
        {"noise": float("nan")},
        {"status": "good"},
    ],
)
def test_a_cache_with_impossible_results_is_measured_again(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    fine: dict[str, Any] = {"status": "ok", "nanoseconds": 2.0, "baseline": 3.0, "noise": 0.0}
    cache = measure.Cache(tmp_path / "cache")
    cache.put(b"fine", fine)
    cache.put(b"wrong", fine | wrong)
    assert cache.get(b"fine", measure.Result) and cache.get(b"wrong", measure.Result) is None
    cache.close()


@pytest.mark.parametrize("row", [b"", b"\xc1", b"\x81\xa1a", "text", None])
def test_rows_that_cannot_be_read_are_measured_again(
    row: bytes | str | None, tmp_path: Path
) -> None:
    cache = measure.Cache(tmp_path / "cache")
    with sqlite3.connect(tmp_path / "cache") as data:
        if row is not None:
            data.execute("INSERT INTO results VALUES (?, ?)", (b"key", row))
    assert cache.get(b"key", measure.Result) is None and cache.get(b"key", Any) is None
    cache.close()


WRITER = """
import sys
from pathlib import Path
from tokmill.mlir.measure import Cache, Result
print("ready", flush=True)
sys.stdin.readline()
first, size = map(int, sys.argv[2:])
cache = Cache(Path(sys.argv[1]))
for number in range(first, first + size):
    result = Result(status="ok", nanoseconds=float(number + 1), baseline=1e3, noise=0.0)
    cache.put(b"result %d" % number, result)
    cache.put(b"answer %d" % number, [number])
    assert cache.get(b"result %d" % number, Result).nanoseconds == number + 1
cache.close()
"""


def test_a_cache_waits_for_a_process_that_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, lambda: other.execute("COMMIT"))
    release.start()
    cache = measure.Cache(path)
    cache.put(b"some", 1)
    assert cache.get(b"some", int) == 1
    release.join()
    other.close()
    cache.close()


def test_processes_write_one_cache_at_once(tmp_path: Path) -> None:
    """They open a file that is not there together, and half of what they write is the same."""
    size, path = 60, tmp_path / "cache"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(number * size // 2), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for one in writers:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in writers:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    said = [one.communicate(timeout=120)[1] for one in writers]
    assert [one.returncode for one in writers] == [0, 0, 0], said
    cache = measure.Cache(path)
    for number in range(2 * size):
        result = cache.get(b"result %d" % number, Result)
        assert result is not None and result.nanoseconds == number + 1
        assert cache.get(b"answer %d" % number, Any) == [number]
    cache.close()


@pytest.mark.parametrize(
    ("taken", "status", "says"),
    [
        (actions.Tile("op_0", (8, 8, 8)), "ok", ""),
        (actions.Im2col("op_0"), "crashed", "64 MiB of output"),
    ],
)
def test_a_candidate_may_print_megabytes(
    taken: actions.AnyAction, status: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To both streams; a result counts all the same, and what never ends is cut off."""
    monkeypatch.setattr(Space, "child", "printing_child:measure")
    given = problem.of_line("matmul 16 16 16")
    with Measurements(QUICK) as child:
        result = child.file(given, actions.text((taken,)))
        assert (result.status, says in result.reason) == (status, True), result
        # The next candidate is not disturbed.
        assert child.file(given, actions.text(())).status == "ok"


def test_one_run_says_nothing_of_noise() -> None:
    class Kernel:
        def run(self, times: int = 1) -> float:
            return 1e9

    times, baseline = execute.in_turns(Kernel(), Kernel(), 1, 10.0)
    assert len(times) == len(baseline) == execute.FEWEST


def test_what_the_baseline_gains_beside_itself_is_noise() -> None:
    given = problem.of_line("relu 8")
    vector = (actions.Vectorize("op_0"),)

    class Measure:
        alone = 4.0

        def __call__(self, given: Any, schedule: Any, *, again: bool) -> Result:
            assert again
            fast = 5.0 if schedule else self.alone
            return Result(status="ok", nanoseconds=fast, baseline=6.0, noise=0.01)

    measure: Any = Measure()
    found = search.measured_again(given, [vector], measure)[0].result
    assert (found.noise, found.gain) == (0.5, 1.0)
    assert search.confirmed(given, [vector], measure).schedule == ()
    measure.alone = 6.0
    found = search.confirmed(given, [vector], measure).result
    assert (found.noise, found.gain) == (0.01, 1.2)


@pytest.mark.parametrize("method", search.SEARCHES)
@pytest.mark.parametrize("status", ["crashed", "timeout", "memory"])
def test_a_search_ends_where_the_module_itself_does_not_run(method: str, status: str) -> None:
    class Fails(Measurements):
        def _measure(self, given: Any, schedule: str) -> Result:
            return Result(status=status, reason="because")

    with Fails(QUICK) as failing:
        given = problem.of_line("relu 8")
        (only,) = search.SEARCHES[method](given, failing, 9, 0)
        assert (only.schedule, only.result.status) == ((), status)
        # Whatever schedule is asked for.
        found = failing(given, (actions.Vectorize("op_0"),))
        assert (found.status, found.reason) == (status, "without a schedule too: because")


def test_what_a_schedule_may_take_follows_from_the_time_without_one(tmp_path: Path) -> None:
    limits = []

    class Noted(Measurements):
        def _measure(self, given: Any, schedule: str) -> Result:
            limits.append(self._child.limits.seconds)
            return Result(status="ok", nanoseconds=1.0, baseline=2e9, noise=0.0)

    with Noted(Settings(seconds=5.0), tmp_path / "cache") as noted:
        given = problem.of_line("relu 8")
        noted(given, (actions.Vectorize("op_0"),))
        assert limits == [5.0 * measure.ALONE, 5.0 + 2 * measure.RUNS_ALLOWED]
        # The module without a schedule was no evaluation.
        assert (noted.evaluations, noted.hits) == (1, 0)


@pytest.mark.parametrize(
    ("taken", "says"),
    [
        ((T("op_0", (3, 0, 0)),), "sizes"),
        ((T("op_0", (0, 0, 0)),), "sizes"),
        ((T("op_0", (4, 4)),), "sizes"),
        ((P("op_0", (0, 0, 4)),), "parallel"),
        ((actions.Interchange("op_0", (0, 0, 1)),), "order"),
        ((actions.Vectorize("op_0"),), "not possible"),
        ((actions.Im2col("op_0"),), "not possible"),
        ((T("op_0", (4, 4, 4)), actions.Vectorize("op_0"), T("op_0", (2, 2, 2))), "not possible"),
        ((T("op_9", (4, 4, 4)),), "op_9"),
    ],
)
def test_illegal_schedules_are_refused_before_mlir(taken: actions.Schedule, says: str) -> None:
    given = problem.of_line("matmul 16 16 16")
    with pytest.raises(UsageError, match=says):
        legal.replay(given.operations, taken)


@pytest.mark.parametrize("method", search.SEARCHES)
def test_searches_spend_their_budget_and_repeat(method: str, tmp_path: Path) -> None:
    given = problem.of_line("relu 4 8")
    found = []
    for _ in range(2):
        with Measurements(QUICK, tmp_path / "cache") as kept:
            trials = list(search.SEARCHES[method](given, kept, 18, 3))
        found.append([trial.schedule for trial in trials])
        assert len(trials) == 18
    assert found[0] == found[1]
    assert len(set(found[0])) > 3
