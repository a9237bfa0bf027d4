"""A recipe as nested dicts, checked: types, numbers, and what does not go together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tokmill import plugins, recipe
from tokmill.errors import UsageError, nearest
from tokmill.training.recipe.config import OptimConfig, TrainConfig
from tokmill.training.recipe.deepspeed_config import check_table, stage_of
from tokmill.training.recipe.kinds import (
    DEFAULT_KINDS,
    LEARNED,
    check_kind,
    config_type,
    kinds_of,
)

LARGEST = {"layers": 1_000, "dim": 1 << 18, "heads": 1 << 14, "hidden": 1 << 22,
           "context": 1 << 24, "length": 1 << 24}  # fmt: skip
"""Keys of models and tasks → the most that they may be: far above what anybody has trained."""
LARGEST_NUMBER = 1 << 31
"""The most of other whole numbers, and of those that decide how much is held at a time."""

MOST_EMA = 0.999999
"""The largest decay: above it, what a step adds is less than float32 can hold."""


def check_plain(value: Mapping[str, Any], where: str = "") -> TrainConfig:
    """Check all of a recipe but the keys of the kinds of its parts, which need torch."""
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
    """Refuse a recipe without a store whose task reads stores, and the reverse."""
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
    """Refuse an optimiser's own numbers that make no training, and engines that break it up."""
    optimizer = plugins.load(plugins.OPTIMIZERS, config.optim.kind)
    optimizer.check(config.optim, where)
    stage = stage_of(config.engine.deepspeed)
    if config.run.engine == "deepspeed" and stage and not optimizer.splits:
        raise UsageError(
            f"the optimiser {config.optim.kind} needs whole weights, and stage {stage} of "
            "DeepSpeed keeps parts of them",
            where=where or "optim.kind",
            hint="--engine fsdp2 splits weights and works with it, as does stage 0 of DeepSpeed",
        )


def check_sizes(section: str, table: Any, where: str = "") -> None:
    """Refuse whole numbers of a model or a task that no machine could hold."""
    for field in msgspec.structs.fields(table):
        value, most = getattr(table, field.name), LARGEST.get(field.name, LARGEST_NUMBER)
        if isinstance(value, int) and value > most:
            raise UsageError(
                f"{section}.{field.name}: {value} is above {most}",
                where=where,
                hint=f"--set {section}.{field.name}={most} is the most",
            )


def check(config: TrainConfig, where: str = "") -> None:
    """Refuse numbers that make no training."""
    data, optim, run = config.data, config.optim, config.run
    limits: dict[str, tuple[float, float, float]] = {
        "run.steps": (run.steps, 1, 10**15),
        "run.micro_tokens": (run.micro_tokens, 1, LARGEST_NUMBER),
        "run.log_every": (run.log_every, 1, math.inf),
        "run.eval_every": (run.eval_every, 0, math.inf),
        "run.eval_rows": (run.eval_rows, 0, math.inf),
        "run.checkpoint_every": (run.checkpoint_every, 0, math.inf),
        "run.keep": (run.keep, 1, math.inf),
        "run.prefetch": (run.prefetch, 1, 10_000),
        "run.peak_flops": (run.peak_flops, 0, math.inf),
        "data.batch": (data.batch, 1, LARGEST_NUMBER),
        "data.batch_tokens": (data.batch_tokens, 0, 1 << 40),
        "data.shards": (data.shards, 0, math.inf),
        "optim.lr": (optim.lr, 0, math.inf),
        "optim.warmup": (optim.warmup, 0, math.inf),
        "optim.decay": (optim.decay, 0, 1),
        "optim.floor": (optim.floor, 0, 1),
        "optim.clip": (optim.clip, 0, math.inf),
        "optim.weight_decay": (optim.weight_decay, 0, math.inf),
        "optim.ema": (optim.ema, 0, MOST_EMA),
    }
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            side, limit, word = (
                ("below", least, "least") if value < least else ("above", most, "most")
            )
            raise UsageError(
                f"{name}: {value} is {side} {limit}",
                where=where,
                hint=f"--set {name}={limit} is the {word}",
            )
    if optim.ema and run.engine == "deepspeed":
        raise UsageError(
            "the engine deepspeed keeps no average of the weights",
            where=where or "optim.ema",
            hint="--set optim.ema=0, or --engine fsdp2, which splits weights and moments too",
        )
    if data.weights and len(data.weights) != len(data.stores):
        raise UsageError(
            f"data.weights: {len(data.weights)} weights for {len(data.stores)} stores",
            where=where,
            hint="one for each store of data.train, in its order",
        )
    if any(not weight > 0 for weight in data.weights):
        raise UsageError(
            "data.weights: a weight must be above 0",
            where=where,
            hint="leave out of data.train what is not to be read",
        )
    if run.engine not in (known := ("auto", *plugins.ENGINES)):
        raise UsageError(
            f"run.engine: no engine is called {run.engine!r}",
            where=where,
            hint=nearest(run.engine, known),
        )
    for tracker in run.track:
        if tracker not in plugins.TRACKERS:
            raise UsageError(
                f"run.track: no tracker is called {tracker!r}",
                where=where,
                hint=nearest(tracker, plugins.TRACKERS),
            )
    seconds(run.max_time)
    check_table(config.engine.deepspeed, where)


def notes(config: TrainConfig) -> list[str]:
    """Return what is allowed in a recipe and seldom meant."""
    found = []
    if config.data.val in config.data.stores:
        found.append("the validation store is learned from too: its loss says little")
    if len(set(config.data.stores)) < len(config.data.stores):
        found.append("a store is named twice, so it is read twice as often")
    if config.run.steps <= config.optim.warmup:
        found.append(
            f"the learning rate rises for optim.warmup = {config.optim.warmup} steps, and the run "
            f"ends after {config.run.steps}"
        )
    if config.engine.deepspeed and config.run.engine != "deepspeed":
        found.append(
            f"[engine.deepspeed] is not used: run.engine is {config.run.engine!r}; "
            "--engine deepspeed takes it"
        )
    return found


def seconds(text: str) -> float:
    """Return a time such as 90, 90s, 10m, 2h as seconds; empty: infinite."""
    if not text:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no time", hint="write it as 90s, 10m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
