"""Schedules are files of MLIR: upstream's own `mlir-opt` of another version applies them too."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tokmill.mlir.loops import execute
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.modules import dtypes, operations, problem, toolkit
from tokmill.mlir.space import LOOPS

MLIR_OPT = shutil.which("mlir-opt-22")
REASON = "mlir-opt-22 of Debian's mlir-22-tools is not there"
T, V = actions.Tile, actions.Vectorize
CASES: dict[str, tuple[str, actions.Schedule, tuple[str, ...]]] = {
    "tiles and vectors": (
        "matmul 32 32 32",
        (T("op_0", (16, 16, 0)), actions.Interchange("op_0", (2, 0, 1)), T("op_0", (4, 8, 8)),
         V("op_0")),
        ("scf.for", "vector."),
    ),
    "fusion": (
        "matmul 16 16 16, relu",
        (actions.Fuse("op_1", (4, 8), "op_0"), T("op_0", (2, 4, 1))),
        ("scf.forall", "scf.for"),
    ),
    # No packing: unpacking has one result less in LLVM 22.
    "im2col": ("conv_2d_nchw 1 2 10 4 3", (actions.Im2col("op_0"),), ("tensor.collapse_shape",)),
    "one dimension": (
        "conv_2d_nchw 1 4 10 4 3",
        (T("op_0", (0, 2, 1, 0, 2, 1, 0)), V("op_0")),
        ("vector.",),
    ),
}  # fmt: skip


def tagged(given: problem.Problem) -> str:
    """Return a module with the tags that schedules name."""
    inside = toolkit.context()
    module = toolkit.parse(given.text, inside, "module")
    with inside:
        operations.find(module, "module")
        return str(module)


@pytest.mark.skipif(MLIR_OPT is None, reason=REASON)
@pytest.mark.parametrize("name", CASES)
def test_upstream_applies_a_schedule_with_the_same_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, taken, wanted = CASES[name]
    given = problem.of_line(line)
    (tmp_path / "module.mlir").write_text(tagged(given))
    (tmp_path / "schedule.mlir").write_text(LOOPS.text(given, taken))
    passes = (
        "builtin.module(transform-preload-library{transform-library-paths="
        f"{tmp_path / 'schedule.mlir'}}},transform-interpreter)"
    )
    done = subprocess.run(
        [str(MLIR_OPT), f"--pass-pipeline={passes}", str(tmp_path / "module.mlir")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    for word in wanted:
        assert word in done.stdout
    # Its operations stand in loops now, and nothing is to be done to them any more.
    monkeypatch.setattr(operations, "find", lambda module, where: [])
    kernels = [execute.Kernel(text, None, 0) for text in (given.text, done.stdout)]
    for kernel in kernels:
        kernel.run()
    error, allowed = dtypes.difference(kernels[0].outputs, kernels[1].outputs, given.length)
    assert error <= allowed
