"""Native checkpoints: a folder a checkpoint, written as a whole, and exact to the bit.

    checkpoints/step-00000100/
      model.safetensors optimizer.safetensors    what the engine saved
      rng-00000.json                             random states, one file a process
      task-00000.safetensors                     the state of a task, one file a process
      state.json                                 how far the run is, its id, digests of all files

It is written under a private name, every file is synced, and then it is renamed. Nothing is
pickled. `find_whole` finds the newest checkpoint that is not damaged.
"""

import os
import re
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import (
    TEMPORARY,
    machine_errors,
    make_folder,
    read_file,
    remove,
    sha256_file,
    sync_folder,
    write_file,
)
from tokmill.base.headers import loads_json
from tokmill.store.manifest import canonical_digest, encode, read_json
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.device import (
    RandomStates,
    random_states,
    seed_for,
    set_random_states,
)
from tokmill.training.engines.engine import Engine
from tokmill.training.engines.tensors import (
    MODEL,
    OPTIMIZER,
    check_tensors,
    damaged,
    read_metadata,
    read_tensors,
    write_tensors,
)

FOLDER, STATE = "checkpoints", "state.json"
RUN_ID = "run-id"
"""File of a run with a random id, so that a checkpoint of another run is never resumed."""
JSON = "json"
"""Key in the metadata of a task's state: everything that is not a tensor."""
NAME = re.compile(r"step-(\d{8,18})")
PRIVATE = re.compile(rf"{re.escape(TEMPORARY)}(old-)?step-\d{{8,18}}")
"""Names of checkpoints that are being written or removed."""
RANDOM = re.compile(r"rng-\d{5,9}\.json")
EXTRA = re.compile(r"task-\d{5,9}\.safetensors")


class State(msgspec.Struct, kw_only=True):
    """How far a run is; the other files of a checkpoint hold weights, moments and random states."""

    format: int = 1
    run: str = ""
    """Id of the run (`RUN_ID`)."""
    step: int = 0
    """Number of steps that are done; steps count from 0, so it is also the next step."""
    tokens: int = 0
    """Targets that were learned from."""
    seconds: float = 0.0
    """Duration of the run, summed over its resumed parts."""
    world: int = 1
    """Number of parallel processes."""
    engine: str = ""
    best_step: int = 0
    """Step with the lowest validation loss so far; 0: none."""
    best_loss: float | None = None
    machine: str = ""
    """Kind of device and version of torch; others may round differently."""
    files: dict[str, str] = {}
    """The other files → checksum (`tensors.py`) of tensors, sha256 of others."""
    digest: str = ""
    """sha256 of this object as canonical JSON, without this key."""


class OtherRun(TokmillError):
    """A checkpoint that was written by another run."""


def run_id(run: Path) -> str:
    """Return the id of a run; "": its file is lost."""
    path = run / RUN_ID
    return read_file(path).decode(errors="replace").strip() if path.is_file() else ""


def save_checkpoint(
    run: Path, engine: Engine, state: State, keep: int, task: Task | None = None
) -> Path:
    """Write the checkpoint of a state, drop all but the newest `keep`, and return its folder.

    `task`: its `extra_state` is written too. Every process calls this, and they wait for each
    other twice.
    """
    folder = make_folder(run / FOLDER)
    target = folder / f"step-{state.step:08d}"
    private = folder / f"{TEMPORARY}{target.name}"
    if engine.rank == 0:
        # Unfinished checkpoints of killed processes, and nothing else.
        with machine_errors("remove", folder):
            for path in folder.glob(f"{TEMPORARY}*"):
                if PRIVATE.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
        make_folder(private)
    try:
        engine.barrier()
        digests = engine.save(private)
        write_file(private / f"rng-{engine.rank:05d}.json", msgspec.json.encode(random_states()))
        save_extra(private / f"task-{engine.rank:05d}.safetensors", task)
        engine.barrier()
        if engine.rank == 0:
            state.world, state.engine, state.machine = engine.world, engine.name, machine(engine)
            state.run = run_id(run)
            for path in private.glob("rng-*.json"):
                digests[path.name] = sha256_file(path)
            for path in private.glob("task-*.safetensors"):
                digests[path.name] = check_tensors(path)
            state.files = dict(sorted(digests.items()))
            state.digest = digest_of(encode(state))
            write_file(private / STATE, encode(state))
    except BaseException:
        # A partial checkpoint is useless, and takes the space that the next attempt needs.
        if engine.rank == 0:
            shutil.rmtree(private, ignore_errors=True)
        raise
    if engine.rank == 0:
        replace(private, target)
        for old in checkpoints(run)[:-keep]:
            discard(old)
    return target


