"""Tuning: time goes to what is large, nothing slow gets in, and what was ended goes on."""

from __future__ import annotations

import hashlib
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokmill.base.children.child import Ended
from tokmill.base.children.child_calls import ChildDied
from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir.iree import compiler, dispatches, executor, layout, tune, tune_model
from tokmill.mlir.iree.tiles import Distribute, IreeSpace
from tokmill.mlir.iree.tuned_model import FLAGS, Model, Timed, Way, helping
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.search import Trial
from tokmill.mlir.space import replay

QUICK = Settings(runs=2, most_seconds=0.5)


class Made(Measurements):
    """Results that follow from texts alone: the default takes its iterations in nanoseconds."""

    def __init__(self, best: float, **other: Any) -> None:
        super().__init__(QUICK, space=IreeSpace(), **other)
        self.best = best
        self.seen: list[str] = []

    def file(self, given: Problem, text: str, *, again: bool = False) -> Result:
        self.evaluations += 1
        self.seen.append(given.name)
        baseline = float(given.operations[0].iterations)
        share = hashlib.sha256(text.encode()).digest()[0] / 255
        gain = 1.0 if not text else 0.5 + share * (self.best - 0.5)
        return Result(status="ok", nanoseconds=baseline / gain, baseline=baseline, noise=0.001)


def tuned(best: float, most: int) -> tuple[tune.Tuned, Made]:
    """Tune until each operation had so many evaluations."""
    problems = [problem.of_line(line) for line in ("matmul 32 32 32", "matmul 64 64 128")]
    with Made(best) as measure:
        until = time.monotonic() + 600
        return tune.tune(problems, [3, 1], measure, until=until, most=most, seed=1), measure


def test_time_goes_where_the_model_spends_its_own() -> None:
    problems = [problem.of_line(line) for line in ("matmul 32 32 32", "matmul 64 64 128")]

    class EndedError(Exception):
        pass

    def count(done: int) -> None:
        if done >= 120:
            raise EndedError

    with Made(2.0) as measure, pytest.raises(EndedError):
        tune.tune(problems, [3, 1], measure, until=math.inf, seed=1, tick=count)
    assert measure.seen[: tune.BATCH] == ["matmul 64 64 128"] * tune.BATCH
    small = measure.seen.count("matmul 32 32 32")
    assert tune.BATCH <= small < len(measure.seen) - small


def test_a_tuning_ends_in_its_time() -> None:
    """The winners are measured again before the end, however long a measurement takes."""

    class Slow(Made):
        def file(self, given: Problem, text: str, *, again: bool = False) -> Result:
            time.sleep(0.01)
            return super().file(given, text, again=again)

    problems = [problem.of_line(line) for line in ("matmul 32 32 32", "matmul 64 64 128")]
    with Slow(2.0) as measure, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "CONFIRMING", 0.02)
        for one in problems:
            measure.problem(one)
        since = time.monotonic()
        found = tune.tune(problems, [3, 1], measure, until=since + 2.0, most=10_000, seed=1)
        assert time.monotonic() - since < 2.5
        assert {part.status for part in found.parts} == {"tuned"}
        late = tune.tune(problems, [3, 1], measure, until=time.monotonic() - 1, most=9, seed=1)
    assert {part.status for part in late.parts} == {tune.NOT_REACHED}


def test_operations_that_gain_nothing_stay_out() -> None:
    found, _ = tuned(1.01, 48)
    assert found.spec == ""
    assert {part.status for part in found.parts} == {"default"}
    found, _ = tuned(3.0, 48)
    assert [part.status for part in found.parts] == ["tuned", "tuned"]
    assert all(part.gain > 1.5 for part in found.parts)
    assert found.spec.count("transform.iree.match.contraction") == 2


def test_what_cannot_be_tuned_is_said() -> None:
    with Made(2.0) as measure:
        with pytest.raises(UsageError, match="element by element"):
            tune.tune(
                [problem.of_line("relu 64 64")], [1], measure, until=time.monotonic() + 60, most=8
            )
        given = [problem.of_line("relu 64 64"), problem.of_line("matmul 8 16 32")]
        found = tune.tune(given, [1, 1], measure, until=time.monotonic() + 60, most=8)
        assert found.parts[0].status == "left: element by element"


