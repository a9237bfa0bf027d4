"""`tokmill rl tune` on a whole model, from an ONNX file to a program."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onnx_models import small_model
from tokmill.cli import main


def tuned(model: Path, spec: Path, capsys: Any) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["rl", "tune", str(model), "-o", str(spec), "--minutes", "0.02", "--json"])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_is_tuned_and_the_printed_line_compiles_it(tmp_path: Path, capsys: Any) -> None:
    model, spec = small_model(tmp_path / "model.onnx", 64), tmp_path / "model.spec"
    told = tuned(model, spec, capsys)
    assert [one["name"] for one in told["tried"]] == ["default", "O3", "data tiling"]
    assert sum(part["runs"] for part in told["operations"]) == 2
    assert told["whole"]["milliseconds"] <= told["whole"]["best_flags_milliseconds"]
    assert spec.exists() == bool(told["whole"]["obeyed"])
    assert told["whole"]["other_input_difference"] > told["whole"]["allowed_error"]
    tool, *rest = shlex.split(told["compile"])
    assert tool == "iree-compile"
    module = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
    subprocess.run([*module, *rest], check=True, cwd=tmp_path)
    assert (tmp_path / "MODULE.vmfb").stat().st_size
    assert (tmp_path / "model.spec.model.irpa").stat().st_size
    # What was ended goes on: times of the flags come from the cache.
    assert tuned(model, spec, capsys)["tried"] == told["tried"]