def replace(private: Path, target: Path) -> None:
    """Give a checkpoint its final name; a foreign file or folder of that name is renamed."""
    with machine_errors("write", target):
        if is_checkpoint(target):
            discard(target)
        elif os.path.lexists(target):
            set_aside(target, "foreign")
        os.rename(private, target)
    sync_folder(target.parent)


def load_checkpoint(folder: Path, engine: Engine, seed: int, task: Task | None = None) -> State:
    """Load a checkpoint into engine, random states and task, and return its state.

    Weights and moments fit any number of processes. Random states and the task's state fit only the
    number of processes that wrote them. With another number, random states are seeded from the
    run's seed, the step and the rank, and the task's state is not loaded.
    """
    state = read_state(folder)
    engine.load(folder)
    if state.world == engine.world:
        path = folder / f"rng-{engine.rank:05d}.json"
        set_random_states(read_json(path, RandomStates), str(path))
        load_extra(folder / f"task-{engine.rank:05d}.safetensors", task)
    else:
        seed_for(seed, state.step, engine.rank)
    return state


def save_extra(path: Path, task: Task | None) -> None:
    """Write the state of a task; no file if it is empty."""
    extra = task.extra_state() if task else {}
    tensors = {name: value for name, value in extra.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in extra.items() if name not in tensors}
    if extra:
        write_tensors(path, tensors, {JSON: msgspec.json.encode(rest).decode()})


def load_extra(path: Path, task: Task | None) -> None:
    if task is None or not path.exists():
        return
    try:
        rest = loads_json(read_metadata(path).get(JSON, "").encode(), dict[str, Any])
    except ValueError as error:
        raise damaged(path, f"the state of the task cannot be read: {error}") from error
    task.load_extra_state({**read_tensors(path), **rest})


def read_state(folder: Path) -> State:
    """Return the state of a checkpoint.

    Raises `OtherRun` if another run wrote it, else `TokmillError` if it is damaged.
    """
    path = folder / STATE
    data = read_file(path)
    what, state = "", State()
    try:
        state = loads_json(data, State)
        digest = digest_of(data)
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
        raise damaged_checkpoint(path, what)
    if state.run != run_id(folder.parent.parent):
        raise OtherRun(
            "the checkpoint was written by another run",
            where=str(folder),
            hint=f"move it back, or remove it; the id of each run is in its file {RUN_ID}",
        )
    return state


def digest_of(data: bytes) -> str:
    """Return the right `State.digest` for the bytes of a file, written by any version."""
    value = loads_json(data, dict[str, Any])
    return canonical_digest({key: one for key, one in value.items() if key != "digest"})


def checksum_of(file: Path) -> str:
    """Return the checksum that a file of weights must have; "": it is not recorded."""
    place = file.parent
    return read_state(place).files.get(file.name, "") if is_checkpoint(place) else ""


def moves(state: State, engine: Engine) -> str:
    """Return what has changed since a checkpoint was written, in brackets; "": nothing."""
    now, changes = machine(engine), []
    if state.machine != now:
        changes.append(f"was {state.machine}, is {now}")
    if state.world != engine.world:
        changes.append(f"processes: {state.world} then, {engine.world} now; dropout is drawn anew")
        if any(map(EXTRA.fullmatch, state.files)):
            changes.append("the state of the task begins anew")
    elif state.engine != engine.name:
        changes.append(f"engine: {state.engine} then, {engine.name} now")
    return f" ({'; '.join(changes)}: equal up to rounding)" if changes else ""


def machine(engine: Engine) -> str:
    """Return the kind of device and the version of torch, which decide rounding."""
    return f"{engine.device.type}, torch {torch.__version__}"


def is_checkpoint(path: Path) -> bool:
    """Say whether a path is a checkpoint: a folder with its name and a state, not a link."""
    named = NAME.fullmatch(path.name) and path.parent.name == FOLDER
    return bool(named) and (path / STATE).is_file() and not path.is_symlink()


def _entries(run: Path) -> list[Path]:
    folder = run / FOLDER
    with machine_errors("read", folder):
        return sorted(folder.iterdir()) if folder.is_dir() else []


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder, oldest first; other files are ignored."""
    return sorted(filter(is_checkpoint, _entries(run)), key=step_of_name)


def step_of_name(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def discard(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partial one is never used."""
    private = folder.with_name(f"{TEMPORARY}old-{folder.name}")
    with machine_errors("remove", folder):
        shutil.rmtree(private, ignore_errors=True)
        os.rename(folder, private)
        shutil.rmtree(private)


