"""The weights of a run folder: at the end, the best, and those of its checkpoints.

RUN/
  model/                 model.safetensors and config.json, when the last step is done
  best/                  the same of the step with the lowest validation loss
  checkpoints/step-…/    model.safetensors, and the state to resume from

The file of weights is replaced by one rename, so after a kill it holds the old weights or the new
ones. config.json is written after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.base.files import make_folder, write_file
from tokmill.store.manifest import encode
from tokmill.tasks.task import Task
from tokmill.training.engines.tensors import MODEL, load_weights, read_metadata, write_tensors
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.checkpoint import FOLDER, checkpoints, discard, seal_of, step_of_name

FINAL, BEST, CONFIG = "model", "best", "config.json"


def save_weights(
    folder: Path,
    task: Task,
    config: TrainConfig,
    step: int,
    loss: float | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the weights of a step into a folder, with a description.

    `loss`: the validation loss of the best weights. `weights`: all weights, if the task does not
    hold them itself.
    """
    facts = {"step": step} if loss is None else {"step": step, "loss": loss}
    write_tensors(
        make_folder(folder) / MODEL,
        task.state_dict() if weights is None else weights,
        {name: repr(value) for name, value in facts.items()},
    )
    model = {"model": config.model, "task": config.task, "columns": task.sizes}
    write_file(folder / CONFIG, encode(facts | model))


def drop_final(run: Path) -> None:
    """Remove the final weights of a run that continues; its newest checkpoint holds the same."""
    if (run / FINAL).exists():
        discard(run / FINAL)


def newest_weights(run: Path) -> Path | None:
    """Return the folder of a run's final weights, or its newest checkpoint; None: there is none."""
    places = [run / FINAL, *reversed(checkpoints(run))]
    return next((place for place in places if (place / MODEL).exists()), None)


def weights_at(run: Path, at: str = "") -> Path:
    """Return the file with the weights of a run at a point of its training.

    Args:
        run: folder of a run.
        at: "" or "last": the final weights, else those of the newest checkpoint; "best": those
            with the lowest validation loss; a number: those of this step.

    Raises:
        TokmillError: there are no such weights; the hint lists those that there are.
    """
    places = [run / BEST, *checkpoints(run), run / FINAL]
    folders = sorted((place for place in places if (place / MODEL).exists()), key=step_of)
    named = {str(step_of(place)): place / MODEL for place in folders}
    newest = newest_weights(run)
    if run / BEST in folders:
        named["best"] = run / BEST / MODEL
    if newest is not None:
        named |= {"": newest / MODEL, "last": newest / MODEL}
    at = str(at)
    if at in named:
        return named[at]
    if not at or not named:
        what, hint = "the run has no weights yet", "wait for its first checkpoint"
    else:
        what = f"the run has no weights {'of step ' if at.isdecimal() else 'called '}{at}"
        hint = f"there are: {', '.join(filter(None, named))}"
    raise TokmillError(what, where=str(run), hint=hint)


def load_from(task: Task, file: Path) -> None:
    """Read a file of weights into a task; in a checkpoint it must have the recorded digest."""
    load_weights(task, file, seal_of(file))


def step_of(place: Path) -> int:
    """Return the step after which the weights of a folder were taken."""
    if place.parent.name == FOLDER:
        return step_of_name(place)
    text = read_metadata(place / MODEL).get("step", "")
    if not re.fullmatch(r"\d{1,18}", text):
        raise TokmillError(
            "the weights do not say of which step they are"
            + (f", but {text[:40]!r}" if text else ""),
            where=str(place / MODEL),
            hint="tokmill has not written this file: `tokmill model import` makes a run from the "
            "weights of other programs",
        )
    return int(text)
