"""Tuning specs on IREE itself: they are obeyed, keep the results, and no failure is a gain."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import random_schedules
from tokmill.base.errors import UsageError
from tokmill.mlir import random_schedules as draws
from tokmill.mlir import search
from tokmill.mlir.iree import compiler, spec
from tokmill.mlir.iree.tiles import Cache, Distribute, IreeSpace, Pipeline, Vector
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.space import replay

QUICK = Settings(runs=2, most_seconds=0.5)


@pytest.fixture(scope="module")
def measurements() -> Iterator[Measurements]:
    with Measurements(QUICK, None, IreeSpace()) as made:
        yield made


D, C, V = Distribute, Cache, Vector
CASES: dict[str, tuple[str, tuple[actions.Action, ...]]] = {
    "matmul": ("matmul 64 32 48", (D("op_0", (32, 32, 0)), V("op_0", (4, 16, 8)))),
    "cache": ("matmul 64 32 48", (C("op_0", (0, 16, 24)),)),
    "with relu": ("matmul 32 64 32, relu", (D("op_0", (16, 32, 0)), V("op_0", (8, 32, 4)))),
    "batch_matmul": ("batch_matmul 4 32 32 16", (D("op_0", (2, 16, 32, 0)),)),
    "nhwc, batch 1": ("conv_2d_nhwc 1 8 18 32 3", (D("op_0", (0, 4, 8, 16, 0, 0, 0)),)),
    "nhwc, batch 2": ("conv_2d_nhwc 2 8 18 32 3 2", (V("op_0", (0, 0, 2, 32, 0, 0, 4)),)),
    "nchw, batch 1": ("conv_2d_nchw 1 8 18 16 3", (D("op_0", (0, 8, 4, 16, 0, 0, 0)),)),
    "other pipeline": ("conv_2d_nhwc 1 8 18 32 3", (Pipeline("op_0"),)),
    "pooling": ("pooling 1 16 18 3 2", (D("op_0", (0, 8, 4, 8, 0, 0)),)),
    "reduction": ("reduce 64 96", (D("op_0", (16, 0)), V("op_0", (8, 32)))),
    "named by what IREE has not": ("add 64 512", (D("op_0", (512,)),)),
    "two dispatches": (
        "softmax 32 64",
        (V("op_1", (4, 32)), D("op_0", (256,)), V("op_0", (32,))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_specs_are_obeyed_and_keep_the_results(name: str, measurements: Measurements) -> None:
    line, taken = CASES[name]
    result = measurements(problem.of_line(line), taken)
    assert result.status == "ok", result
    assert result.error <= result.allowed
    assert result.nanoseconds > 0


def test_no_action_is_the_default(measurements: Measurements) -> None:
    given = problem.of_line("matmul 64 32 48")
    assert measurements.space.text(measurements.problem(given), ()) == ""
    assert measurements(given, ()).status == "ok"


def test_a_spec_that_finds_no_operation_is_ignored_and_no_gain(measurements: Measurements) -> None:
    line, taken = CASES["matmul"]
    other = measurements.problem(problem.of_line(line))
    text = measurements.space.text(other, taken)
    result = measurements.file(problem.of_line("matmul 64 32 64"), text)
    assert result.status == "ignored"
    assert np.isnan(result.ratio)
    named = text.replace("[64]", "[65]")
    assert measurements.file(other, named).status == "ignored"


def test_what_iree_declines_is_refused(measurements: Measurements) -> None:
    line, taken = CASES["matmul"]
    given = problem.of_line(line)
    text = measurements.space.text(measurements.problem(given), taken)
    result = measurements.file(given, text.replace("DoubleTilingExpert", "Nothing"))
    assert (result.status, result.reason[:8]) == ("refused", "the spec")


def test_another_result_is_wrong_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokmill.mlir.iree import executor

    line, taken = CASES["with relu"]
    space, given = IreeSpace(), problem.of_line(line)
    made = space.problem(given, executor.answer)
    plain = problem.of_line("matmul 32 64 32").text
    monkeypatch.setattr(executor, "_compiled", lambda module, spec, flags: compiler.whole(plain))
    answer = executor.answer(
        {
            "module": given.text,
            "schedule": space.text(made, taken),
            "runs": 1,
            "seed": 5,
            "length": 32,
            "most_seconds": 1.0,
        }
    )
    assert answer["status"] == "wrong"


def test_a_match_holds_where_operations_are_generalised(measurements: Measurements) -> None:
    line, taken = CASES["matmul"]
    given = problem.of_line(line)
    text = measurements.space.text(measurements.problem(given), taken)
    _, default = compiler.configured(given.text, "", ["--iree-opt-level=O3"])
    _, tuned = compiler.configured(given.text, text, ["--iree-opt-level=O3"])
    assert default[0].config != tuned[0].config
    assert tuned[0].config.levels["vector_common_parallel"] == (4, 16, 0)


@pytest.mark.parametrize(
    "taken",
    [
        (D("op_0", (0, 0, 0)),),
        (D("op_0", (0, 0, 16)),),
        (D("op_0", (5, 0, 0)),),
        (D("op_0", (16, 16)),),
        (V("op_0", (4, 4, 4)), D("op_0", (16, 0, 0))),
        (D("op_0", (16, 0, 0)), V("op_0", (32, 0, 0))),
        (Pipeline("op_0"),),
        (D("op_7", (16, 0, 0)),),
    ],
)
def test_illegal_tiles_are_refused_before_iree(
    taken: tuple[actions.Action, ...], measurements: Measurements
) -> None:
    given = measurements.problem(problem.of_line("matmul 64 32 48"))
    with pytest.raises(UsageError):
        replay(measurements.space, given.operations, taken)


def test_odd_sizes_have_tiles_too(measurements: Measurements) -> None:
    given = measurements.problem(problem.of_line("matmul 31 1009 17"))
    (operation,) = given.operations
    state = measurements.space.begin(operation)
    assert any(measurements.space.tiles(state, "distribute", 1)[1:])
    taken = (D("op_0", (0, 64, 0)), V("op_0", (0, 32, 0)))
    assert measurements(given, taken).status == "ok"


def test_a_search_finds_and_repeats(tmp_path: Path) -> None:
    given, found = problem.of_line("matmul 64 64 64"), []
    for _ in range(2):
        with Measurements(QUICK, tmp_path / "cache", IreeSpace()) as made:
            trials = list(search.SEARCHES["evolution"](given, made, 20, 1))
            found.append([trial.schedule for trial in trials])
            hits = made.hits
    assert found[0] == found[1]
    assert hits == 20
    assert all(trial.result.status in ("ok", "refused") for trial in trials)


LINES = [
    "matmul 64 32 48",
    "matmul 37 100 64",
    "batch_matmul 4 32 32 16",
    "conv_2d_nhwc 1 8 18 32 3",
    "conv_2d_nchw 2 8 18 32 3 2",
    "pooling 1 16 18 3 2",
    "reduce 64 96",
    "softmax 32 64",
    "matmul 32 32 32, relu",
    "conv_2d_nchw 1 8 18 32 3, relu",
]


def fuzzed(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    with Measurements(QUICK, None, IreeSpace()) as child:
        problems = [child.problem(problem.of_line(line)) for line in LINES]
        for seed in seeds:
            chance = random.Random(seed)
            given = chance.choice(problems)
            schedule = draws.draw(given, chance, space=child.space)
            result = random_schedules.result_of(given, schedule, child)
            counts[result.status] += 1
            if result.status not in ("ok", "refused"):
                print(given.name, result)
    return counts


def test_random_specs_never_compute_something_else() -> None:
    counts = fuzzed(range(6))
    assert counts.keys() <= {"ok", "refused"}, counts


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 200])
def test_two_hundred_random_specs(first: int) -> None:
    counts = fuzzed(range(first, first + 200))
    print(counts)
    assert counts.keys() <= {"ok", "refused"}, counts
    assert counts["ok"] > 120, counts


def test_configurations_are_plain_values() -> None:
    config = spec.Config({"distribution": (4, 8)}, "DoubleTilingExpert")
    assert msgspec.convert(msgspec.to_builtins(config), spec.Config) == config
    assert config.text == "#iree_cpu.lowering_config<distribution = [4, 8]>"
