"""ONNX models and modules of IREE's dialects as operations; real models are counted."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from making import quick_build
from onnx_models import small_model, write
from tokmill.base.errors import MissingExtraError, TokmillError
from tokmill.builds.source import Resources
from tokmill.mlir.module_source import MlirSource
from tokmill.mlir.modules import cut, importing


def test_a_small_model_as_operations(tmp_path: Path) -> None:
    found = cut.cut(importing.text_of(small_model(tmp_path / "m.onnx")), "m.onnx")
    names = [one.operations[0].name for one in found.problems]
    assert names == ["linalg.matmul", "linalg.generic", "linalg.generic"]
    assert found.counts == [2, 2, 1]
    store = quick_build("mlir", tmp_path / "m.onnx", tmp_path / "s", schedules=2)
    first = [store.record(n) for n in range(store.records) if not store.record(n)["schedule"]]
    assert [row["count"] for row in first] == [2, 2, 1]
    assert first[0]["operation"] == "matmul 4x8x8"


def test_limits_are_those_of_the_compiler_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a Python process that starts it: the memory of a child's children is not counted."""
    started: list[str] = []
    run = importing.run

    def noted(command: list[str], *others: Any, **more: Any) -> Any:
        started.append(Path(command[0]).name)
        return run(command, *others, **more)

    monkeypatch.setattr(importing, "run", noted)
    importing.of_onnx(small_model(tmp_path / "m.onnx"))
    importing.of_iree(IREE, "x")
    assert started == [Path(sys.executable).name, "iree-compile", "iree-opt"]


def test_versions_that_read_models_belong_to_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MlirSource(MlirSource.Config(), ["relu 8"], {}, Resources())
    rules = made.identity()["rules"]
    for package in ("torch-mlir", "iree-base-compiler", "onnx"):
        assert f"{package} {importlib.metadata.version(package)}" in rules
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "onnx":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    assert "onnx" not in made.identity()["rules"]


def test_sizes_that_are_not_known_are_told(tmp_path: Path) -> None:
    model = small_model(tmp_path / "m.onnx", "rows")
    with pytest.raises(TokmillError, match="sizes are not all known"):
        quick_build("mlir", model, tmp_path / "s")


@pytest.mark.parametrize("data", [b"", b"junk" * 9, b"\x08\x09" + bytes(99)])
def test_what_is_no_model_is_told(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(TokmillError, match="IREE") as caught:
        importing.of_onnx(tmp_path / "m.onnx")
    assert caught.value.hint


def test_without_the_packages_it_says_how_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match="onnx") as caught:
        importing.of_onnx(tmp_path / "m.onnx")
    assert "tokmill[mlir]" in caught.value.hint


IREE = """
util.global private @w = #stream.parameter.named<"model"::"w"> : tensor<8x4xf32>
util.func public @main(%a: !hal.buffer_view) -> !hal.buffer_view {
  %0 = hal.tensor.import %a : !hal.buffer_view -> tensor<8x8xf32>
  %w = util.global.load @w : tensor<8x4xf32>
  %c0 = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<8x4xf32>
  %f = linalg.fill ins(%c0 : f32) outs(%e : tensor<8x4xf32>) -> tensor<8x4xf32>
  %1 = linalg.matmul ins(%0, %w : tensor<8x8xf32>, tensor<8x4xf32>)
    outs(%f : tensor<8x4xf32>) -> tensor<8x4xf32>
  %2 = hal.tensor.export %1 : tensor<8x4xf32> -> !hal.buffer_view
  util.return %2 : !hal.buffer_view
}
"""


def test_modules_of_iree_are_read_in_their_own_syntax(tmp_path: Path) -> None:
    path = tmp_path / "m.mlir"
    path.write_text(IREE)
    found = cut.cut(importing.text_of(path), "m.mlir")
    assert [one.operations[0].bounds for one in found.problems] == [(8, 4, 8)]
    assert not found.skipped
    path.write_text(IREE.replace("util.return %2", "util.return %3"))
    with pytest.raises(TokmillError, match="not a valid MLIR") as caught:
        importing.text_of(path)
    assert caught.value.hint


KNOWN: dict[str, dict[str, tuple[int, int]]] = {
    # Kind → how many run, and how many are different.
    "resnet18": {
        "conv": (20, 11),
        "generic": (28, 12),
        "pooling": (1, 1),
        "unknown": (1, 1),
        "matmul": (1, 1),
    },
    # Its norms have numbers of their own, and each is broadcast to a row of channels.
    "mobilenet_v2": {
        "conv": (52, 30),
        "generic": (47, 19),
        "unknown": (53, 20),
        "matmul": (1, 1),
    },
    "gpt2": {"generic": (205, 31), "matmul": (25, 6), "unknown": (21, 4)},
}


@pytest.mark.long
@pytest.mark.parametrize("name", KNOWN)
def test_real_models_are_counted(name: str, tmp_path: Path) -> None:
    found = cut.cut(importing.text_of(write(name, tmp_path)), name)
    kinds: dict[str, tuple[int, int]] = {}
    for one, count in zip(found.problems, found.counts, strict=True):
        runs, different = kinds.get(one.operations[0].kind, (0, 0))
        kinds[one.operations[0].kind] = runs + count, different + 1
    assert kinds == KNOWN[name], found.skipped
