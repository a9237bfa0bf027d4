"""`tokmill train --processes 2` as a user meets it: real processes through torchrun."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tokmill
from object_servers import free_port
from tokmill.cli import main
from toy import cycles, losses, make_store

psutil = pytest.importorskip("psutil", reason="needs the extra train")

SMALL = ["model.dim=16", "model.layers=1", "task.length=16", "data.batch=8", "run.log_every=1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONWARNINGS": "error"}
FOREVER = 10**6
PATIENCE = 600
"""Seconds that a busy machine may take for what takes a few: only what hangs takes longer."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(200))


class Training:
    """Starts `tokmill train`, and ends what is left of it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a training in two processes."""
        command = [sys.executable, "-m", "tokmill", "train", "-o", str(self.out)]
        process = subprocess.Popen(
            [*command, "--processes", "2", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.started.append(process)
        return process

    def new(self, store: Path, *arguments: object, every: int = 2) -> subprocess.Popen[str]:
        """Start a new run that saves every second step."""
        keys = (*SMALL, f"run.checkpoint_every={every}")
        sets = [item for key in keys for item in ("--set", key)]
        return self.start(store, *sets, *arguments)

    def steps(self) -> int:
        """Return the newest step that is on disk."""
        names = [path.name for path in (self.out / "checkpoints").glob("step-*")]
        return max((int(name[5:]) for name in names), default=0)

    def wait_for(self, what: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Wait until something holds."""
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, "it did not come about in time"
            time.sleep(0.05)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    found = Training(tmp_path / "run")
    yield found
    for process in found.started:
        with process:
            process.kill()


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return list(psutil.Process(process.pid).children())


def ended(process: subprocess.Popen[str], code: int) -> str:
    """Return what a process said on stderr, once it has ended with this exit code."""
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert "Traceback" not in err and "Error" not in err
    label = "interrupted: " if code == 3 else "error: "
    assert err.count(label) == (code != 0)
    return out if code == 0 else err


def test_stopped_killed_and_continued(training: Training, store: Path) -> None:
    """A killed process, a signal, the time limit: each time the run goes on from a checkpoint.

    What is refused is told once, with the line that started it.
    """
    first = training.new(store, "--steps", FOREVER)
    training.wait_for(training.steps)
    workers(first)[1].kill()
    said = ended(first, 5)
    assert "process 1 was killed by SIGKILL" in said and "the same command continues" in said

    said = ended(training.new(store, "--steps", FOREVER, "--set", "clip=0.5"), 1)
    line = f"torchrun --standalone --nproc-per-node=2 -m tokmill train -o {training.out} {store} "
    assert line in said and "optim.clip" in said

    reached = training.steps()
    second = training.start()
    training.wait_for(lambda: training.steps() > reached)
    second.send_signal(signal.SIGINT)
    said = ended(second, 3)
    assert "resumes from its checkpoint" in said and "checkpoint saved" in said
    assert f"tokmill train -o {training.out} --processes 2" in said

    reached = training.steps()
    said = ended(training.start("--max-time", "0.5s"), 3)
    assert "stopped by the time limit" in said and training.steps() >= reached
    lines = (training.out / "sessions.jsonl").read_text().splitlines()
    sessions = [json.loads(line) for line in lines]
    assert [one["processes"] for one in sessions] == [2, 2, 2] and sessions[0]["step"] == 0
    assert {one.process for one in tokmill.Run(training.out).trace(reached)} == {0, 1}


def test_no_process_outlives_its_starter(training: Training, store: Path) -> None:
    """They see its end, and save what they have."""
    first = training.new(store, "--steps", FOREVER, every=0)
    training.wait_for(lambda: (training.out / "metrics.jsonl").exists())
    family = workers(first)
    first.kill()
    training.wait_for(lambda: not any(map(psutil.Process.is_running, family)))
    assert training.steps() > 0


def test_deepspeed_by_its_table(
    training: Training, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled, stdout is ours alone, and the end of its processes is no abort."""
    monkeypatch.setitem(ENVIRONMENT, "TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    recipe = tmp_path / "zero.toml"
    recipe.write_text(
        f"""data.train = "{store}"
model = {{ dim = 16, layers = 1 }}
task.length = 16
run.engine = "deepspeed"

[engine.deepspeed]
wall_clock_breakdown = false
zero_optimization = {{ stage = 3, stage3_param_persistence_threshold = 0 }}
"""
    )
    done = json.loads(ended(training.start(recipe, "--steps", 3, "--json"), 0))
    assert done["step"] == 3 and done["loss"] > 0
    state = json.loads((training.out / "checkpoints/step-00000003/state.json").read_text())
    assert state["world"] == 2
    told = json.loads((training.out / "ds_config.json").read_text())
    assert told["zero_optimization"]["stage3_param_persistence_threshold"] == 0
    assert not (tmp_path / "compiled").exists()


def test_a_folder_that_is_not_shared_is_told_before_the_first_step(
    training: Training, store: Path, tmp_path: Path
) -> None:
    """Two nodes with a folder each: a new run, and one that was copied to the other node."""
    sets = [item for key in SMALL for item in ("--set", key)]

    def nodes(*folders: Path) -> list[subprocess.Popen[str]]:
        place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
        found = []
        for rank, folder in enumerate(folders):
            command = [sys.executable, "-m", "tokmill", "train", "-o", str(folder), str(store)]
            process = subprocess.Popen(
                [*command, "--steps", "4", *sets],
                stderr=subprocess.PIPE,
                text=True,
                env={**ENVIRONMENT, **place, "RANK": str(rank)},
            )
            training.started.append(process)
            found.append(process)
        return found

    both = [
        process.communicate(timeout=PATIENCE)[1]
        for process in nodes(tmp_path / "a", tmp_path / "b")
    ]
    told = "".join(both)
    assert [process.returncode for process in training.started] == [1, 1], told
    assert "not shared: 1 of 2 processes do not see what process 0 writes" in told
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    with pytest.raises(SystemExit, match="^0$"):
        main(["train", "-o", str(tmp_path / "a"), str(store), "--steps", "4", "-q", *sets])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = [
        process.communicate(timeout=PATIENCE)[1]
        for process in nodes(tmp_path / "a", tmp_path / "b")
    ]
    assert "is not shared" in "".join(copied)


@pytest.mark.long
def test_deepspeeds_own_file_is_the_training_that_it_describes(
    training: Training, store: Path, tmp_path: Path
) -> None:
    """Two processes with the file, and one without DeepSpeed by keys that are worked out here."""
    config = tmp_path / "ds_config.json"
    optimizer = {"lr": 5e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.02}
    rates = {"warmup_min_lr": 0, "warmup_max_lr": 4e-3, "warmup_num_steps": 3,
             "warmup_type": "linear", "total_num_steps": 6}  # fmt: skip
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 3,
                "gradient_clipping": 0.7,
                "steps_per_print": 1,
                "optimizer": {"type": "AdamW", "params": optimizer},
                "scheduler": {"type": "WarmupDecayLR", "params": rates},
                "zero_optimization": {"stage": 1},
            }
        )
    )
    sizes = {"dim": 16, "layers": 1}
    sets = [f"--set=model.{name}={size}" for name, size in sizes.items()]
    process = training.start(store, "--config", config, *sets, "--set=task.length=16", "--json")
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    # The launcher says what the file is, and its processes do not say it again.
    assert err.count("is DeepSpeed's") == 1 and json.loads(out)["step"] == 6
    assert (
        json.loads((training.out / "ds_config.json").read_text())["zero_optimization"]["stage"] == 1
    )
    plain = {
        "data": {"train": str(store), "batch": 2 * 3 * 2},
        "model": sizes,
        "task": {"length": 16},
        "optim": {"lr": 4e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.02,
                  "schedule": "linear", "warmup": 3, "floor": 0.0, "clip": 0.7},
        "run": {"steps": 6, "log_every": 1, "micro_tokens": 2 * 16},
    }  # fmt: skip
    tokmill.train(plain, tmp_path / "plain", quiet=True)
    for name in ("loss", "lr", "grad_norm", "targets"):
        expected = losses(tmp_path / "plain", name)
        assert losses(training.out, name) == pytest.approx(expected, rel=1e-4), name
        assert len(expected) == 6


def test_the_dry_run_ends_with_the_line(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train", str(store), "-o", str(tmp_path / "a run"), "--processes", "2", "--dry-run"]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        main(given)
    signal.signal(signal.SIGTERM, before)
    assert left.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"torchrun --standalone --nproc-per-node=2 -m tokmill train {store} -o '{tmp_path}/a run'"
    )
    assert not (tmp_path / "a run").exists()