def test_operations_that_a_spec_cannot_tell_apart_get_the_same_tiles() -> None:
    """The same product, followed by relu and not; the second one may not become slower."""
    given = [problem.of_line("matmul 32 32 32"), problem.of_line("matmul 32 32 32, relu")]
    with Made(3.0) as measure:
        found = tune.tune(given, [1, 2], measure, until=time.monotonic() + 60, most=32)
        assert set(measure.seen) == {given[1].name, given[0].name}
        # With the tiles of the other one.
        assert measure.seen.count(given[0].name) == 1
        assert [part.status for part in found.parts] == ["tuned", "tuned"]
        assert found.spec.count("@match_0 ->") == 1 and "@match_1 ->" not in found.spec

    class Slower(Made):
        def file(self, one: Problem, text: str, *, again: bool = False) -> Result:
            made = super().file(one, text, again=again)
            slow = text and one.name == given[0].name
            return msgspec.structs.replace(made, nanoseconds=made.baseline * 1.1) if slow else made

    with Slower(3.0) as measure:
        found = tune.tune(given, [1, 2], measure, until=time.monotonic() + 60, most=32)
    assert found.spec == ""
    assert {part.status for part in found.parts} == {"default: slower where it is fused otherwise"}


CHAIN = "matmul 64 32 48, relu, matmul 64, relu"


def test_dispatches_of_a_model_run_alone_and_count() -> None:
    formed = compiler.formed(problem.of_line("matmul 16 16 16, relu, matmul 16, relu").text)
    found = dispatches.cut(formed)
    assert (len(found.problems), found.counts, found.skipped) == (1, [2], [])
    assert dispatches.is_one(found.problems[0].text)
    with Measurements(QUICK, space=IreeSpace()) as measure:
        made = measure.problem(found.problems[0])
        assert [each.bounds for each in made.operations] == [(16, 16, 16)]
        result = measure(made, (Distribute("op_0", (8, 0, 0)),))
        assert result.status == "ok" and result.nanoseconds > 0


def test_what_is_no_dispatch_on_tensors_is_skipped_with_the_reason() -> None:
    text = compiler.formed(problem.of_line("matmul 16 16 16").text)
    packed = re.sub(r"(: \(tensor<)16x16xf32>", r"\g<1>?x16xf32>", text)
    assert packed != text
    found = dispatches.cut(packed)
    assert found.problems == []
    assert [why for _, why in found.skipped] == [
        "it takes or gives what is no tensor of fixed sizes"
    ]
    assert dispatches.cut("") == ([], [], [])


def model_of(line: str, measure: Measurements, **other: Any) -> Model:
    return Model(problem.of_line(line).text, measure, length=64, **other)


def test_a_spec_of_dispatches_is_obeyed_in_the_whole_model(tmp_path: Path) -> None:
    with (
        Measurements(QUICK, tmp_path / "cache", IreeSpace()) as measure,
        model_of(CHAIN, measure) as model,
    ):
        default = model.ways()[0]
        chosen = [
            (measure.problem(each), (Distribute("op_0", (16, 16, 0)),))
            for each in model.dispatches(default).problems
        ]
        spec = measure.space.merged(chosen)  # type: ignore[attr-defined]
        assert measure.space.merged(chosen * 2).count("@match_") == spec.count("@match_")  # type: ignore[attr-defined]
        base, other = model.compare([(default, ""), (default, spec)], lambda: None)
        assert (base.status, other.status) == ("ok", "ok")
        # Each matcher has its own dispatch, whether or not their configurations are the same.
        asked = set().union(*(measure.space.matchers(*one) for one in chosen))  # type: ignore[attr-defined]
        assert (other.hits, other.dispatches) == (dict.fromkeys(asked, 1), 2)
        assert len(asked) == spec.count("@match_") // 2 == 2
        assert base.nanoseconds > 0 < other.nanoseconds
        # Compiled once: the second time is the first one's.
        again = model.compare([(default, ""), (default, spec)], lambda: pytest.fail("compiled"))
        assert again == [base, other]


