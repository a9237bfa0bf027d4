"""What a training reads: the stores of a recipe, and their rows as one feed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.progress import human_count
from tokmill.feed.feed import Feed, nearest_sizes, rows_a_process
from tokmill.feed.rows import Rows
from tokmill.models.model import Inputs
from tokmill.store.checks.background_check import same_engine
from tokmill.store.mask import LOSS, check_mask_of, leaves_out
from tokmill.store.overlay import overlay_names
from tokmill.store.store import Store
from tokmill.tasks.task import Task
from tokmill.training.recipe.config import DataConfig, TrainConfig
from tokmill.training.runs.run import facts_from, inputs_of, make_task, task_type
from tokmill.training.runs.warm_start import start_facts


def open_store(path: str, config: DataConfig, overlays: Sequence[str] = ()) -> Store:
    """Open a store with some overlays; one that is not finished only where the recipe says so."""
    store = Store(path, overlays)
    if store.partial and not config.partial:
        raise TokmillError(
            "the store is not complete",
            where=path,
            hint="finish it with the same `tokmill build`, or train on what is there: --partial",
        )
    return store


def open_stores(config: DataConfig) -> list[Store]:
    """Open the stores to learn from, in the recipe's order."""
    stores = [open_store(path, config, config.overlays) for path in config.stores]
    same_engine(stores)
    return stores


def open_to_evaluate(path: str, config: DataConfig) -> Store:
    """Open a store to evaluate on, with those of the recipe's overlays that it has."""
    overlays = overlay_names(Path(path))
    return open_store(path, config, [name for name in config.overlays if name in overlays])


def overlay_notes(store: Store, config: DataConfig) -> list[str]:
    """Return notes on the overlays of a store to evaluate on, and on the tokens they leave out."""
    notes = [
        f"the store has no overlay {name!r}, with which the run has learned"
        for name in config.overlays
        if name not in store.overlays
    ]
    several = "s" if len(store.overlays) > 1 else ""
    read = f"read with the overlay{several} {', '.join(store.overlays)}" if store.overlays else ""
    left_out = ""
    if leaves_out(store):
        left_out = f"tokens whose {LOSS!r} is 0 are left out"
        if "bytes" in store.schema:
            left_out += ", so there are no bits_per_byte: the bytes of the rest are not known"
    if read or left_out:
        notes.append(": ".join(filter(None, (read, left_out))))
    return notes


def cut_notes(rows: Rows) -> list[str]:
    """Return a note on records that are longer than the rows, and so are not read whole."""
    records, tokens = (int(getattr(rows, name, 0)) for name in ("cut_records", "cut_tokens"))
    if not records:
        return []
    what = f"{human_count(tokens, 'token')} of {human_count(records, 'record')}"
    return [f"{rows.store.path}: {what} are in no row: a longer task.length reads more"]


def make_feed(
    config: TrainConfig,
    task: Task,
    stores: Sequence[Store],
    world: int = 1,
) -> Feed:
    """Return the batches of a training over `world` processes."""
    data = config.data
    return Feed(
        [task.rows(store, data.seed, data.shards) for store in stores],
        entries_a_step(data, task.length * task.entry_rows(config.task), world),
        weights=data.weights,
        seed=data.seed,
        shuffle=data.shuffle,
        columns=columns_to_read(task, stores),
        vectors=[task.vectors(config.task, store) for store in stores],
    )


def columns_to_read(task: Task, stores: Sequence[Store], more: Sequence[str] = ()) -> list[str]:
    """Return the model's columns, those that the task wants to see in any of the stores, and more.

    Raises `TokmillError` for a column `loss` that is no mask, or masks every token of a store.
    """
    extra: list[str] = []
    for store in stores:
        wanted = task.extra_columns({**task.token_store(task.config, store).schema, **store.schema})
        if LOSS in wanted:
            check_mask_of(store)
        extra += wanted
    return list(dict.fromkeys([*task.sizes, *more, *extra]))


def entries_a_step(data: DataConfig, length: int, world: int = 1) -> int:
    """Return the entries of a step over all processes, from `data.batch` or `data.batch_tokens`.

    An entry is a row, unless the task says otherwise. `length`: positions of an entry. Raises
    `UsageError` with the nearest possible sizes if `world` processes cannot get equal numbers of
    whole entries.
    """
    if not data.batch_tokens:
        rows_a_process(data.batch, world)
        return data.batch
    if data.batch_tokens % (length * world):
        each = f" for each of {world} processes" if world > 1 else ""
        raise UsageError(
            f"{data.batch_tokens} tokens a step cannot be cut into whole rows of {length} "
            f"positions{each}",
            where="data.batch_tokens",
            hint=nearest_sizes(data.batch_tokens, length * world),
        )
    return data.batch_tokens // length


def inputs_of_start(config: TrainConfig, stores: Sequence[Store]) -> Inputs:
    """Return the inputs of the model of a run before it begins, also of one with a start."""
    facts = facts_from(config, stores)
    if config.run.start:
        facts = start_facts(Path(config.run.start), facts)
    return inputs_of(config, facts)


def with_epochs(config: TrainConfig, world: int = 1) -> TrainConfig:
    """Return a recipe whose `run.steps` are at most those of its epochs (`run.epochs`).

    An epoch is as many entries as the stores have; the last step may begin another one. `world`:
    processes that share a step. Raises `UsageError` for a task that learns from no store.
    """
    if not config.run.epochs:
        return config
    if not plugins.load(plugins.LOOPS, task_type(config).loop).reads_stores:
        raise UsageError(
            f"the task {config.task.kind} learns from no store, which an epoch could be of",
            where="run.epochs",
            hint="--set run.epochs=0 --steps N",
        )
    stores = open_stores(config.data)
    with torch.device("meta"):
        task = make_task(config, inputs_of_start(config, stores))
    feed = make_feed(config, task, stores, world)
    entries = config.run.epochs * feed.rows_in_all
    steps = max(1, math.ceil(entries / feed.batch_size - 1e-9))
    run = msgspec.structs.replace(config.run, steps=min(config.run.steps, steps))
    return msgspec.structs.replace(config, run=run)
