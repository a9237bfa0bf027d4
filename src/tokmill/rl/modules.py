"""The modules that a recipe names, to learn from and held out, and what a policy reads of them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokmill.base.errors import UsageError
from tokmill.mlir.modules import problem
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.tokens import views
from tokmill.mlir.tokens.features import Sizes
from tokmill.rl.policy import PolicyConfig
from tokmill.rl.schedule_task import SchedulesConfig
from tokmill.training.recipe.config import TrainConfig

SMALL = "`model.loops`, `model.accesses` and `model.dimensions` say how much room there is"


def to_learn(config: SchedulesConfig, sizes: Sizes) -> list[Problem]:
    """Return the modules that are learned from; raises `UsageError` if there are none."""
    problems = named(config.modules, config.benchmarks_folder_path, sizes)
    if not problems:
        raise UsageError(
            "the recipe names no module to learn from",
            where="task.modules",
            hint="--set task.benchmarks_folder_path=FOLDER, or task.modules in a recipe",
        )
    return problems


def held_out(
    config: SchedulesConfig, sizes: Sizes, learned: Sequence[Problem] = ()
) -> list[Problem]:
    """Return the modules that are only measured; none of those that are `learned` from."""
    problems = named(config.held_out, config.held_out_folder_path, sizes)
    texts = {one.text for one in learned}
    for one in problems:
        if one.text in texts:
            raise UsageError(
                f"{one.name} is held out, but also a training module",
                where="task.held_out",
                hint="name it once",
            )
    return problems


def named(lines: Sequence[str], folder: str, sizes: Sizes) -> list[Problem]:
    """Return modules by their sizes and those of a folder; all have to fit into `sizes`.

    What a folder has besides is said on stderr.
    """
    problems = [problem.of_line(line) for line in lines]
    if folder:
        inside = problem.of_folder(Path(folder))
        for line in inside.notes(folder):
            print(f"note: {line}", file=sys.stderr)
        problems += inside.problems
    for one in problems:
        check_fits(one, sizes)
    return problems


def check_fits(one: Problem, sizes: Sizes) -> None:
    """Raise `UsageError` for a module with an operation that a policy has no room for."""
    for operation in one.operations:
        if missing := sizes.fits(operation):
            raise UsageError(
                f"{operation.tag} ({operation.name}) has {missing}", where=one.name, hint=SMALL
            )


def modules_of(config: TrainConfig) -> tuple[list[Problem], list[Problem]]:
    """Return the modules of a recipe to learn from, and those held out."""
    learned = to_learn(config.task, config.model.sizes)
    return learned, held_out(config.task, config.model.sizes, learned)


def facts(
    config: TrainConfig, learned: Sequence[Problem], held_out: Sequence[Problem]
) -> dict[str, Any]:
    """Return what is known of a training before it begins: names and numbers; shares are floats."""
    model, task = config.model, config.task
    result = {
        "modules_to_learn_from": len(learned),
        "modules_held_out": len(held_out),
        "evaluations_a_step": task.bench_count,
        "evaluations_in_all": task.bench_count * config.run.steps,
        "moves_an_update": task.ppo_batch_size,
        "operation_features": model.sizes.operation,
        "history_features": model.sizes.history,
    }
    return result | _sequence(model, [*learned, *held_out])


def _sequence(model: PolicyConfig, problems: list[Problem]) -> dict[str, Any]:
    """Return how long the sequence is that the embedding reads, and how much it keeps."""
    view = views.make(model.view, model.sizes, problems)
    if isinstance(view, views.Flat):
        # Those of the operation and of its producer.
        return {"vectors_a_sequence": 2}
    if isinstance(view, views.Buckets):
        kept = view.tokenizer.coverage()
        result: dict[str, Any] = {"tokens_a_sequence": view.tokenizer.max_seq_length}
        if kept.distinct < kept.numbers:
            result["features_kept"] = kept.share
            result["features_with_ids_of_their_own"] = kept.distinct / kept.numbers
        return result
    assert isinstance(view, views.Fields)
    longest = views.longest(problems)
    result = {"tokens_a_sequence": view.length, "tokens_of_the_longest": longest}
    if longest > view.length:
        result["tokens_of_it_kept"] = view.length / longest
    return result