def test_a_model_is_tuned_as_a_whole(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    with (
        Measurements(QUICK, tmp_path / "cache", IreeSpace()) as measure,
        model_of("matmul 96 96 96, relu", measure) as model,
    ):
        found = tune_model.tune_model(
            model,
            until=time.monotonic() + 600,
            most=12,
            seed=1,
            tick=lambda *one: told.append(one),
        )
    # What was done: flags, then tiles, then the whole.
    assert told[0] == ("flags and layouts", 0) and told[-1] == ("the whole model", 12)
    assert any(stage.startswith("tiles of dispatches (") for stage, _ in told)
    assert [one.name for one in found.flags] == ["default", "O3", "data tiling"]
    assert found.tuned.nanoseconds <= found.untuned.nanoseconds <= found.default.nanoseconds
    assert bool(found.spec) == (found.obeyed > 0)
    assert found.tuned.error <= found.tuned.allowed


def died(code: int, passed: str = "") -> ChildDied:
    ended = Ended(code, passed, b"", "")
    error = ChildDied(f"the process that calls some:function {ended.why()}", hint="none")
    error.ended = ended
    return error


class Dying(Model):
    """What is compiled or run is decided by the flags: some end the process of the compiler."""

    bad = "compile"

    def _ask(self, request: dict[str, Any]) -> Any:
        if time.monotonic() > self.measure.until:
            raise TokmillError("no time is left", hint="none")
        if request["ask"] == "compile":
            if self.bad == "compile" and "--iree-opt-level=O3" in request["flags"]:
                raise died(-11)
            Path(request["path"]).write_text(" ".join(request["flags"]))
            return {"hits": {}, "dispatches": 0}
        if request["ask"] == "race":
            flags = [Path(path).read_text() for path in request["paths"]]
            if self.bad == "run" and any("data-tiling" in one for one in flags):
                raise died(-11)
            if self.bad == "late":
                raise died(-9, "3 seconds")
            return [
                {"times": [2.0 - ("O3" in one)] * 3, "error": 0.0, "allowed": 1.0, "moved": 9.0}
                for one in flags
            ]
        raise died(-11)


@pytest.mark.parametrize("bad", ["compile", "run", ""])
def test_a_candidate_that_ends_the_compiler_has_failed_and_is_named(bad: str) -> None:
    with (
        Measurements(QUICK, space=IreeSpace()) as measure,
        Dying(problem.of_line("matmul 8 8 8").text, measure) as model,
    ):
        model.bad = bad
        found = tune_model.tune_model(model, until=time.monotonic() + 60, most=8)
    crashed = "crashed: was killed by SIGSEGV"
    assert [one.status for one in found.flags] == {
        "compile": ["ok", crashed, crashed],
        "run": ["ok", "ok", crashed],
        "": ["ok", "ok", "ok"],
    }[bad]
    # No dispatch could be formed; the flags are an answer all the same.
    assert [why for _, why in found.skipped] == [
        "the process that calls some:function was killed by SIGSEGV"
    ]
    assert found.way.name == ("default" if bad == "compile" else "O3") and not found.spec


def test_a_default_that_fails_is_an_error() -> None:
    with (
        Measurements(QUICK, space=IreeSpace()) as measure,
        Dying(problem.of_line("matmul 8 8 8").text, measure) as model,
    ):
        model.bad = "late"
        with pytest.raises(TokmillError, match="timeout: took more than 3 seconds"):
            tune_model.tune_model(model, until=time.monotonic() + 60)
        real = Model(model.text, measure)
        with real, pytest.raises(TokmillError, match="no time is left"):
            tune_model.tune_model(real, until=time.monotonic() - 1)


def test_without_time_for_the_checks_no_spec_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A spec that was not compared on the whole model is none."""
    given = problem.of_line("matmul 8 8 8")
    with (
        Measurements(QUICK, space=IreeSpace()) as measure,
        Dying(given.text, measure) as model,
    ):
        measure.problem(given)

        def late(self: Any, until: float, most: int) -> None:
            self.space = measure.space
            part = tune.Part(name="one", count=1, evaluations=8, status="tuned", gain=2.0)
            chosen = [([0], given, (Distribute("op_0", (4, 4, 0)),))]
            self.tuned = tune.Tuned(spec="", parts=[part], chosen=chosen)
            measure.until = time.monotonic() - 1

        monkeypatch.setattr(tune_model._Look, "go_on", late)
        model.bad = ""
        found = tune_model.tune_model(model, until=time.monotonic() + 60)
    assert (found.spec, found.way.name) == ("", "O3")
    assert found.parts[0].status == "default: no time to compare the whole with it"


@pytest.mark.parametrize(
    ("flags", "tuned", "status", "kept"),
    [
        (0.5, 0.4, "ok", ["default", "O3", "spec"]),
        (0.99, 0.99, "ok", ["default"]),
        (0.99, 0.9, "ok", ["default", "spec"]),
        (0.5, 0.495, "ok", ["default", "O3"]),
        (0.5, 0.6, "ok", ["default", "O3"]),
        (1.2, 1.1, "ok", ["default"]),
        (0.5, 0.1, "wrong", ["default", "O3"]),
        (0.5, float("nan"), "refused: some", ["default", "O3"]),
    ],
)
def test_flags_and_specs_that_gain_too_little_are_left_out(
    flags: float, tuned: float, status: str, kept: list[str]
) -> None:
    default, other = Way("default", ()), Way("O3", FLAGS["O3"])
    found = tune_model.settle(
        [
            (default, "", Timed(name="default", nanoseconds=1e6)),
            (other, "", Timed(name="O3", nanoseconds=flags * 1e6)),
            (other, "spec", Timed(name="spec", nanoseconds=tuned * 1e6, status=status)),
        ]
    )
    assert [timed.name for _, _, timed in found] == kept


def test_a_spec_that_nothing_obeys_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(self: Model, tried: Any, tick: Any) -> list[Timed]:
        return [Timed(name=way.name, nanoseconds=1.0) for way, _ in tried]

    def some(found: Any, trials: list[Trial], *_: Any) -> Trial:
        return next(each for each in trials if each.schedule and each.result.status == "ok")

    monkeypatch.setattr(Model, "compare", compare)
    monkeypatch.setattr(tune, "LEAST", 0.0)
    monkeypatch.setattr(tune, "_best", some)
    with (
        Measurements(QUICK, tmp_path / "cache", IreeSpace()) as measure,
        pytest.raises(TokmillError, match="obeys no matcher"),
    ):
        tune_model.tune_model(
            model_of("matmul 32 32 32", measure), until=time.monotonic() + 60, most=8
        )


@pytest.mark.parametrize("bad", [set(), {3}, {0, 6}, set(range(7))])
def test_what_makes_the_whole_slower_is_found_by_halves(bad: set[int]) -> None:
    kept = helping(range(7), lambda some: bool(bad & set(some)))
    assert sorted(kept) == sorted(set(range(7)) - bad)


def test_results_that_differ_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for number, line in enumerate(("matmul 16 16 16", "matmul 16 16 16, relu")):
        paths.append(tmp_path / f"{number}.vmfb")
        request = {"module": problem.of_line(line).text, "schedule": "", "flags": []}
        executor.compiled(request | {"path": str(paths[-1])})
    request = {"paths": list(map(str, paths)), "module": "", "parameters": "", "runs": 1}
    same, other = executor.race(request | {"seed": 0, "length": 16})
    assert same["error"] == 0
    assert other["error"] > other["allowed"]
    assert same["moved"] > same["allowed"]


CONSTANT = """
func.func @main(%image: tensor<16x16xf32>) -> tensor<16x16xf32> {
  %one = arith.constant dense<1.0> : tensor<16x16xf32>
  %empty = tensor.empty() : tensor<16x16xf32>
  %sum = linalg.add ins(%one, %one : tensor<16x16xf32>, tensor<16x16xf32>)
                    outs(%empty : tensor<16x16xf32>) -> tensor<16x16xf32>
  return %sum : tensor<16x16xf32>
}
"""


def test_results_that_no_input_changes_prove_little(tmp_path: Path) -> None:
    path = tmp_path / "0.vmfb"
    executor.compiled({"module": CONSTANT, "schedule": "", "flags": [], "path": str(path)})
    request = {"paths": [str(path)], "module": "", "parameters": "", "runs": 1}
    (only,) = executor.race(request | {"seed": 0, "length": 16})
    assert only["moved"] == 0


IMAGES = "conv_2d_nchw 1 3 18 16 3, relu, conv_2d_nchw 24 1, pooling 2 2"


def test_convolutions_work_on_channels_last_and_give_the_same(tmp_path: Path) -> None:
    text = problem.of_line(IMAGES).text
    with (
        Measurements(QUICK, tmp_path / "cache", IreeSpace()) as measure,
        Model(text, measure, length=64) as model,
    ):
        last = [way for way in model.ways() if way.last]
        assert [way.name for way in last] == ["channels last, O3", "channels last, data tiling"]
        made = model.module(last[0])
        assert "nchw" not in made and made.count('"linalg.conv_2d_nhwc_hwcf"') == 2
        # Behind the image and behind both filters, which are arguments here.
        assert made.count('"util.optimization_barrier"') == 3
        # The image once, each filter once, and the result once.
        assert made.count('"linalg.transpose"') == 4
        both = model.compare([(model.ways()[0], ""), (last[0], "")], lambda: None)
    assert [one.status for one in both] == ["ok", "ok"]


FILTERS = """
func.func @main(%image: tensor<1x3x8x8xf32>) -> tensor<1x4x6x6xf32> {
  %filters = arith.constant dense<0.5> : tensor<4x3x3x3xf32>
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<1x4x6x6xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<1x4x6x6xf32>) -> tensor<1x4x6x6xf32>
  %sum = linalg.conv_2d_nchw_fchw
      ins(%image, %filters : tensor<1x3x8x8xf32>, tensor<4x3x3x3xf32>)
      outs(%start : tensor<1x4x6x6xf32>) -> tensor<1x4x6x6xf32>
  return %sum : tensor<1x4x6x6xf32>
}
"""


def test_constant_filters_are_transposed_when_they_are_loaded() -> None:
    """A barrier behind them would transpose them in each run; behind the image one stays."""
    made, changed = layout.channels_last(FILTERS)
    assert changed == 1
    assert made.count('"util.optimization_barrier"') == 1


def test_the_fewest_evaluations_reach_every_layout(tmp_path: Path) -> None:
    """Two layouts share what is allowed, and a share of one evaluation is one."""
    with (
        Measurements(QUICK, tmp_path / "cache", IreeSpace()) as measure,
        Model(FILTERS, measure, length=27) as model,
    ):
        choice = tune_model.tune_model(model, until=time.monotonic() + 600, most=1)
    assert {one.name.partition(",")[0] for one in choice.flags} >= {"default", "channels last"}
    assert not any(part.status == tune.NOT_REACHED for part in choice.parts)


def test_guesses_for_convolutions_are_possible_and_cut_filters() -> None:
    chance = random.Random(0)
    with Measurements(QUICK, space=IreeSpace()) as measure:
        given = measure.problem(problem.of_line("conv_2d_nhwc 1 16 16 64 3"))
        for _ in range(30):
            guess = measure.space.guess(given, chance)
            replay(measure.space, given.operations, guess)
            vector = guess[-1].sizes
            assert (vector[1], vector[4], vector[5]) == (1, 1, 1) and vector[3] in (16, 32, 64)


def test_an_image_that_something_else_reads_stays_as_it_is_there() -> None:
    """The result of the function keeps its shape; what has no convolution is left."""
    text = problem.of_line("conv_2d_nchw 2 4 8 8 3").text
    made, changed = layout.channels_last(text)
    assert changed == 1
    assert made.count("-> tensor<2x8x6x6xf32>") >= 1
    same, none = layout.channels_last(problem.of_line("matmul 8 8 8").text)
    assert none == 0 and "linalg.matmul" in same
    with pytest.raises(TokmillError, match="cannot be read"):
        layout.channels_last("func.func")


def test_guesses_for_products_fit_the_registers_of_the_processor_that_is_named() -> None:
    chance, given = random.Random(0), problem.of_line("matmul 192 192 192")
    flags = (f"{compiler.PROCESSOR}x86-64-v3",)
    with Measurements(Settings(), space=IreeSpace(flags)) as measure:
        known = measure.problem(given)
        for _ in range(16):
            rows, columns, _ = measure.space.guess(known, chance)[-1].sizes
            # AVX2 has 16 registers of 8 numbers; a few more do little harm, twice as many do.
            assert rows * columns <= 2 * 16 * 8
            assert columns <= 32
