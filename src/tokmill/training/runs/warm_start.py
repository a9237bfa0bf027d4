"""The first weights of a run from another run; its optimiser begins anew."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokmill.errors import MachineError, TokmillError
from tokmill.store.manifest import read_json
from tokmill.tasks.inputs import Facts
from tokmill.tasks.task import Task
from tokmill.training.engines.saving import MODEL
from tokmill.training.recipe.changes import differences
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.kinds import LEARNED
from tokmill.training.recipe.read import read_recipe, run_of
from tokmill.training.runs.run import FACTS
from tokmill.training.runs.weights import load_from, newest_weights


def start_from(task: Task, place: Path, facts: Facts, config: TrainConfig) -> None:
    """Give a task the weights that a run has reached (`run.start`); its optimiser begins anew.

    Args:
        task: of the new run, made with the columns of `start_facts`.
        place: a run (its final weights, or its newest checkpoint), or a folder of it with weights,
            such as `RUN/checkpoints/step-00000500` or `RUN/best`.
        facts: of the new run.
        config: of the new run.

    Raises:
        TokmillError: there are no weights, ids mean something else there, or the model is another.
    """
    run, weights = find_weights(place)
    check_ids(read_json(run / FACTS, Facts), facts, place)
    try:
        load_from(task, weights / MODEL)
    except MachineError:
        raise
    except TokmillError as error:
        changed = {
            key: values
            for key, values in differences(read_recipe(run), config).items()
            if key.partition(".")[0] in LEARNED
        }
        if not changed:
            raise
        raise TokmillError(
            "the model is not that of the run to start from: "
            + "; ".join(f"{key}: {values}" for key, values in changed.items()),
            where=str(place),
            hint="leave out what decides the shapes: its model is taken then",
        ) from error


def start_facts(place: Path, facts: Facts) -> Facts:
    """Return the facts of a run that starts from `place`: with as many rows for ids as there.

    A model may have more rows than its vocabulary has ids, and a store of bare ids may lack the
    largest ones.

    Raises `TokmillError` where ids mean something else there.
    """
    before: Facts = read_json(find_weights(place)[0] / FACTS, Facts)
    check_ids(before, facts, place)
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
    """Refuse to go on with weights whose ids mean something else than those of the store."""
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
            said = [f"{v.size} ids, {v.sha256[:12]}" if v else "no vocabulary" for v in (old, new)]
            raise TokmillError(
                f"the vocabulary of the column {name!r} differs: the run to start from has "
                f"{said[0]}; the store has {said[1]}",
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
