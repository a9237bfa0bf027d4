"""The newest checkpoint of a run that is not damaged, from which a resume continues."""

from __future__ import annotations

import sys
from pathlib import Path

from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import sha256_file
from tokmill.training.engines.engine import Engine
from tokmill.training.engines.saving import MODEL, OPTIMIZER
from tokmill.training.engines.tensors import check_tensors
from tokmill.training.runs.checkpoint import (
    EXTRA,
    RANDOM,
    STATE,
    OtherRun,
    State,
    checkpoints,
    read_state,
    set_aside,
    step_of_name,
    strangers,
)

TENSORS = (MODEL, OPTIMIZER)
SEALED = ".safetensors"
"""Suffix of files of tensors, whose digest is their seal."""


def newest_whole(run: Path, engine: Engine) -> Path | None:
    """Return the newest checkpoint that is whole; None: the run has no checkpoint yet.

    Newer checkpoints that are damaged or of another run are renamed, and the first process prints
    this. Every process calls this function.

    Raises `TokmillError` if there are checkpoints and none is whole.
    """
    found = find_whole(run) if engine.rank == 0 else None
    step = int(engine.total([0 if found is None else 1 + step_of_name(found)])[0])
    return run / "checkpoints" / f"step-{step - 1:08d}" if step else None


def find_whole(run: Path) -> Path | None:
    """Do what `newest_whole` does, in one process."""
    for path in strangers(run):
        say(f"{path} is no checkpoint, as it is no folder with a {STATE}: left alone")
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
            say(f"{reason.where}: {reason.what}; the checkpoint is called {aside.name} now")
        if unusable:
            say(f"continues from step {state.step}, the newest checkpoint that is whole")
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
    """Compare all files of a checkpoint with their digests, and return its state.

    Raises `TokmillError` with the first damaged file.
    """
    state = read_state(folder)
    random = [name for name in state.files if RANDOM.fullmatch(name)]
    extra = [name for name in state.files if EXTRA.fullmatch(name)]
    known = {*TENSORS, *random, *extra}
    if not state.files.keys() <= known or not state.files.keys() >= {*TENSORS}:
        raise damaged(folder / STATE, "it names other files than those of a checkpoint")
    if len(random) != state.world:
        raise damaged(folder / STATE, f"{len(random)} random states of {state.world} processes")
    if len(extra) > state.world:
        raise damaged(folder / STATE, f"{len(extra)} tasks of {state.world} processes")
    for name, digest in state.files.items():
        path = folder / name
        if not path.is_file():
            raise damaged(path, "it is missing")
        found = check_tensors(path) if name.endswith(SEALED) else sha256_file(path)
        if found != digest:
            raise damaged(
                path, f"its digest is {found[:12] or 'missing'}, and {STATE} says {digest[:12]}"
            )
    return state


def damaged(path: Path, what: str) -> TokmillError:
    return TokmillError(
        f"the checkpoint is damaged: {what}",
        where=str(path),
        hint="an older checkpoint of the run may be whole: `tokmill train --resume` looks for it",
    )


def say(text: str) -> None:
    """Print a warning, in quiet runs too."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