def set_aside(path: Path, why: str) -> Path:
    """Rename a path to a free name that is not that of a checkpoint, and return the new path."""
    with machine_errors("rename", path):
        number = 1
        while os.path.lexists(aside := path.with_name(f"{why}-{number}-{path.name}")):
            number += 1
        os.rename(path, aside)
    return aside


TENSORS = (MODEL, OPTIMIZER)
SUFFIX = ".safetensors"
"""Ending of files of tensors, whose digest is their checksum."""


def check_shared(run: Path, engine: Engine, wait: float = 5.0) -> None:
    """Raise `TokmillError` unless all processes see the folder of a run; all of them call this."""
    token = secrets.randbits(48) * (engine.rank == 0)
    path = run / f"{TEMPORARY}{token}"
    try:
        if engine.rank == 0:
            write_file(path, b"")
        path = run / f"{TEMPORARY}{int(engine.total([token])[0])}"
        until = time.monotonic() + wait
        while not path.exists() and time.monotonic() < until:  # NFS may be late.
            time.sleep(0.1)
        blind = int(engine.total([not path.exists()])[0])
    finally:
        if engine.rank == 0:
            remove(path)
    if blind:
        what = f"{blind} of {engine.world} processes do not see what process 0 writes there"
        hint = "name a folder on a file system that all machines see under the same path"
        raise TokmillError(
            f"the folder of the run is not shared: {what}", where=str(run), hint=hint
        )


def newest_whole(run: Path, engine: Engine) -> Path | None:
    """Return the newest complete checkpoint; None: the run has no checkpoint yet.

    Newer checkpoints that are damaged or of another run are renamed, and the first process prints
    this. Every process calls this function.
    """
    folder = find_whole(run) if engine.rank == 0 else None
    step = int(engine.total([0 if folder is None else 1 + step_of_name(folder)])[0])
    return run / "checkpoints" / f"step-{step - 1:08d}" if step else None


def find_whole(run: Path) -> Path | None:
    """Do what `newest_whole` does, in one process."""
    for path in _entries(run):
        if NAME.fullmatch(path.name) and not is_checkpoint(path):
            say(f"{path} is not a checkpoint, as it is not a folder with a {STATE}: left alone")
    unusable: list[tuple[Path, TokmillError]] = []
    for folder in reversed(checkpoints(run)):
        try:
            state = check_checkpoint(folder)
        except MachineError:
            raise
        except TokmillError as error:
            unusable.append((folder, error))
            continue
        for path, reason in unusable:
            aside = set_aside(path, "foreign" if isinstance(reason, OtherRun) else "damaged")
            say(f"{reason.where}: {reason.what}; the checkpoint was renamed to {aside.name}")
        if unusable:
            say(f"continues from step {state.step}, the newest complete checkpoint")
        return folder
    if unusable:
        newest = unusable[0][1]
        raise TokmillError(
            f"no checkpoint of the run can be used ({len(unusable)} found): {newest.what}",
            where=newest.where,
            hint="a new run can begin with undamaged weights: `tokmill train STORE --from "
            "RUN/best -o NEW`; without --from it begins from random weights",
        )
    return None


def check_checkpoint(folder: Path) -> State:
    """Compare all files of a checkpoint with their digests, and return its state."""
    state = read_state(folder)
    random = [name for name in state.files if RANDOM.fullmatch(name)]
    extra = [name for name in state.files if EXTRA.fullmatch(name)]
    names = {*TENSORS, *random, *extra}
    if not state.files.keys() <= names or not state.files.keys() >= {*TENSORS}:
        raise damaged_checkpoint(folder / STATE, "it names other files than those of a checkpoint")
    if len(random) != state.world:
        raise damaged_checkpoint(
            folder / STATE, f"{len(random)} random states of {state.world} processes"
        )
    if len(extra) > state.world:
        raise damaged_checkpoint(folder / STATE, f"{len(extra)} tasks of {state.world} processes")
    for name, digest in state.files.items():
        path = folder / name
        if not path.is_file():
            raise damaged_checkpoint(path, "it is missing")
        actual = check_tensors(path) if name.endswith(SUFFIX) else sha256_file(path)
        if actual != digest:
            raise damaged_checkpoint(
                path, f"its digest is {actual[:12] or 'missing'}, and {STATE} says {digest[:12]}"
            )
    return state


def damaged_checkpoint(path: Path, what: str) -> TokmillError:
    return TokmillError(
        f"the checkpoint is damaged: {what}",
        where=str(path),
        hint="an older checkpoint of the run may be whole: `tokmill train -o RUN` looks for it",
    )


def say(text: str) -> None:
    """Print a warning, in quiet runs too."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
