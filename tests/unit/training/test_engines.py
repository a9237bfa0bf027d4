"""Every engine in two real processes: one training, exact resumes, checkpoints for all of them."""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokmill
import toy
from processes import together, values
from tokmill.base.errors import Interrupted, TokmillError
from tokmill.models.model import Inputs
from tokmill.tasks.next_token import NextToken
from tokmill.training.data import Loader, make_feed, open_stores
from tokmill.training.engines.tensors import read_tensors
from tokmill.training.launch import place
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import make_task
from toy import cycles, losses, make_store, stop_after, weights

if find_spec("deepspeed") is None:
    pytest.skip("needs the extra deepspeed", allow_module_level=True)
torch.set_num_threads(1)

SPLIT = ["deepspeed-0", "deepspeed-2", "deepspeed-3"]
"""Engines beside ddp, whose resumes are tested in test_ddp.py; of DeepSpeed with the stage."""
OWN_STATE = ["deepspeed-2", "deepspeed-3"]
"""Those that keep the optimiser's state and refuse steps in their own way."""
OF_LENGTHS = ["ddp", "deepspeed-3"]
"""Those that are tested with rows of several lengths."""
LAST = "checkpoints/step-00000010"
EXACT = ("model.safetensors", "optimizer.safetensors", "rng-00000.json", "rng-00001.json")
NAN_AT = 11
"""The forward pass of process 1 that is spoiled: the second of three of step 3."""


def recipe(store: Path, engine: str, steps: int = 10, **sections: Any) -> dict[str, Any]:
    """A recipe with three micro-batches a step in each of two processes."""
    kind, _, stage = engine.partition("-")
    run = {"micro_tokens": 32, "seed": 7, "eval_rows": 5, "engine": kind, **sections.pop("run", {})}
    made = toy.recipe(store, steps, data={"batch": 12, "val": str(store)}, run=run, **sections)
    if stage:
        made["engine"] = {"deepspeed": {"zero_optimization": {"stage": int(stage)}}}
    return made


def rwkv(store: Path, engine: str) -> dict[str, Any]:
    made = recipe(store, engine, 4)
    made["model"] = {"kind": "rwkv7", "dim": 16, "layers": 2, "head_dim": 8}
    return made


def lengths(store: Path, engine: str) -> dict[str, Any]:
    """Rows of 1 to 32 positions, which make another number of micro-batches in each process."""
    task = {"rows": "whole", "length": 32}
    return recipe(store.parent / "mixed", engine, 4, task=task, run={"micro_tokens": 64})


def attempt(value: dict[str, Any], out: Path, stop_at: int = 0, spoil_at: int = 0) -> str:
    """Train, or go on, in this process; return the kind of error that ended it."""
    forward, calls = NextToken.forward, [0]

    def spoiled(self: NextToken, batch: Any) -> Any:
        loss, sums = forward(self, batch)
        calls[0] += 1
        if calls[0] != spoil_at:
            return loss, sums
        return loss * math.nan, {name: value * math.nan for name, value in sums.items()}

    with pytest.MonkeyPatch.context() as patch, ended_group():
        if place().rank == 1:
            stop_after(stop_at, patch)
            patch.setattr(NextToken, "forward", spoiled)
        try:
            tokmill.train(value, out, quiet=True)
        except (TokmillError, SystemExit) as error:
            return f"{type(error).__name__} {error}"
    return ""


@contextlib.contextmanager
def ended_group() -> Iterator[None]:
    """End what a training leaves behind that does not expect its process to go on."""
    yield
    from deepspeed import comm

    if torch.distributed.is_initialized():
        (comm if comm.comm.cdb else torch.distributed).destroy_process_group()


def everything(store: Path, folder: Path) -> dict[str, Any]:
    """Do all trainings that the tests look at, in one of two processes."""
    told: dict[str, Any] = {}
    for engine in SPLIT:
        out, value = folder / engine, recipe(store, engine)
        told[engine] = [attempt(value, out / "whole")]
        told[engine].append(attempt(value, out / "stopped", stop_at=6))
        if place().rank == 0:
            shutil.copytree(out / "stopped", out / "parts")
            shutil.copytree(folder / "single/stopped", out / "taken-over")
            (out / "copied").touch()
        # The other process would read files of which a part is there.
        while not (out / "copied").exists():
            time.sleep(0.01)
        told[engine].append(attempt(value, out / "parts"))
        if engine in OWN_STATE:
            told[engine].append(attempt(value, out / "taken-over"))
            told[engine].append(attempt(value, out / "spoiled", spoil_at=NAN_AT))
            told[engine].append(attempt(value, out / "spoiled"))
            told[engine].append(attempt(rwkv(store, engine), folder / engine / "rwkv7"))
    for engine in OF_LENGTHS:
        told[f"{engine} of lengths"] = attempt(lengths(store, engine), folder / engine / "lengths")
    return told


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    random = np.random.default_rng(2)
    cut = [document[: random.integers(2, 32)] for document in cycles(120, 60)]
    make_store(folder / "mixed", cut)
    return make_store(folder / "train", cycles(120))


