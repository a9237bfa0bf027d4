"""Native checkpoints: a folder a checkpoint, whole or not there, and exact to the bit.

    checkpoints/step-00000100/
      model.safetensors optimizer.safetensors    what the engine saved
      rng-00000.json                             random states, one file a process
      state.json                                 how far the run is

It is written under a private name, every file is synced, and the rename is the commit. Nothing is
pickled.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import msgspec
import torch

from tokmill.errors import TokmillError
from tokmill.files import TEMPORARY, machine_errors, make_folder, sync_folder, write_file
from tokmill.store.manifest import encode, read_json
from tokmill.train.engine import Engine
from tokmill.train.rng import random_states, seed_for, set_random_states

FOLDER, STATE = "checkpoints", "state.json"
NAME = re.compile(r"step-(\d{8,})")


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


def save_checkpoint(run: Path, engine: Engine, state: State, keep: int) -> Path:
    """Write the checkpoint of a state, drop all but the newest `keep`, and return its folder.

    Every process calls this; they meet twice.
    """
    folder = make_folder(run / FOLDER)
    target = folder / f"step-{state.step:08d}"
    private = folder / f"{TEMPORARY}{target.name}"
    if engine.rank == 0:
        discard_unfinished(folder)
        make_folder(private)
    engine.meet()
    engine.save(private)
    write_file(private / f"rng-{engine.rank:05d}.json", msgspec.json.encode(random_states()))
    engine.meet()
    if engine.rank == 0:
        state.world, state.engine, state.machine = engine.world, engine.name, machine(engine)
        write_file(private / STATE, encode(state))
        with machine_errors("write", target):
            if target.exists():
                discard(target)
            os.rename(private, target)
        sync_folder(folder)
        for old in checkpoints(run)[:-keep]:
            discard(old)
    return target


def load_checkpoint(folder: Path, engine: Engine, seed: int) -> State:
    """Bring engine and random states to where a checkpoint was, and return its state.

    Weights and moments fit any number of processes. Random states fit the number that wrote them;
    for another one they are seeded anew from the run's seed, the step and the rank.
    """
    state: State = read_json(folder / STATE, State)
    if engine.total([state.step])[0] != state.step * engine.world:
        raise TokmillError(
            "the processes found different checkpoints",
            where=str(folder.parent),
            hint="the folder of a run must be one that all machines share",
        )
    engine.load(folder)
    if state.world == engine.world:
        set_random_states(read_json(folder / f"rng-{engine.rank:05d}.json", dict))
    else:
        seed_for(seed, state.step, engine.rank)
    return state


def moves(state: State, engine: Engine) -> str:
    """Return what is not as it was when a checkpoint was written, in brackets; "" if all is."""
    now, said = machine(engine), []
    if state.machine != now:
        said.append(f"was {state.machine}, is {now}")
    if state.world != engine.world:
        said.append(f"processes: {state.world} then, {engine.world} now; dropout is drawn anew")
    elif state.engine and state.engine != engine.name:
        said.append(f"engine: {state.engine} then, {engine.name} now")
    return f" ({'; '.join(said)}: equal up to rounding)" if said else ""


def machine(engine: Engine) -> str:
    """Return what must be equal for equal bits."""
    return f"{engine.device.type}, torch {torch.__version__}"


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder, oldest first."""
    folder = run / FOLDER
    found = (
        [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    )
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def discard(folder: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that half of one is never taken for one."""
    private = folder.with_name(f"{TEMPORARY}old-{folder.name}")
    with machine_errors("remove", folder):
        shutil.rmtree(private, ignore_errors=True)
        os.rename(folder, private)
        shutil.rmtree(private)


def discard_unfinished(folder: Path) -> None:
    """Remove the checkpoints that killed writers left under private names."""
    with machine_errors("remove", folder):
        for path in folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path)
