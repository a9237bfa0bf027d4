"""The loss of a run on any store, measured as in the training loop, with a breakdown.

A loss is shown with that of a baseline that knows only how often each id occurs (unigram).
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.progress import Progress
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows
from tokmill.models.transformers.layers import Scores
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.checks.stats import count
from tokmill.store.schema import Array
from tokmill.tasks.task import Task, perplexity, to_tensors
from tokmill.tasks.task_inputs import Facts
from tokmill.training.data import (
    cut_notes,
    micro_batches,
    open_stores,
    open_to_evaluate,
    overlay_notes,
)
from tokmill.training.engines.devices.device import Precision, moved, pick_device
from tokmill.training.engines.engine import Engine, add
from tokmill.training.loop import Validation, open_validation
from tokmill.training.recipe.config import OptimConfig, TrainConfig
from tokmill.training.runs.run import affix_notes, facts_from, load_task, read_run

GROUP = ".group"
"""Name among the targets of a batch, so that they are cut with its rows; no column has a dot."""


class Groups:
    """The values of a record column, numbered in the order in which they are read."""

    def __init__(self, rows: Rows, name: str) -> None:
        self.rows, self.store, self.name = rows, rows.store, name
        schema = self.store.schema
        names = [key for key, c in schema.items() if c.per == "record" and not c.width]
        if name not in names:
            raise UsageError(
                f"by: the store has no column {name!r} with one value per record",
                where=str(self.store.path),
                hint=nearest(name, names),
            )
        self.numbers: dict[Any, int] = {}
        self._values = None if schema[name].dtype == "utf8" else self.store.column(name)

    def of(self, rows: Array, document: Array) -> Array:
        """Return (B, T) int64: the number of the value of each token's record; 0 at padding.

        `document`: (B, T), as in the batch of these rows.
        """
        spans = self.rows.spans(rows, 0)
        records, inverse = np.unique(spans.record, return_inverse=True)
        # A number that is no number equals nothing, itself not either: all have one key.
        values = [value if value == value else math.nan for value in self._read(records)]
        numbers = [self.numbers.setdefault(value, len(self.numbers)) for value in values]
        table = np.zeros((len(rows), int(spans.document.max(initial=0)) + 1), np.int64)
        table[spans.row, spans.document] = np.asarray(numbers, np.int64)[inverse]
        return np.take_along_axis(table, document.clip(min=0).astype(np.int64), axis=1)

    def _read(self, records: Array) -> list[Any]:
        if self._values is not None:
            return self._values[records].tolist()
        shards, places, _ = self.store.places(records)
        return [
            self.store.shard(shard).strings(self.name, place, place + 1)[0]
            for shard, place in zip(shards.tolist(), places.tolist(), strict=True)
        ]


class Breakdown:
    """Sums over the predicted tokens of an evaluation.

    `unigram`: column → the baseline's loss of each id in nats; empty: there is no baseline.
    `predicted`: the name of the predicted tokens in the tables.
    """

    def __init__(
        self,
        unigram: Mapping[str, Array],
        groups: Groups | None = None,
        predicted: str = "next_token",
    ) -> None:
        self.unigram, self.groups, self.predicted = unigram, groups, predicted
        self.tokens = self.right = 0
        self.columns: dict[str, Array] = {}
        """Column → loss, loss of the baseline, right predictions, targets."""
        self.by = np.zeros((0, 3))
        """For each group: tokens, loss, loss of the baseline."""

    def mark(self, task: Task, rows: Array, batch: Batch) -> None:
        """Add the groups of tokens to a prepared batch."""
        marks = np.zeros(batch.document.shape, np.int64)
        if self.groups is not None:
            marks = self.groups.of(rows, batch.document)
        batch.targets = {**batch.targets, **task.at_targets(batch, {GROUP: marks})}

    def add(self, targets: Mapping[str, Array], scores: Mapping[str, Scores]) -> None:
        if not scores:
            return
        # A column may have no target where another one has: an unknown token.
        learned = np.any([targets[name] >= 0 for name in scores], axis=0)
        total, baseline = np.zeros((2, np.count_nonzero(learned)))
        right = np.ones(len(total), bool)
        for name, score in scores.items():
            loss = score.loss.double().cpu().numpy()[learned]
            hits = score.right.cpu().numpy()[learned]
            here = targets[name][learned]
            known, baseline_loss = here >= 0, np.zeros(len(loss))
            if self.unigram:
                baseline_loss = np.where(known, self.unigram[name][here], 0)
            sums = self.columns.setdefault(name, np.zeros(4))
            sums += loss.sum(), baseline_loss.sum(), hits.sum(), known.sum()
            total, baseline = total + loss, baseline + baseline_loss
            right &= hits | ~known
        self.tokens += len(total)
        self.right += int(np.count_nonzero(right))
        group = targets[GROUP][learned]
        size = max(len(self.by), int(group.max(initial=-1)) + 1)
        sums = np.zeros((size, 3))
        sums[: len(self.by)] = self.by
        for place, values in enumerate((np.ones(len(total)), total, baseline)):
            sums[:, place] += np.bincount(group, weights=values, minlength=size)
        self.by = sums

    def report(self) -> dict[str, Any]:
        """Return all results as means: nats per token, shares."""
        if not self.columns:
            return {}
        results: dict[str, Any] = {
            "columns": {
                name: {
                    **self._losses(sums[:2], self.tokens),
                    "perplexity": perplexity(sums[0] / max(1, self.tokens)),
                    "accuracy": float(sums[2] / max(1, sums[3])),
                }
                for name, sums in self.columns.items()
            },
            self.predicted: {
                **self._losses(self.by[:, 1:].sum(0), self.tokens),
                "accuracy": self.right / max(1, self.tokens),
            },
        }
        if self.groups is not None:
            lines = [
                {
                    "value": value,
                    "targets": int(self.by[number, 0]),
                    **self._losses(self.by[number, 1:], self.by[number, 0]),
                }
                for value, number in sorted(
                    self.groups.numbers.items(), key=lambda one: (one[0] != one[0], one[0])
                )
                if number < len(self.by) and self.by[number, 0]
            ]
            results["by"] = {"column": self.groups.name, "values": lines}
        return results

    def _losses(self, sums: Array, tokens: float) -> dict[str, float | None]:
        loss, baseline = (sums / max(1, tokens)).tolist()
        return {"loss": loss, "unigram": baseline if self.unigram else None}


def unigram(config: TrainConfig, facts: Facts) -> dict[str, Array]:
    """Return column → nats of each id (V,), from the training stores of a run.

    An id has the probability (n + 1) / (N + V): it occurs n times among N tokens, and there are V
    ids (add-one, Laplace's rule of succession). Raises `TokmillError` if a store is missing or is
    not the one of the run.
    """
    if not config.data.train:
        raise TokmillError(
            "the run was not trained on a store",
            hint="losses are reported without the baseline",
        )
    stores = open_stores(config.data)
    if facts_from(config, stores).fingerprint != facts.fingerprint:
        raise TokmillError(
            "this is not the training store of the run",
            where=str(stores[0].path),
            hint="put the old store back in its place to see the unigram losses",
        )
    tables = {name: np.ones(size) for name, size in facts.columns.items()}
    for store in stores:
        ids = count(store).ids
        for name, table in tables.items():
            if name not in ids:
                raise TokmillError(
                    f"ids of {name!r} are too large to be counted",
                    where=str(store.path),
                    hint="losses are reported without the baseline",
                )
            seen = ids[name][: len(table)]
            table[: len(seen)] += seen
    return {name: np.log(table.sum()) - np.log(table) for name, table in tables.items()}


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
    if "bytes" in opened.schema and (why := task.loses_text(opened)):
        notes.append(f"{why}, so there are no bits_per_byte")
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
    """Return (metrics and breakdown, targets); if there is no baseline, `notes` gets the reason."""
    if validation.bytes_per_token and validation.size < len(validation.feed.sources[0]):
        notes.append("bits_per_byte uses the bytes per token of the whole store, not of these rows")
    if task.predicts_tokens:
        groups = Groups(validation.feed.sources[0], by) if by else None
        baseline: dict[str, Array] = {}
        try:
            baseline = unigram(config, facts)
        except TokmillError as error:
            where = f" ({error.where})" if error.where else ""
            what = f"{error.what}{where}"
            notes.append(f"no unigram losses, which need the training store: {what}")
        breakdown = Breakdown(baseline, groups, task.predicted)
        return evaluate_token_task(config, task, validation, breakdown, device)
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


def evaluate_token_task(
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
                part_sums, scores = task.scored(moved(to_tensors(part, device), device))
                add(sums, part_sums)
                breakdown.add(part.targets, scores)
    numbers = {name: value.item() for name, value in sums.items()}
    metrics = task.report(numbers, count, validation.bytes_per_token)
    return {**metrics, **breakdown.report()}, count
