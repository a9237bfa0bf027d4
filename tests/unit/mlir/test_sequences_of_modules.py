"""`build mlir`: the sequences are those of observations, and what is left out is counted."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir import module_source as source
from tokmill.mlir import random_schedules as draws
from tokmill.mlir.env import ScheduleEnv
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.loops.legal import TILES
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import generators, problem
from tokmill.mlir.space import LOOPS
from tokmill.mlir.tokens import field_tokens, sequences

CHAIN = "matmul 16 32 16, relu, softmax"


class Unmeasured(Measurements):
    """Every schedule is worth nothing."""

    def __call__(self, *arguments: Any, **more: Any) -> Result:
        return Result(status="refused")


def encoded(env: ScheduleEnv, action: actions.AnyAction) -> np.ndarray[Any, Any]:
    """Return the row of numbers of an action, the inverse of `ScheduleEnv.decode`."""
    loops = env.sizes.loops
    row = np.zeros(1 + 2 * loops, np.int64)
    row[0] = LOOPS.kinds.index(action.__struct_config__.tag)
    sizes = getattr(action, "sizes", ())
    row[1 : 1 + len(sizes)] = [TILES.index(size) for size in sizes]
    order = getattr(action, "order", ())
    row[1 + loops : 1 + loops + len(order)] = order
    return row


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_sequences_are_what_the_environment_shows(tmp_path: Path) -> None:
    """A schedule is drawn by the environment; the store has each of its observations."""
    module = written(tmp_path / "a.mlir", generators.chain(CHAIN))
    store = quick_build("mlir", module, tmp_path / "s", schedules=3, seed=5)
    found = {
        tuple(store.record(number)[name].tobytes() for name in ("token", "segment", "depth"))
        for number in range(store.records)
    }
    given = problem.of_file(module)
    env = ScheduleEnv([given], Unmeasured(Settings()), view="fields")
    shown = 0
    for schedule in (1, 2, 3):
        chance = random.Random(f"5 {schedule} 0")
        observation, _ = env.reset(options={"problem": 0})
        ended = False
        while not ended:
            state = env._states[env._place]
            length = int(observation["mask"].sum())
            tokens = (observation[name][:length] for name in ("ids", "segments", "depths"))
            assert tuple(one.astype(np.uint8).tobytes() for one in tokens) in found
            shown += 1
            action = draws.draw_action(state, chance)
            observation, _, ended, _, info = env.step(encoded(env, action))
            assert not info["illegal"]
    assert shown > 12


def test_columns_of_a_store(tmp_path: Path) -> None:
    module = written(tmp_path / "a.mlir", generators.chain(CHAIN))
    store = quick_build("mlir", module, tmp_path / "s", schedules=4)
    rows = [store.record(number) for number in range(store.records)]
    first = [row for row in rows if row["schedule"] == 0]
    assert [row["operation"] for row in first] == [
        "matmul 16x32x16",
        "generic 16x32",
        "generic 16x32",
        "generic 16x32",
        "generic 16x32",
    ]
    assert {row["step"] for row in first} == {0}
    assert all(row["step"] > 0 for row in rows if row["schedule"])
    assert {row["schedule"] for row in rows} == {0, 1, 2, 3, 4}
    assert all(row["token"][0] == field_tokens.CLS for row in rows)
    assert store.vocabularies["token"].roles == {"cls": 0, "sep": 1, "pad": 2, "mask": 3}
    seen = {tuple(row["token"].tolist() + row["depth"].tolist()) for row in rows}
    assert len(seen) == len(rows)


@pytest.mark.parametrize("schedules", [3, 20])
def test_a_count_is_how_often_an_operation_runs(schedules: int, tmp_path: Path) -> None:
    """Whatever the schedules, of which many are equal, and whichever child drew them."""
    once = written(tmp_path / "a.mlir", generators.chain("relu 8 8"))
    store = quick_build("mlir", once, tmp_path / "once", schedules=schedules)
    assert store.records > 1
    assert {store.record(number)["count"] for number in range(store.records)} == {1}
    from test_cut_modules import T, function, generic, matmul

    # The same thing twice, in a module that is not cut.
    relu = generic("%r = arith.maximumf %x, %c0 : f32")
    text = function(f"%0 = {relu}\n%1 = {relu}\n%2 = linalg.add ins(%0, %1 : {T}, {T}) "
                    f"outs(%e : {T}) -> {T}", "%2")  # fmt: skip
    loop = (  # This one is cut.
        f"%0 = {matmul()}\n%1 = {matmul()}\n%c1 = arith.constant 1 : index\n"
        f"%2 = scf.for %i = %c1 to %n step %c1 iter_args(%t = %a) -> ({T}) {{\n"
        f"scf.yield %t : {T}\n}}"
    )
    for name, module, counts in (
        ("whole", text.replace(", %n: index, %v: f32", ""), {"generic 8x8": 2, "add 8x8": 1}),
        ("cut", function(loop, "%0"), {"matmul 8x8x8": 2}),
    ):
        given = written(tmp_path / f"{name}.mlir", module)
        store = quick_build("mlir", given, tmp_path / name, schedules=schedules)
        rows = [store.record(number) for number in range(store.records)]
        assert {row["operation"] for row in rows} == counts.keys()
        for row in rows:
            assert row["count"] == counts[row["operation"]], row


def test_what_is_skipped_is_counted_to_a_limit() -> None:
    from test_cut_modules import SKIPPED, doubling, function

    text = doubling(60) + function(SKIPPED["too large"][0], "%0", "f60", "private")
    made = sequences.make({"text": text, "where": "x", "seed": 0, "first": 0, "last": 1})
    assert list(made["skipped"].values()) == [sequences.MOST_SKIPPED]


def test_operations_of_a_model_are_counted_and_what_is_skipped_too(tmp_path: Path) -> None:
    from test_cut_modules import T, function, matmul

    loop = (
        f"%0 = {matmul()}\n%1 = {matmul()}\n%c1 = arith.constant 1 : index\n"
        f"%2 = scf.for %i = %c1 to %n step %c1 iter_args(%t = %a) -> ({T}) {{\n"
        f"%3 = {matmul('%t')}\nscf.yield %3 : {T}\n}}"
    )
    text = function(loop, "%0") + function(f"%0 = {matmul()}", "%0", "other")
    store = quick_build("mlir", written(tmp_path / "a.mlir", text), tmp_path / "s")
    assert store.records == 1
    assert store.record(0)["count"] == 3
    assert store.manifest.skipped["linalg.matmul: control flow: inside of scf.for"] == 1


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"module {}", b"junk", b"(" * 100_000])
def test_what_cannot_be_read_is_rejected(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.mlir"
    path.write_bytes(data)
    with pytest.raises(TokmillError) as caught:
        quick_build("mlir", path, tmp_path / "s")
    assert caught.value.hint


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    module = written(tmp_path / "a.mlir", generators.chain("relu 4"))
    for schedules in (-1, source.MOST + 1):
        with pytest.raises(UsageError, match="schedules"):
            quick_build("mlir", module, tmp_path / "s", schedules=schedules)


def test_reasons_of_a_hostile_module_are_bounded() -> None:
    operations = "".join(
        f"%{i} = tensor.empty() : tensor<{i + 1}xf8E5M2>\n%r{i} = linalg.exp ins(%{i} : "
        f"tensor<{i + 1}xf8E5M2>) outs(%{i} : tensor<{i + 1}xf8E5M2>) -> tensor<{i + 1}xf8E5M2>\n"
        for i in range(300)
    )
    text = generators.chain("relu 4") + f"func.func @f() {{\n{operations}return\n}}"
    made = sequences.make({"text": text, "where": "x", "seed": 0, "first": 0, "last": 1})
    assert len(made["skipped"]) == sequences.KINDS_OF_REASONS + 1
    assert sum(made["skipped"].values()) == 300
