"""Native checkpoints: a folder a checkpoint, whole or not there, and exact to the bit.

    checkpoints/step-00000100/
      model.safetensors optimizer.safetensors    what the engine saved
      average.safetensors                        with `optim.ema`: the average of the weights
      rng-00000.json                             random states, one file a process
      task-00000.safetensors                     what a task adds, one file a process
      state.json                                 how far the run is, and the digests of all files

It is written under a private name, every file is synced, and the rename is the commit. Nothing is
pickled. `whole.py` finds the newest one that is what was written.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tokmill.errors import TokmillError
from tokmill.files import (
    TEMPORARY,
    machine_errors,
    make_folder,
    sha256_file,
    sync_folder,
    write_file,
)
from tokmill.headers import loads_json
from tokmill.store.manifest import canonical_digest, encode, read_json
from tokmill.tasks.task import Task
from tokmill.training.engines.engine import Engine
from tokmill.training.engines.rng import RandomStates, random_states, seed_for, set_random_states
from tokmill.training.engines.tensors import (
    check_tensors,
    damaged,
    read_metadata,
    read_tensors,
    write_tensors,
)

FOLDER, STATE = "checkpoints", "state.json"
JSON = "json"
"""In the metadata of what a task adds: all that is no tensor."""
NAME = re.compile(r"step-(\d{8,18})")
PRIVATE = re.compile(rf"{re.escape(TEMPORARY)}(old-)?step-\d{{8,18}}")
"""How a checkpoint is called that is being written or removed."""
RANDOM = re.compile(r"rng-\d{5,9}\.json")
EXTRA = re.compile(r"task-\d{5,9}\.safetensors")


class State(msgspec.Struct, kw_only=True):
    """How far a run is; with weights, moments and random states, all that a run is."""

    format: int = 1
    step: int = 0
    """Steps that are done; the next one has this number."""
    tokens: int = 0
    """Targets that were learned from."""
    seconds: float = 0.0
    """Time spent in all processes of this run, one after the other."""
    world: int = 1
    """Number of processes side by side."""
    engine: str = ""
    """How a step ran; "" in checkpoints that do not say."""
    best_step: int = 0
    """Step with the lowest validation loss so far; 0: none."""
    best_loss: float | None = None
    """That loss."""
    machine: str = ""
    """Kind of device and version of torch that wrote this; others may round differently."""
    files: dict[str, str] = {}
    """The other files → seal (`tensors.py`) of tensors, sha256 of the rest. None in checkpoints of
    older versions."""
    digest: str = ""
    """sha256 of all this, as canonical JSON, without this key."""


def save_checkpoint(
    run: Path, engine: Engine, state: State, keep: int, task: Task | None = None
) -> Path:
    """Write the checkpoint of a state, drop all but the newest `keep`, and return its folder.

    `task`: of which `extra_state` is kept too. Every process calls this; they meet twice.
    """
    folder = make_folder(run / FOLDER)
    target = folder / f"step-{state.step:08d}"
    private = folder / f"{TEMPORARY}{target.name}"
    if engine.rank == 0:
        discard_unfinished(folder)
        make_folder(private)
    try:
        engine.meet()
        digests = engine.save(private)
        write_file(private / f"rng-{engine.rank:05d}.json", msgspec.json.encode(random_states()))
        save_extra(private / f"task-{engine.rank:05d}.safetensors", task)
        engine.meet()
        if engine.rank == 0:
            state.world, state.engine, state.machine = engine.world, engine.name, machine(engine)
            for path in private.glob("rng-*.json"):
                digests[path.name] = sha256_file(path)
            for path in private.glob("task-*.safetensors"):
                digests[path.name] = check_tensors(path)
            state.files = dict(sorted(digests.items()))
            state.digest = digest_of(encode(state))
            write_file(private / STATE, encode(state))
    except BaseException:
        # Half of one helps nobody, and takes the room that the next attempt needs.
        if engine.rank == 0:
            shutil.rmtree(private, ignore_errors=True)
        raise
    if engine.rank == 0:
        replace(private, target)
        for old in checkpoints(run)[:-keep]:
            discard(old)
    return target


def replace(private: Path, target: Path) -> None:
    """Give a checkpoint its name; what has it, and is no checkpoint, gets another one."""
    with machine_errors("write", target):
        if is_checkpoint(target):
            discard(target)
        elif os.path.lexists(target):
            set_aside(target, "foreign")
        os.rename(private, target)
    sync_folder(target.parent)


def load_checkpoint(folder: Path, engine: Engine, seed: int, task: Task | None = None) -> State:
    """Bring engine, random states and task to where a checkpoint was, and return its state.

    Weights and moments fit any number of processes. Random states, and what the task added, fit the
    number that wrote them; for another one random states are seeded anew from the run's seed, the
    step and the rank, and what was added is left.
    """
    state = read_state(folder)
    if engine.total([state.step])[0] != state.step * engine.world:
        raise TokmillError(
            "the processes found different checkpoints",
            where=str(folder.parent),
            hint="the folder of a run must be one that all machines share",
        )
    engine.load(folder)
    if state.world == engine.world:
        path = folder / f"rng-{engine.rank:05d}.json"
        set_random_states(read_json(path, RandomStates), str(path))
        load_extra(folder / f"task-{engine.rank:05d}.safetensors", task)
    else:
        seed_for(seed, state.step, engine.rank)
    return state


def save_extra(path: Path, task: Task | None) -> None:
    """Write what a task adds to a checkpoint; no file where that is nothing."""
    extra = task.extra_state() if task else {}
    tensors = {name: value for name, value in extra.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in extra.items() if name not in tensors}
    if extra:
        write_tensors(path, tensors, {JSON: msgspec.json.encode(rest).decode()})


def load_extra(path: Path, task: Task | None) -> None:
    """Give a task what it added to a checkpoint."""
    if task is None or not path.exists():
        return
    try:
        rest = loads_json(read_metadata(path).get(JSON, "").encode(), dict[str, Any])
    except ValueError as error:
        raise damaged(path, f"what the task added cannot be read: {error}") from error
    task.load_extra_state({**read_tensors(path), **rest})


def read_state(folder: Path) -> State:
    """Return the state of a checkpoint.

    Raises `TokmillError` where it is not what was written, or says what no state says.
    """
    path = folder / STATE
    with machine_errors("read", path):
        data = path.read_bytes()
    what, state = "", State()
    try:
        state = loads_json(data, State)
        digest = digest_of(data) if state.files or state.digest else ""
    except ValueError as error:
        what, digest = f"it cannot be read: {error}", ""
    if what:
        pass
    elif state.digest != digest:
        what = f"its digest is {digest[:12]}, not {state.digest[:12]}"
    elif min(state.step, state.tokens, state.best_step, state.world - 1) < 0 or state.seconds < 0:
        what = "it holds a negative number"
    elif f"step-{state.step:08d}" != folder.name.removeprefix(TEMPORARY):
        what = f"it is the state of step {state.step}"
    if what:
        raise TokmillError(
            f"the checkpoint is damaged: {what}",
            where=str(path),
            hint="`tokmill train --resume` goes on from the newest checkpoint that is whole",
        )
    return state


def digest_of(data: bytes) -> str:
    """Return what `State.digest` must be in a file of these bytes, whatever version wrote it."""
    value = loads_json(data, dict[str, Any])
    return canonical_digest({key: one for key, one in value.items() if key != "digest"})


def seal_of(file: Path) -> str:
    """Return the seal that a file of weights must have; "": nothing says so."""
    place = file.parent
    return read_state(place).files.get(file.name, "") if is_checkpoint(place) else ""


def moves(state: State, engine: Engine) -> str:
    """Return what is not as it was when a checkpoint was written, in brackets; "" if all is."""
    now, said = machine(engine), []
    if state.machine != now:
        said.append(f"was {state.machine}, is {now}")
    if state.world != engine.world:
        said.append(f"processes: {state.world} then, {engine.world} now; dropout is drawn anew")
        if any(map(EXTRA.fullmatch, state.files)):
            said.append("what the task keeps of each process begins anew")
    elif state.engine and state.engine != engine.name:
        said.append(f"engine: {state.engine} then, {engine.name} now")
    return f" ({'; '.join(said)}: equal up to rounding)" if said else ""


def machine(engine: Engine) -> str:
    """Return what must be equal for equal bits."""
    return f"{engine.device.type}, torch {torch.__version__}"


def is_checkpoint(path: Path) -> bool:
    """Say whether a path is a checkpoint: a folder so named with a state. A link is none."""
    named = NAME.fullmatch(path.name) and path.parent.name == FOLDER
    return bool(named) and (path / STATE).is_file() and not path.is_symlink()


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder, oldest first; what else lies there is left out."""
    folder = run / FOLDER
    with machine_errors("read", folder):
        there = list(folder.iterdir()) if folder.is_dir() else []
        found = [path for path in there if is_checkpoint(path)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def strangers(run: Path) -> list[Path]:
    """Return what has the name of a checkpoint and is none; nobody but its owner removes it."""
    folder = run / FOLDER
    with machine_errors("read", folder):
        found = list(folder.iterdir()) if folder.is_dir() else []
        return sorted(p for p in found if NAME.fullmatch(p.name) and not is_checkpoint(p))


def discard(folder: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that half of one is never taken for one."""
    private = folder.with_name(f"{TEMPORARY}old-{folder.name}")
    with machine_errors("remove", folder):
        shutil.rmtree(private, ignore_errors=True)
        os.rename(folder, private)
        shutil.rmtree(private)


def set_aside(path: Path, why: str) -> Path:
    """Give something another name, under which it is no checkpoint, and return that."""
    with machine_errors("rename", path):
        number = 1
        while os.path.lexists(aside := path.with_name(f"{why}-{number}-{path.name}")):
            number += 1
        os.rename(path, aside)
    return aside


def discard_unfinished(folder: Path) -> None:
    """Remove the checkpoints that killed writers left under private names, and nothing else."""
    with machine_errors("remove", folder):
        for path in folder.glob(f"{TEMPORARY}*"):
            if PRIVATE.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
