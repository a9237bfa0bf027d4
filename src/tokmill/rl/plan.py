"""What is known of a training of a policy before it begins: its modules, and what it reads of them.

`--dry-run` prints it, and so does a training when it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.tokens import views
from tokmill.rl.policy import PolicyConfig
from tokmill.rl.task import SchedulesConfig


def facts(
    model: PolicyConfig,
    task: SchedulesConfig,
    steps: int,
    learned: Sequence[Problem],
    held_out: Sequence[Problem],
) -> dict[str, Any]:
    """Return names and numbers; shares are floats.

    Raises `UsageError` if a sequence of tokens has no room for one of the modules.
    """
    found = {
        "space": model.space,
        "modules_to_learn_from": len(learned),
        "modules_held_out": len(held_out),
        "evaluations_a_step": task.bench_count,
        "evaluations_in_all": task.bench_count * steps,
        "moves_an_update": task.ppo_batch_size,
        "operation_features": model.sizes.operation,
        "history_features": model.sizes.history,
    }
    return found | _sequence(model, [*learned, *held_out])


def _sequence(model: PolicyConfig, problems: list[Problem]) -> dict[str, Any]:
    """Return how long the sequence is that the embedding reads, and how much it keeps."""
    # The operations of the space `iree` are those that a compilation finds, which nothing here
    # waits for.
    known = problems if model.space == "loops" else []
    view = views.make(model.view, model.sizes, known)
    if isinstance(view, views.Flat):
        # Those of the operation and of its producer.
        return {"vectors_a_sequence": 2}
    if isinstance(view, views.Buckets):
        kept = view.tokenizer.coverage()
        found: dict[str, Any] = {"tokens_a_sequence": view.tokenizer.max_seq_length}
        if kept.distinct < kept.numbers:
            found["features_kept"] = kept.share
            found["features_with_ids_of_their_own"] = kept.distinct / kept.numbers
        return found
    assert isinstance(view, views.Fields)
    longest = views.longest(known)
    found = {"tokens_a_sequence": view.length}
    if known:
        found["tokens_of_the_longest"] = longest
    if longest > view.length:
        found["tokens_of_it_kept"] = view.length / longest
    return found