@pytest.fixture(scope="module")
def single(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that all others are compared with."""
    folder = tmp_path_factory.mktemp("runs")
    tokmill.train(recipe(store, "single"), folder / "single/whole", quiet=True)
    tokmill.train(rwkv(store, "single"), folder / "single/rwkv7", quiet=True)
    tokmill.train(lengths(store, "single"), folder / "single/lengths", quiet=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TokmillError):
        stop_after(6, patch)
        tokmill.train(recipe(store, "single"), folder / "single/stopped", quiet=True)
    return folder


@pytest.fixture(scope="module")
def runs(store: Path, single: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of all runs, and what each process was told about each engine."""
    return single, values(together(2, everything, store, single))


Runs = tuple[Path, list[dict[str, Any]]]


def same_training(left: Path, right: Path) -> None:
    for name in ("loss", "grad_norm", "val_loss"):
        assert losses(left, name) == pytest.approx(losses(right, name), abs=1e-6), name
    assert losses(left, "targets") == losses(right, "targets")
    for name, tensor in weights(left).items():
        assert weights(right)[name].dtype == tensor.dtype == torch.float32
        torch.testing.assert_close(weights(right)[name], tensor, atol=1e-5, rtol=1e-5)


def same_files(left: Path, right: Path, names: tuple[str, ...] = EXACT) -> None:
    for name in names:
        assert (left / LAST / name).read_bytes() == (right / LAST / name).read_bytes(), name
    assert weights(left).keys() == weights(right).keys()


@pytest.mark.parametrize("engine", SPLIT)
def test_it_is_the_training_of_one_process(engine: str, runs: Runs) -> None:
    folder, told = runs
    assert [one[engine][0] for one in told] == ["", ""]
    same_training(folder / engine / "whole", folder / "single/whole")
    # The same moments too, each whole and under the name of its weight.
    mine, other = (
        read_tensors(folder / name / "whole" / LAST / "optimizer.safetensors")
        for name in (engine, "single")
    )
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, atol=1e-5, rtol=1e-4)
    files = {path.name for path in (folder / engine / "whole").iterdir()}
    assert ("ds_config.json" in files) == engine.startswith("deepspeed")


@pytest.mark.parametrize("engine", SPLIT)
def test_a_resume_is_exact_to_the_last_bit(engine: str, runs: Runs) -> None:
    folder, told = runs
    kinds = [one[engine][1].partition(" ")[0] for one in told]
    assert kinds == ["Interrupted", "SystemExit"]
    same_files(folder / engine / "whole", folder / engine / "parts")
    assert losses(folder / engine / "whole") == losses(folder / engine / "parts")


@pytest.mark.parametrize("engine", OWN_STATE)
def test_a_checkpoint_continues_on_another_engine(
    engine: str, runs: Runs, store: Path, tmp_path: Path
) -> None:
    folder, told = runs
    # Of one process in two …
    assert [one[engine][3] for one in told] == ["", ""]
    same_training(folder / engine / "taken-over", folder / "single/whole")
    # … and of two in one.
    shutil.copytree(folder / engine / "stopped", tmp_path / "run")
    tokmill.train(recipe(store, "single"), tmp_path / "run", quiet=True)
    same_training(tmp_path / "run", folder / "single/whole")


@pytest.mark.parametrize("engine", OWN_STATE)
def test_a_step_that_is_not_finite_changes_nothing(engine: str, runs: Runs) -> None:
    folder, told = runs
    kinds = sorted(one[engine][4].partition(" ")[0] for one in told)
    assert kinds == ["SystemExit", "TokmillError"]
    assert any("step 4: the loss is not finite" in one[engine][4] for one in told)
    assert [one[engine][5] for one in told] == ["", ""]
    same_files(folder / engine / "whole", folder / engine / "spoiled")


@pytest.mark.parametrize("engine", OWN_STATE)
def test_weights_that_are_not_trained(engine: str, runs: Runs) -> None:
    folder, told = runs
    assert [one[engine][6] for one in told] == ["", ""]
    same_training(folder / engine / "rwkv7", folder / "single/rwkv7")


@pytest.mark.parametrize("engine", OF_LENGTHS)
def test_processes_may_have_other_numbers_of_micro_batches(
    engine: str, runs: Runs, store: Path
) -> None:
    folder, told = runs
    assert [one[f"{engine} of lengths"] for one in told] == ["", ""]
    same_training(folder / engine / "lengths", folder / "single/lengths")
    config = from_dict(lengths(store, "single"))
    task = make_task(config, Inputs({"token": toy.SIZE}))
    feed = make_feed(config, task, open_stores(config.data), 2)
    counts = []
    for rank in (0, 1):
        keys: dict[str, Any] = {"micro_tokens": 64, "device": torch.device("cpu")}
        with Loader(feed, task, range(4), rank, 2, **keys) as loader:
            counts.append([len(loader.next()[0]) for _ in range(4)])
    assert any(left != right for left, right in zip(*counts, strict=True))


ONE_PROCESS = ["deepspeed-1", "deepspeed-3"]


def one_process(store: Path, folder: Path) -> None:
    """Stop and go on, again and again, in one process that nobody started as one of several."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name)
    for engine in ONE_PROCESS:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
            stop_after(6, patch)
            tokmill.train(recipe(store, engine), folder / engine, quiet=True)
        tokmill.train(recipe(store, engine), folder / engine, quiet=True)


def test_one_process_is_enough(single: Path, store: Path, tmp_path: Path) -> None:
    values(together(1, one_process, store, tmp_path))
    for engine in ONE_PROCESS:
        same_training(tmp_path / engine, single / "single/whole")
