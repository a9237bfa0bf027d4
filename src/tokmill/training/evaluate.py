"""The loss of a run on any store, measured as in the training loop, with a breakdown."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.progress import Progress
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.schema import Array
from tokmill.tasks.task import Task, to_tensors
from tokmill.tasks.task_inputs import Facts
from tokmill.training.breakdown import Breakdown, Groups, unigram
from tokmill.training.data import cut_notes, micro_batches, open_to_evaluate, overlay_notes
from tokmill.training.engines.devices.device import Precision, moved, pick_device
from tokmill.training.engines.engine import Engine, add
from tokmill.training.recipe.config import OptimConfig, TrainConfig
from tokmill.training.runs.run import affix_notes, load_task, read_run
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
    quiet: bool = True,
) -> dict[str, Any]:
    """Return the loss of a run on a store, and what follows from it.

    Args:
        run: folder of a run.
        store: folder of a store with the run's vocabulary.
        at: which weights (`weights_at`): "", "last", "best" or a step.
        rows: evenly spaced rows that are taken; 0: all, every token once.
        batch: rows at a time; 0: as many as in a step of the run.
        device: cpu, cuda, or auto.
        partial: take a store whose build has not finished.
        by: a column of the store with a value per record; the loss of each value is reported.
        quiet: show no progress.

    Returns:
        run, store, fingerprint, step, rows, their tokens, targets (what is predicted), the task's
        metrics, where tokens are predicted the results of `Breakdown.report`, and notes.

    Raises:
        TokmillError: there are no such weights, or the store's ids mean something else.
        UsageError: the store has no column `by`, or `rows` is negative.
    """
    run = Path(run)
    if rows < 0:
        raise UsageError(f"rows is a whole number from 0, not {rows}", hint="0 takes all")
    config, facts = read_run(run)
    opened = open_to_evaluate(str(store), replace(config.data, partial=partial))
    task = load_task(run, at)
    batch = batch or config.data.batch
    validation = open_validation(opened, facts, task, batch=batch, rows=rows)
    notes = overlay_notes(opened, config.data) + cut_notes(validation.feed.sources[0])
    if not task.frame:
        notes += affix_notes(facts, task.token_store(task.config, opened))
    watched = [opened] if config.data.verify else []
    bar = Progress("eval", validation.size, unit="rows", quiet=quiet)
    validation = dataclasses.replace(validation, bar=bar)
    with bar, ShardCheck(watched):
        results, targets = measured(config, task, facts, validation, by, notes, pick_device(device))
    if not math.isfinite(results["loss"]):
        raise TokmillError(
            f"the loss is {results['loss']}: the training diverged, or weights are damaged",
            where=str(run),
            hint="measure other weights, with --at best or --at STEP",
        )
    about = {"run": str(run), "store": str(store), "fingerprint": opened.fingerprint}
    counts = {"rows": validation.size, "tokens": validation.tokens, "targets": targets}
    return {**about, "step": task.step, **counts, **results, "notes": notes}


def measured(
    config: TrainConfig,
    task: Task,
    facts: Facts,
    validation: Validation,
    by: str,
    notes: list[str],
    device: torch.device,
) -> tuple[dict[str, Any], int]:
    """Return (metrics and breakdown, targets); raises `UsageError` for `by` without tokens."""
    if task.predicts_tokens:
        breakdown = breakdown_of(config, task, facts, validation, by, notes)
        return taken_apart(config, task, validation, breakdown, device)
    if by:
        raise UsageError(
            f"the task {config.task.kind} predicts no tokens, so it has no breakdown by column",
            where="--by",
            hint="leave it out",
        )
    # Measured as in the training loop.
    engine = Engine(replace(config.run, device=str(device)))
    engine.prepare(task, OptimConfig())
    return validation.measure(task, engine, config.run.micro_tokens, tables=True)


def breakdown_of(
    config: TrainConfig,
    task: Task,
    facts: Facts,
    validation: Validation,
    by: str,
    notes: list[str],
) -> Breakdown:
    """Return the breakdown of an evaluation; if it has no baseline, `notes` gets the reason."""
    groups = Groups(validation.feed.sources[0], by) if by else None
    baseline: dict[str, Array] = {}
    try:
        baseline = unigram(config, facts)
    except TokmillError as error:
        where = f" ({error.where})" if error.where else ""
        notes.append(f"no unigram losses, which need the training store: {error.what}{where}")
    return Breakdown(baseline, groups, task.predicted)


def taken_apart(
    config: TrainConfig,
    task: Task,
    validation: Validation,
    breakdown: Breakdown,
    device: torch.device,
) -> tuple[dict[str, Any], int]:
    """Return (metrics and breakdown, targets) of a task that predicts tokens."""
    sums: dict[str, Tensor] = {}
    count = 0
    task.to(device)
    with torch.no_grad(), Precision(config.run.precision, device).autocast():
        for rows in validation.numbers():
            batch = task.prepare(validation.feed.make(np.zeros_like(rows), rows))
            count += task.count(batch)
            breakdown.mark(task, rows, batch)
            for part in micro_batches(batch, config.run.micro_tokens):
                found, scores = task.scored(moved(to_tensors(part, device), device))
                add(sums, found)
                breakdown.add(part.targets, scores)
    numbers = {name: value.item() for name, value in sums.items()}
    metrics = task.report(numbers, count, validation.bytes_per_token)
    return {**metrics, **breakdown.report()}, count
