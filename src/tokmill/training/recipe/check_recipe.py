"""Checks of a recipe: types, numbers, and settings that do not go together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import UsageError, check_name
from tokmill.builds.execution.resources import parse_seconds
from tokmill.training.recipe.config import (
    DEFAULT_KINDS,
    LEARNED,
    OptimConfig,
    TrainConfig,
    check_kind,
    config_type,
    kinds_of,
)
from tokmill.training.recipe.deepspeed_config import check_table, stage_of

LARGEST = {"layers": 1_000, "dim": 1 << 18, "heads": 1 << 14, "hidden": 1 << 22,
           "context": 1 << 24, "length": 1 << 24}  # fmt: skip
"""Keys of models and tasks → their maximum, far above what anybody has trained."""
LARGEST_NUMBER = 1 << 31
"""The maximum of other whole numbers, and of sizes of what is in memory at a time."""

MOST_STEPS = 10**15
"""The most steps; a recipe of epochs alone has so many until its stores are open."""
SEEDS = (-(1 << 63), (1 << 63) - 1)
"""The least and the most that a seed may be: what fits into eight bytes."""


def check_plain(value: Mapping[str, Any], where: str = "") -> TrainConfig:
    """Check everything that needs no torch: all but the keys of the model, task and optimiser."""
    optim, kind = value.get("optim"), kinds_of(value)["optim"]
    check_kind("optim", kind, where)
    if isinstance(optim, Mapping) and kind != DEFAULT_KINDS["optim"]:
        known = {key: optim[key] for key in optim if key in OptimConfig.__struct_fields__}
        value = {**value, "optim": known}
    config = recipe.convert(TrainConfig, value, where)
    check(config, where)
    return config


def check_given(config: TrainConfig, where: str = "") -> None:
    """Refuse a recipe that names no store to learn from."""
    if not any(config.data.stores):
        raise UsageError(
            "the recipe names no store to learn from",
            where=where,
            hint="give one: --data STORE, or --set data.train=STORE",
        )


def check_stores(config: TrainConfig, where: str = "") -> None:
    """Refuse a recipe without a store if its task reads stores, and one with a store if not."""
    task = plugins.load(plugins.TASKS, config.task.kind)
    if plugins.load(plugins.LOOPS, task.loop).reads_stores:
        check_given(config, where)
    elif any(config.data.stores) or config.data.val:
        raise UsageError(
            f"the task {config.task.kind} learns from no store, and the recipe names one",
            where=where,
            hint="leave data.train and data.val out",
        )


def from_dict(value: Mapping[str, Any], where: str = "") -> TrainConfig:
    """Turn a recipe as nested dicts into a checked `TrainConfig`."""
    check_plain(value, where)
    config = recipe.convert(config_type(**kinds_of(value)), value, where)
    for section in LEARNED:
        check_sizes(section, getattr(config, section), where)
    check_optimizer(config, where)
    return config


def check_optimizer(config: TrainConfig, where: str = "") -> None:
    """Refuse impossible values of an optimiser's own keys, and an engine that it cannot use."""
    optimizer = plugins.load(plugins.OPTIMIZERS, config.optim.kind)
    optimizer.check(config.optim, where)
    if config.run.engine != "deepspeed" or optimizer.splits:
        return
    if stage := stage_of(config.engine.deepspeed):
        raise UsageError(
            f"the optimiser {config.optim.kind} needs whole weights, and stage {stage} of "
            "DeepSpeed keeps parts of them",
            where=where or "optim.kind",
            hint="--engine ddp, or --set engine.deepspeed.zero_optimization.stage=0",
        )


def check_sizes(section: str, table: Any, where: str = "") -> None:
    """Refuse sizes of a model or a task that fit into no machine."""
    for field in msgspec.structs.fields(table):
        value, most = getattr(table, field.name), LARGEST.get(field.name, LARGEST_NUMBER)
        if isinstance(value, int) and value > most:
            raise UsageError(
                f"{section}.{field.name}: {value} is above {most}",
                where=where,
                hint=f"--set {section}.{field.name}={most} is the most",
            )


