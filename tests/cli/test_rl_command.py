"""`tokmill rl` on folders, odd files and wrong words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokmill.cli import main, rl_search
from tokmill.mlir.loops.schedule import HEADER
from tokmill.mlir.modules import generators


def test_what_a_folder_has_besides_modules_is_counted(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.mlir").write_text(generators.chain("matmul 4 4 4"))
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "deep").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["rl", "show", str(tmp_path)])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert "linalg.matmul" in shown.out
    assert "2 entries left out: not named .mlir" in shown.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["rl", "show", "/dev/zero"], 1, "neither a file nor a folder"),
        (["rl", "show", "/dev/null"], 1, "neither a file nor a folder"),
        (["rl", "show", "pipe"], 1, "neither a file nor a folder"),
        (["rl", "tune", "pipe.onnx", "-o", "spec"], 1, "neither a file nor a folder"),
        (["rl", "tune", "relu 8", "-o", "."], 2, "no file but a folder"),
        (["rl", "tune", "relu 8", "-o", ".."], 2, "no file but a folder"),
        (["rl", "tune", "relu 8", "-o", ""], 2, "no file but a folder"),
        (["rl", "tune", "relu 8", "-o", "folder"], 2, "no file but a folder"),
        (["rl", "tune", "relu 8", "-o", "spec", "--minutes", "1e308"], 2, "--minutes"),
        (["rl", "tune", "relu 8", "-o", "spec", "--seed", "-1"], 2, "--seed"),
        (["rl", "search", "relu 8", "--seed", str(1 << 63)], 2, "--seed"),
        (["rl", "search", "relu 8", "--runs", str(1 << 64)], 2, "--runs"),
        (["rl", "search", "relu 8", "-o", "pipe"], 5, "pipe"),
        (["rl", "show", "none.mlir"], 5, "none.mlir"),
        (["rl", "show", "."], 1, "no .mlir file"),
        (["rl", "search", "matmul 4 4 4", "--with", "greed"], 2, "did you mean 'greedy'?"),
        (["rl", "search", "decoder-tiny"], 2, "not schedules"),
        (["rl", "search", "schedules-lstm", "relu 8"], 2, "modules of its own"),
        (["rl", "search", "none.toml"], 2, "no such recipe"),
        (["rl", "replay", "matmul 4 4 4", "/dev/zero"], 1, "neither a file nor a folder"),
        (["rl", "replay", "matmul 4 4 4", "large"], 1, "more than 16 MiB"),
        (["rl", "replay", "matmul 4 4 4", "other"], 1, "no schedule of tokmill"),
        (["rl", "replay", "matmul 4 4 4", "."], 5, "hint:"),
        (["rl", "tune", "none.onnx", "-o", "spec"], 5, "no such file"),
    ],
)
def test_wrong_inputs_say_why(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    os.mkfifo("pipe")
    os.mkfifo("pipe.onnx")
    Path("other").write_text("module {}")
    with open("large", "wb") as file:
        file.write(HEADER.encode() + b"[] []\nmodule {}\n")
        file.truncate((16 << 20) + 1)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert says in said
    assert "hint:" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["rl", "show", "relu 8"],
        ["rl", "search", "relu 8"],
        ["rl", "train", "schedules-lstm", "-o", "run", "--dry-run"],
        ["build", "mlir", "relu 8", "-o", "store"],
    ],
)
def test_a_missing_extra_is_named(arguments: list[str], tmp_path: Path) -> None:
    for name in ("torch_mlir", "gymnasium", "iree"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            f"raise ModuleNotFoundError('none', name={name!r})\n"
        )
    places = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-m", "tokmill", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "pip install 'tokmill[mlir]'" in done.stderr


def test_names_that_are_no_utf8_are_read_and_shown(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    module = folder / os.fsdecode(b"\xff a\n.mlir")
    module.write_text(generators.chain("relu 8"))
    for given in (module, folder):
        with pytest.raises(SystemExit) as ended:
            main(["rl", "show", str(given), "--json"])
        assert ended.value.code == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["module"].endswith("caf%E9/%FF%20a%0A.mlir")
    with pytest.raises(SystemExit) as ended:
        main(["build", "mlir", str(module), "-o", str(tmp_path / "store")])
    assert ended.value.code == 0


def test_the_largest_seed_evolves(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rl", "search", "relu 8", "--evaluations", "20", "--seed", str((1 << 63) - 1)])
    assert ended.value.code == 0


def test_a_time_without_end_is_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rl", "tune", "matmul 8 8 8", "-o", str(tmp_path / "spec"), "--minutes", "inf"])
    assert ended.value.code == 2
    assert "--minutes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "replaced"),
    [
        (["rl", "tune", "a.mlir", "-o", "a.mlir"], "a.mlir"),
        (["rl", "tune", "a.mlir", "-o", "spec", "--cache", "a.mlir"], "a.mlir"),
        (["rl", "tune", "a.mlir", "-o", "spec", "--parameters", "spec"], "spec"),
        (["rl", "tune", "modules", "-o", "modules/000.mlir"], "modules/000.mlir"),
        (["rl", "search", "modules", "-o", "modules", "--evaluations", "1"], "modules/000.mlir"),
        (["rl", "search", "a.mlir", "modules/000.mlir", "-o", "modules"], "modules/000.mlir"),
    ],
)
def test_no_result_replaces_a_module_that_is_read(
    command: list[str],
    replaced: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("modules").mkdir()
    before = {}
    for name in ("a.mlir", "modules/000.mlir", "spec"):
        before[name] = generators.chain("relu 8") + "// of the user\n"
        Path(name).write_text(before[name])
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert f"{replaced}: " in (said := capsys.readouterr().err) and "replace what is read" in said
    assert all(Path(name).read_text() == text for name, text in before.items())


def test_results_of_before_are_replaced_in_a_folder_of_modules(tmp_path: Path) -> None:
    from tokmill.cli.rl_problems import check_files
    from tokmill.mlir.iree.spec import HEADER

    (tmp_path / "a.mlir").write_text(generators.chain("relu 8"))
    (tmp_path / "spec.mlir").write_text(HEADER + "[]")
    check_files([str(tmp_path)], {"-o": tmp_path / "spec.mlir"})


def test_a_policy_is_trained_and_its_figures_are_drawn(tmp_path: Path) -> None:
    sets = ["task.bench_count=2", 'task.modules=["relu 8"]', 'task.held_out=["relu 16"]']
    run = str(tmp_path / "run")
    words = [word for key in sets for word in ("--set", key)]
    for command in (
        ["rl", "train", "schedules-lstm", "-o", run, "--steps", "2", "-q", *words],
        ["rl", "eval", run, "-q"],
        ["plot", "speedup", run, "-o", str(tmp_path / "speedup.svg")],
        ["plot", "entropy", run, "-o", str(tmp_path / "entropy.svg")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 0, command
    assert all((tmp_path / f"{name}.svg").stat().st_size for name in ("speedup", "entropy"))


def test_a_policy_learns_to_choose_tiles_of_iree(tmp_path: Path) -> None:
    """The recipe, its masks and IREE itself, for a step on one small product."""
    words = []
    for key in (
        "task.bench_count=4",
        "task.runs=1",
        "task.most_seconds=0.1",
        'task.modules=["matmul 64 32 48"]',
        "task.held_out=[]",
        "task.redraws=8",
    ):
        words += ["--set", key]
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["rl", "train", "schedules-iree", "-o", str(run), "--steps", "1", "-q", *words])
    assert ended.value.code == 0
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["evaluations"] == 4 and row["moves"] >= 4 and row["failed"] < 1
    (best,) = json.loads((run / "schedules.json").read_text()).values()
    # "" is IREE's default, which is a schedule too.
    assert best["speedup"] > 0 and (not best["schedule"] or "lowering_config" in best["schedule"])


def test_a_spec_of_an_earlier_tuning_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokmill.cli import rl_tune_shown
    from tokmill.mlir.iree.tune import Tuned

    spec = tmp_path / "old.spec.mlir"
    for earlier in (False, True):
        if earlier:
            spec.write_text("an earlier one")
        rl_tune_shown.print_operations(Tuned(spec="", parts=[], chosen=[]), [], spec, (), False)
        assert ("earlier tuning" in capsys.readouterr().err) == earlier


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[task]\nkind = "schedules"\nmodules = ["relu 8"]\n[model]\nkind = "decoder"', "a policy"),
        ("task = 3", "not schedules"),
        ('[task]\nmodules = ["relu 8"]', "not schedules"),
    ],
)
def test_a_recipe_that_cannot_be_searched_says_why(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["rl", "search", str(tmp_path / "r.toml")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert says in said and "hint:" in said and "bug" not in said


def test_a_recipe_says_what_is_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'extends = "schedules-lstm"\n'
        '[task]\nmodules = ["relu 8", "relu 16"]\nbench_count = 3\nheld_out = []\nruns = 1\n'
        f'cache = "{tmp_path / "measured.db"}"\n'
        "[run]\nsteps = 2\n"
    )
    cached = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["rl", "search", str(recipe), "--with", "random", "--json", "-q"])
        assert ended.value.code == 0
        found = json.loads(capsys.readouterr().out)
        # Two steps of three evaluations are shared by two modules.
        assert found["evaluations"] == 3
        assert [one["module"] for one in found["modules"]] == ["relu 8", "relu 16"]
        assert sum(sum(one["counts"].values()) for one in found["modules"]) == 6
        cached.append(found["cached"])
    # Three draws may have two alike.
    assert cached[0] < 6
    assert cached[1] == 6
    # Another seed means other inputs: nothing that was measured is of them.
    with pytest.raises(SystemExit):
        main(["rl", "search", str(recipe), "--seed", "9", "--evaluations", "1", "--json", "-q"])
    assert json.loads(capsys.readouterr().out)["cached"] == 0


@pytest.mark.parametrize("speedup", [0.67, 1.0, 1.5])
def test_a_best_schedule_that_gains_nothing_is_said(
    speedup: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rl_search._best

    def made(*given: Any) -> Any:
        best = found(*given)
        return best._replace(row=best.row | {"speedup": speedup})

    monkeypatch.setattr(rl_search, "_best", made)
    with pytest.raises(SystemExit) as ended:
        main(["rl", "search", "relu 8", "--evaluations", "1", "--with", "greedy", "--runs", "1"])
    assert ended.value.code == 0
    assert ("is faster than none" in capsys.readouterr().err) == (speedup <= 1)
