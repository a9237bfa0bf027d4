"""The newest checkpoint of a run that is what was written: what a resume goes on from."""

from __future__ import annotations

import sys
from pathlib import Path

from tokmill.errors import MachineError, TokmillError
from tokmill.files import sha256_file
from tokmill.store.manifest import read_json
from tokmill.training.engines.average import AVERAGE
from tokmill.training.engines.engine import Engine
from tokmill.training.engines.precision import SCALE
from tokmill.training.engines.rng import RandomStates
from tokmill.training.engines.saving import MODEL, OPTIMIZER
from tokmill.training.engines.tensors import check_tensors
from tokmill.training.runs.checkpoint import (
    EXTRA,
    RANDOM,
    STATE,
    State,
    checkpoints,
    read_state,
    set_aside,
    strangers,
)

TENSORS = (MODEL, OPTIMIZER)
SEALED = ".safetensors"
"""How files of tensors end: their seals are their digests."""


def newest_whole(run: Path, engine: Engine) -> Path | None:
    """Return the newest checkpoint that is whole; None: the run has none yet.

    The first process looks, and says what it leaves out; damaged ones that are newer are given
    another name. Every process calls this.

    Raises `TokmillError` where checkpoints are there and none is whole.
    """
    found = find_whole(run) if engine.rank == 0 else None
    step = int(engine.total([0 if found is None else 1 + step_of_name(found)])[0])
    return run / "checkpoints" / f"step-{step - 1:08d}" if step else None


def find_whole(run: Path) -> Path | None:
    """Do what `newest_whole` does, in one process."""
    for path in strangers(run):
        say(f"{path} is no checkpoint, as it is no folder with a {STATE}: left alone")
    damaged: list[tuple[Path, TokmillError]] = []
    for folder in reversed(checkpoints(run)):
        try:
            state = check_checkpoint(folder)
        except MachineError:
            raise
        except TokmillError as error:
            damaged.append((folder, error))
            continue
        for path, found in damaged:
            aside = set_aside(path, "damaged")
            say(f"{found.where}: {found.what}; the checkpoint is called {aside.name} now")
        if damaged:
            say(f"goes on from step {state.step}, the newest checkpoint that is whole")
        if not state.files:
            say(f"{folder} is of an older version and holds no digests: damage would go unseen")
        return folder
    if damaged:
        newest = damaged[0][1]
        raise TokmillError(
            f"no checkpoint of the run is whole, and {len(damaged)} "
            f"{'is' if len(damaged) == 1 else 'are'} damaged: {newest.what}",
            where=newest.where,
            hint="a new run may begin with weights that are whole: `tokmill train STORE --from "
            "RUN/best -o NEW`; without --from it begins anew",
        )
    return None


def check_checkpoint(folder: Path) -> State:
    """Compare all files of a checkpoint with their digests, and return its state.

    Of one without digests what can be seen is looked at: that files are there and can be read.
    Raises `TokmillError` that names the first file that is not what was written.
    """
    state = read_state(folder)
    if state.files:
        random = [name for name in state.files if RANDOM.fullmatch(name)]
        extra = [name for name in state.files if EXTRA.fullmatch(name)]
        known = {*TENSORS, AVERAGE, SCALE, *random, *extra}
        if not state.files.keys() <= known or not state.files.keys() >= {*TENSORS}:
            raise damaged(folder / STATE, "it names other files than those of a checkpoint")
        if len(random) != state.world:
            raise damaged(folder / STATE, f"{len(random)} random states of {state.world} processes")
        if len(extra) > state.world:
            raise damaged(folder / STATE, f"{len(extra)} tasks of {state.world} processes")
    for name, digest in (state.files or dict.fromkeys(TENSORS, "")).items():
        path = folder / name
        if not path.is_file():
            raise damaged(path, "it is missing")
        found = check_tensors(path) if name.endswith(SEALED) else sha256_file(path)
        if digest and found != digest:
            raise damaged(
                path, f"its digest is {found[:12] or 'missing'}, and {STATE} says {digest[:12]}"
            )
    if not state.files and state.world < 10**5:
        for rank in range(state.world):
            path = folder / f"rng-{rank:05d}.json"
            if not path.is_file():
                raise damaged(path, "it is missing")
            read_json(path, RandomStates)
    return state


def damaged(path: Path, what: str) -> TokmillError:
    """Return the error for a file of a checkpoint."""
    return TokmillError(
        f"the checkpoint is damaged: {what}",
        where=str(path),
        hint="an older checkpoint of the run may be whole: `tokmill train --resume` looks for it",
    )


def step_of_name(folder: Path) -> int:
    """Return the step that a checkpoint's folder is called by."""
    return int(folder.name.partition("-")[2])


def say(text: str) -> None:
    """Print a warning, in quiet runs too."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