def limits_of(config: TrainConfig) -> dict[str, tuple[float, float, float]]:
    """Return key → its value, the least and the most that it may be."""
    data, optim, run = config.data, config.optim, config.run
    return {
        "run.steps": (run.steps, 1, MOST_STEPS),
        "run.epochs": (run.epochs, 0, MOST_STEPS),
        "run.micro_tokens": (run.micro_tokens, 1, LARGEST_NUMBER),
        "run.log_every": (run.log_every, 1, math.inf),
        "run.eval_every": (run.eval_every, 0, math.inf),
        "run.eval_rows": (run.eval_rows, 0, math.inf),
        "run.checkpoint_every": (run.checkpoint_every, 0, math.inf),
        "run.keep": (run.keep, 1, math.inf),
        "run.prefetch": (run.prefetch, 1, 10_000),
        "run.peak_flops": (run.peak_flops, 0, math.inf),
        "data.seed": (data.seed, *SEEDS),
        "run.seed": (run.seed, *SEEDS),
        "data.batch": (data.batch, 1, LARGEST_NUMBER),
        "data.batch_tokens": (data.batch_tokens, 0, 1 << 40),
        "data.shards": (data.shards, 0, math.inf),
        "optim.lr": (optim.lr, 0, math.inf),
        "optim.warmup": (optim.warmup, 0, math.inf),
        "optim.decay": (optim.decay, 0, 1),
        "optim.floor": (optim.floor, 0, 1),
        "optim.clip": (optim.clip, 0, math.inf),
        "optim.weight_decay": (optim.weight_decay, 0, math.inf),
        "optim.eps": (optim.eps, 0, math.inf),
    }


def check(config: TrainConfig, where: str = "") -> None:
    """Refuse impossible numbers and unknown names; needs no torch."""
    data, optim, run = config.data, config.optim, config.run
    for name, (value, least, most) in limits_of(config).items():
        if not math.isfinite(value):
            raise UsageError(
                f"{name}: {value} is not a finite number",
                where=where,
                hint=f"give a number of at least {least}",
            )
        if not least <= value <= most:
            side, limit, word = (
                ("below", least, "least") if value < least else ("above", most, "most")
            )
            raise UsageError(
                f"{name}: {value} is {side} {limit}",
                where=where,
                hint=f"--set {name}={limit} is the {word}",
            )
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise UsageError(
            f"optim.betas: {list(optim.betas)} are not both from 0 to below 1",
            where=where,
            hint="--set 'optim.betas=[0.9, 0.95]'",
        )
    if data.weights and len(data.weights) != len(data.stores):
        raise UsageError(
            f"data.weights: {len(data.weights)} weights for {len(data.stores)} stores",
            where=where,
            hint="one for each store of data.train, in its order",
        )
    if not all(0 < weight < math.inf for weight in data.weights):
        raise UsageError(
            "data.weights: a weight must be a finite number above 0",
            where=where,
            hint="to read nothing of a store, remove it from data.train",
        )
    check_name("run.engine: no engine is", run.engine, ("auto", *plugins.ENGINES), where)
    for tracker in run.track:
        check_name("run.track: no tracker is", tracker, plugins.TRACKERS, where)
    seconds(run.max_time)
    if config.engine.deepspeed:
        check_table(config.engine.deepspeed, where)


def notes(config: TrainConfig) -> list[str]:
    """Return notes on settings that are allowed but probably not intended."""
    lines = []
    if config.data.val and config.data.val in config.data.stores:
        lines.append("the validation store is learned from too: its loss says little")
    if len(set(config.data.stores)) < len(config.data.stores):
        lines.append("a store is named twice, so it is read twice as often")
    for part in (config.model, config.task):
        lines += part.notes() if hasattr(part, "notes") else []
    places = getattr(config.model, "context", 0)
    if getattr(config.model, "position", "") == "learned" and places < config.task.length:
        lines.append(
            f"a row has up to task.length = {config.task.length} positions, the learned table "
            f"model.context = {places}: a document that is longer will end the training with an "
            f"error; --set task.length={places} cuts it"
        )
    if config.run.steps <= config.optim.warmup:
        lines.append(
            f"the learning rate rises for optim.warmup = {config.optim.warmup} steps, and the run "
            f"ends after {config.run.steps}"
        )
    if config.engine.deepspeed and config.run.engine != "deepspeed":
        lines.append(
            f"[engine.deepspeed] is not used, because run.engine is {config.run.engine!r}; "
            "--engine deepspeed uses it"
        )
    return lines


def seconds(text: str) -> float:
    """Return a time such as 90, 90s, 10m, 2h as seconds; empty: infinite."""
    return parse_seconds(text) if text else math.inf
