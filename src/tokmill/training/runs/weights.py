"""The weights of a run folder: at the end, the best, those of its checkpoints, those of its start.

RUN/
  model/                 model.safetensors and config.json, when the last step is done
  best/                  the same of the step with the lowest validation loss
  checkpoints/step-…/    model.safetensors, and the state to resume from

The file of weights is replaced by one rename, so after a kill it holds the old weights or the new
ones. config.json is written after it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import make_folder, write_file
from tokmill.store.manifest import encode, read_json
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import Facts
from tokmill.training.engines.tensors import (
    MODEL,
    load_weights,
    read_metadata,
    read_tensors,
    write_tensors,
)
from tokmill.training.recipe.config import LEARNED, TrainConfig
from tokmill.training.recipe.read_recipe import FACTS, differences, read_recipe, run_of
from tokmill.training.runs.checkpoint import FOLDER, checkpoints, checksum_of, discard, step_of_name

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
    load_weights(task, file, checksum_of(file))


def step_of(place: Path) -> int:
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


OF_MODEL = "model."
"""How the names of the model's weights begin, and its keys in a recipe."""
MOST_NAMES = 4
"""Tensors that are named one by one in a note."""


def start_from(task: Task, place: Path, facts: Facts, config: TrainConfig) -> list[str]:
    """Load the weights of another run into a task (`run.start`); its optimiser begins anew.

    From a run with another task, weights with equal names are used: the model, and heads that both
    tasks have. Returns notes on the other weights, and on keys of the model that no weight shows.

    Args:
        place: a run (its final weights, or its newest checkpoint), or a folder of it with weights,
            such as `RUN/checkpoints/step-00000500` or `RUN/best`.
    """
    run, weights = find_weights(place)
    check_ids(read_json(run / FACTS, Facts), facts, place)
    before = read_recipe(run)
    changed = {
        key: values
        for key, values in differences(before, config).items()
        if key.partition(".")[0] in LEARNED
    }
    of_model = {key: one for key, one in changed.items() if key.startswith(OF_MODEL)}
    # A size of 0 stands for one that follows from others; another one would not fit the weights.
    told = "; ".join(
        f"{key}: {one}"
        for key, one in of_model.items()
        if "dropout" not in key and "0" not in one.split(" → ")
    )
    notes = [f"the model differs from that of {place}, whose weights it takes: {told}"] * bool(told)
    if before["task"]["kind"] != config.task.kind:
        if (note := task.start_from(place)) is not None:
            return note
        return notes + load_matching(task, weights / MODEL, of_model, place)
    try:
        load_from(task, weights / MODEL)
    except MachineError:
        raise
    except TokmillError as error:
        if not changed:
            raise
        # Most keys of a task decide no weights.
        raise another_model(of_model or changed, place) from error
    return notes


def load_matching(task: Task, file: Path, of_model: Mapping[str, str], place: Path) -> list[str]:
    """Load the weights with equal names from another task; return notes on the others.

    of_model: the keys of the model that differ. The models must be equal, but for weights that
    only one of the tasks uses. A head of another size begins anew.
    """
    own, tensors = task.state_dict(), read_tensors(file, checksum_of(file))
    taken = {n: one for n, one in tensors.items() if n in own and own[n].shape == one.shape}
    anew, left = sorted(own.keys() - taken.keys()), sorted(tensors.keys() - taken.keys())
    unmatched = [name for name in (*anew, *left) if name.startswith(OF_MODEL)]
    reshaped = [name for name in unmatched if name in own and name in tensors]
    if (unmatched and of_model) or reshaped or not any(n.startswith(OF_MODEL) for n in taken):
        raise another_model(of_model or dict.fromkeys(reshaped, "of another shape"), place)
    task.load_state_dict(taken, strict=False)
    message = f"{len(taken)} tensors are taken from {place}"
    parts = (("these begin anew: ", anew), ("these of it are not used: ", left))
    return [f"{message}; {what}{in_words(names)}" for what, names in parts if names]


def in_words(names: Sequence[str]) -> str:
    """Return names of tensors; of many the parts that they belong to, and how many each has."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    parts: dict[str, list[str]] = {}
    for name in names:
        words = name.split(".")
        parts.setdefault(".".join(words[: 2 if name.startswith(OF_MODEL) else 1]), []).append(name)
    return ", ".join(
        f"{part} ({len(inner)} tensors)" if len(inner) > 1 else inner[0]
        for part, inner in parts.items()
    )


def another_model(changed: Mapping[str, str], place: Path) -> TokmillError:
    """Return the error for weights of another model; `changed`: what differs, and how."""
    kind = f"{OF_MODEL}kind"
    # Models of two kinds have other keys too.
    shown = {kind: changed[kind]} if kind in changed else changed
    what = "; ".join(f"{key}: {values}" for key, values in shown.items())
    return TokmillError(
        "the model is not that of the run to start from" + (f": {what}" if what else ""),
        where=str(place),
        hint="leave out the keys of the model: then the run's model is used",
    )


def start_facts(place: Path, facts: Facts) -> Facts:
    """Return the facts of a run that starts from `place`: its tables have as many rows for ids.

    A model may have more rows than its vocabulary has ids, and a store of bare ids may lack the
    largest ones.
    """
    before: Facts = read_json(find_weights(place)[0] / FACTS, Facts)
    check_ids(before, facts, place)
    if not facts.schema:
        return facts
    return msgspec.structs.replace(facts, columns=before.columns)


def find_weights(place: Path) -> tuple[Path, Path]:
    """Return (the run, its folder with weights) of a run or of a folder in it."""
    run = run_of(place)
    weights = newest_weights(place) if run == place else place
    if run is None or weights is None or not (weights / MODEL).exists():
        raise TokmillError(
            "there is no run with weights to start from",
            where=str(place),
            hint="name the folder of a run; `tokmill model import` makes one of a checkpoint",
        )
    return run, weights


def check_ids(before: Facts, now: Facts, place: Path) -> None:
    """Refuse weights whose ids have another meaning than those of the store."""
    if not now.schema:
        return  # Without a store, the task decides the meaning of ids.
    hint = "build the store with the run's vocabulary, which lies in RUN/vocab"
    if before.columns.keys() != now.columns.keys():
        raise TokmillError(
            f"the run reads the columns {', '.join(before.columns)}; "
            f"the store has {', '.join(now.columns)}",
            where=str(place),
            hint="start from a run that was trained on such a store",
        )
    for name, size in now.columns.items():
        old, new = (
            facts.vocabularies.get(facts.schema[name].vocab or "") for facts in (before, now)
        )
        if (old and old.sha256) != (new and new.sha256):
            described = [
                f"{v.size} ids, {v.sha256[:12]}" if v else "no vocabulary" for v in (old, new)
            ]
            raise TokmillError(
                f"the vocabulary of the column {name!r} differs: the run to start from has "
                f"{described[0]}; the store has {described[1]}",
                where=str(place),
                hint=hint,
            )
        if size > before.columns[name]:
            raise TokmillError(
                f"the column {name!r} holds ids up to {size - 1}; the run to start from knows 0 to "
                f"{before.columns[name] - 1}",
                where=str(place),
                hint=hint,
            )
