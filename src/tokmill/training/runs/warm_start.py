"""The first weights of a run from another run; its optimiser begins anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from tokmill.base.errors import MachineError, TokmillError
from tokmill.store.manifest import read_json
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import Facts
from tokmill.training.engines.tensors import MODEL, read_tensors
from tokmill.training.recipe.config import LEARNED, TrainConfig
from tokmill.training.recipe.read_recipe import differences, read_recipe, run_of
from tokmill.training.runs.checkpoint import seal_of
from tokmill.training.runs.run import FACTS
from tokmill.training.runs.weights import load_from, newest_weights

OF_MODEL = "model."
"""How the names of the model's weights begin, and its keys in a recipe."""
MOST_NAMES = 4
"""Tensors that are named one by one in a note."""


def start_from(task: Task, place: Path, facts: Facts, config: TrainConfig) -> list[str]:
    """Load the weights of another run into a task (`run.start`); its optimiser begins anew.

    From a run with another task, weights with equal names are used: the model, and heads that both
    tasks have. Returns notes on the other weights.

    Args:
        task: of the new run, made with the columns of `start_facts`.
        place: a run (its final weights, or its newest checkpoint), or a folder of it with weights,
            such as `RUN/checkpoints/step-00000500` or `RUN/best`.
        facts: of the new run.
        config: of the new run.

    Raises:
        TokmillError: there are no weights, or ids have another meaning, or the model differs.
    """
    run, weights = find_weights(place)
    check_ids(read_json(run / FACTS, Facts), facts, place)
    before = read_recipe(run)
    changed = {
        key: values
        for key, values in differences(before, config).items()
        if key.partition(".")[0] in LEARNED
    }
    if before["task"]["kind"] != config.task.kind:
        if (note := task.start_from(place)) is not None:
            return note
        return take_what_fits(task, weights / MODEL, changed, place)
    try:
        load_from(task, weights / MODEL)
    except MachineError:
        raise
    except TokmillError as error:
        if not changed:
            raise
        # Most keys of a task decide no weights.
        of_model = {key: one for key, one in changed.items() if key.startswith(OF_MODEL)}
        raise another_model(of_model or changed, place) from error
    return []


def take_what_fits(task: Task, file: Path, changed: Mapping[str, str], place: Path) -> list[str]:
    """Load the weights with equal names from another task; return notes on the others.

    changed: the keys of model and task that differ. The models must be equal, but for weights that
    only one of the tasks uses. A head of another size begins anew.
    """
    own, tensors = task.state_dict(), read_tensors(file, seal_of(file))
    taken = {name: one for name, one in tensors.items() if fits(one, own.get(name))}
    anew, left = sorted(own.keys() - taken.keys()), sorted(tensors.keys() - taken.keys())
    of_model = {key: one for key, one in changed.items() if key.startswith(OF_MODEL)}
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


def fits(tensor: Tensor, own: Tensor | None) -> bool:
    """Say whether a tensor has the shape of the task's own."""
    return own is not None and own.shape == tensor.shape


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

    Raises `TokmillError` if ids have another meaning there.
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
