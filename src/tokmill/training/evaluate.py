"""The loss of a run on any store, measured as the training loop measures it, and taken apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from tokmill.errors import TokmillError
from tokmill.store.check import ShardCheck
from tokmill.tasks.next_token import BORDER, NextToken
from tokmill.tasks.task import Task, to_tensors
from tokmill.training.breakdown import Breakdown, Groups, unigram
from tokmill.training.data import open_to_evaluate, overlay_notes
from tokmill.training.engines.device import moved, pick_device
from tokmill.training.engines.precision import Precision
from tokmill.training.engines.reduce import add
from tokmill.training.loader import micro_batches
from tokmill.training.runs.run import load_task, read_run
from tokmill.training.runs.weights import step_of, weights_at
from tokmill.training.validation import Validation, open_validation


def evaluate(
    run: Path | str,
    store: Path | str,
    *,
    at: str = "",
    rows: int = 0,
    batch: int = 0,
    device: str = "auto",
    partial: bool = False,
    by: str = "",
) -> dict[str, Any]:
    """Return the loss of a run on a store, and what follows from it.

    Args:
        run: folder of a run.
        store: folder of a store with the run's vocabulary.
        at: which weights (`weights_at`): "", "last", "best", "average" or a step.
        rows: evenly spaced rows that are taken; 0: all, every token once.
        batch: rows at a time; 0: as many as in a step of the run.
        device: cpu, cuda, or auto.
        partial: take a store whose build has not finished.
        by: a column of the store with a value a record; the loss is told for each of its values.

    Returns:
        run, store, fingerprint, step, rows, tokens (targets), and the task's metrics: loss in nats
        a token, perplexity, bits_per_byte where the store knows its bytes. Where tokens are
        predicted also columns, next_token, instructions and by (`Breakdown.report`), and notes.

    Raises:
        TokmillError: there are no such weights, or the store's ids mean something else.
        UsageError: the store has no column `by`.
    """
    run = Path(run)
    config, facts = read_run(run)
    opened = open_to_evaluate(str(store), replace(config.data, partial=partial))
    task = load_task(run, at)
    extra = [BORDER] if isinstance(task, NextToken) and BORDER in opened.token_columns else []
    validation = open_validation(
        opened, facts, task, batch=batch or config.data.batch, rows=rows, extra=extra
    )
    groups = Groups(validation.feed.sources[0], by) if by else None
    baseline, notes = {}, overlay_notes(opened, config.data)
    try:
        baseline = unigram(config, facts)
    except TokmillError as error:
        where = f" ({error.where})" if error.where else ""
        notes.append(f"without unigram losses, which the training store tells: {error.what}{where}")
    breakdown = Breakdown(baseline, groups)
    place = pick_device(device)
    watched = [opened] if config.data.verify else []
    with (
        ShardCheck(watched),
        torch.no_grad(),
        Precision(config.run.precision, place).autocast(),
    ):
        metrics, tokens = measure(
            task.to(place), validation, breakdown, config.run.micro_tokens, place
        )
    return {
        "run": str(run),
        "store": str(store),
        "fingerprint": opened.fingerprint,
        "step": step_of(weights_at(run, at).parent),
        "rows": validation.size,
        "tokens": tokens,
        **metrics,
        **breakdown.report(),
        "notes": notes,
    }


def measure(
    task: Task,
    validation: Validation,
    breakdown: Breakdown,
    micro_tokens: int,
    device: torch.device,
) -> tuple[dict[str, float], int]:
    """Return (metrics, targets) as `Validation.measure`, and add each target to the breakdown."""
    sums: dict[str, Tensor] = {}
    count = 0
    for rows in validation.numbers():
        raw = validation.feed.make(np.zeros_like(rows), rows)
        batch = task.prepare(raw)
        count += task.count(batch)
        breakdown.mark(rows, raw, batch)
        for part in micro_batches(batch, micro_tokens):
            found, scores = task.scored(moved(to_tensors(part, device), device))
            add(sums, found)
            breakdown.add(part.targets, scores)
    numbers = {name: value.item() for name, value in sums.items()}
    return task.report(numbers, count, validation.bytes_per_token), count
