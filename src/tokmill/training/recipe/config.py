"""The recipe of a training: `[data] [model] [task] [optim] [run] [engine]`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tokmill import plugins, recipe
from tokmill.errors import UsageError, nearest
from tokmill.training.recipe.deepspeed_config import check_table, stage_of


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is read, and in which order."""

    train: str | tuple[str, ...] = ""
    """The store to learn from; several are mixed."""
    weights: tuple[float, ...] = ()
    """Share of the tokens that comes from each store; none: as many as each one holds."""
    val: str = ""
    """The store to evaluate on; none: no evaluation."""
    batch: int = 16
    """Rows a step, over all processes; entries, where the task puts several rows together."""
    batch_tokens: int = 0
    """Tokens a step in place of rows; 0: `batch` rows."""
    shards: int = 0
    """Shards whose rows are mixed at a time; 0: all. Few suit stores that are far away."""
    seed: int = 0
    """Seed of the order of the rows."""
    shuffle: bool = True
    """Whether rows come in a random order, new each epoch."""
    partial: bool = False
    """Whether a store whose build has not finished may be used."""
    verify: bool = True
    """Whether shards are compared with their digests, each once, while the first steps are done."""
    overlays: tuple[str, ...] = ()
    """Overlays of the stores to learn from that are read as further columns, such as a `loss`; the
    store to evaluate on is read with those of them that it has."""

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores to learn from."""
        return (self.train,) if isinstance(self.train, str) else self.train


class OptimConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The optimiser and the learning rate of each step: the keys that all kinds have.

    They are all the keys of AdamW. Another kind (`plugins.OPTIMIZERS`) adds its own.
    """

    kind: str = "adamw"
    """Which optimiser this is: adamw, muon or bert_adam."""
    lr: float = 2e-3
    """Largest learning rate; models wider than about 256 want less."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How it falls after the warm-up; wsd: it stays, and falls linearly at the end."""
    decay: float = 0.2
    """Share of the steps, at the end, in which wsd falls."""
    warmup: int = 50
    """Steps over which it rises linearly."""
    floor: float = 0.1
    """Share of `lr` at which the schedule ends."""
    weight_decay: float = 0.1
    """Decay of matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip: float = 1.0
    """Largest norm of the gradient; 0: no limit."""
    ema: float = 0.0
    """Decay of a moving average of the weights, such as 0.999, which is evaluated and kept beside
    them; 0: none. Step t, from 0, has min(ema, (1 + t) / (10 + t)), whatever `warmup` is: it
    reaches over the last ninth of the steps so far, and at most over 1 / (1 - ema) steps."""

    def own_rate(self, step: int, steps: int) -> float | None:
        """Return the learning rate of a step where a kind has its own schedule, else None."""
        return None


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long and on what, and what is written."""

    steps: int = 1000
    """Steps of the optimiser."""
    seed: int = 0
    """Seed of the first weights and of dropout."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    engine: str = "auto"
    """How a step runs: single, in one process; ddp, in several that each take a part of the rows;
    fsdp2, deepspeed: and of the weights; auto: single, or ddp in one of several processes."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of matrix products; weights and moments are float32. fp16 scales the loss."""
    recompute: bool = False
    """Run blocks again in the backward pass instead of keeping what they computed."""
    compile: bool = False
    """Compile the model with torch.compile, which needs a C++ compiler."""
    micro_tokens: int = 16_384
    """A process cuts its share of a batch into micro-batches of at most so many tokens."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 200
    """Steps between evaluations; 0: only at the end."""
    eval_rows: int = 256
    """Rows of the validation store that are evaluated, evenly spaced; 0: all."""
    checkpoint_every: int = 500
    """Steps between checkpoints; 0: only when stopped and at the end."""
    keep: int = 2
    """Checkpoints that are kept."""
    best: bool = True
    """Whether the weights with the lowest validation loss are kept too."""
    start: str = ""
    """Folder of a run whose weights this one begins with."""
    track: tuple[str, ...] = ()
    """Trackers besides metrics.jsonl: tensorboard, wandb."""
    peak_flops: float = 0.0
    """Operations a second that the device can do, for MFU; 0: as known of the GPU; of a CPU there
    is no MFU then."""
    max_time: str = ""
    """Time after which the run saves a checkpoint and stops, such as 90s, 10m or 2h."""
    prefetch: int = 2
    """Batches that are made ahead."""
    over_memory: bool = False
    """Whether to begin where the machine has less memory than the training will take."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What engines are told beyond the recipe."""

    deepspeed: dict[str, Any] = {}
    """Any key of DeepSpeed's JSON but those that the recipe decides; stage 2 of ZeRO by default."""


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole recipe; `config_type` gives `model` and `task` the types of their kinds."""

    data: DataConfig = DataConfig()
    model: Any = None
    task: Any = None
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    engine: EngineConfig = EngineConfig()


KINDS = {"model": plugins.MODELS, "task": plugins.TASKS, "optim": plugins.OPTIMIZERS}
"""Tables of a recipe whose keys depend on their `kind` → the kinds that there are."""
DEFAULT_KINDS = {"model": "decoder", "task": "next_token", "optim": "adamw"}
"""What is meant where a recipe names no kind."""
LEARNED = ("model", "task")
"""The tables that say which weights there are."""

FREE = {
    "data.train", "data.val", "data.verify", "run.device", "run.log_every", "run.eval_every",
    "run.eval_rows", "run.checkpoint_every", "run.keep", "run.max_time", "run.prefetch",
    "run.best", "run.track", "run.peak_flops", "run.recompute", "run.engine", "run.over_memory",
}  # fmt: skip
"""Keys that may change on `--resume`, as they do not decide the weights. What `data.train` holds is
checked by its fingerprint; another device changes weights by rounding alone, and is reported."""

ENGINE = "engine."
"""How further keys begin that may change: what engines are told."""

RATE = {
    "run.steps", "optim.lr", "optim.schedule", "optim.warmup", "optim.warmup_share", "optim.decay",
    "optim.floor",
}  # fmt: skip
"""Keys that decide the learning rates and nothing else: they may change on `--resume` where the
steps that are done had the same rates."""


LARGEST = {"layers": 1_000, "dim": 1 << 18, "heads": 1 << 14, "hidden": 1 << 22,
           "context": 1 << 24, "length": 1 << 24}  # fmt: skip
"""Keys of models and tasks → the most that they may be: far above what anybody has trained."""
LARGEST_NUMBER = 1 << 31
"""The most of other whole numbers, and of those that decide how much is held at a time."""

MOST_EMA = 0.999999
"""The largest decay: above it, what a step adds is less than float32 can hold."""


def config_type(**kinds: str) -> type[TrainConfig]:
    """Return the strict type of recipes with these kinds of model, task and optimiser.

    What is not given is of its default kind.
    """
    fields = []
    for section, kind in (DEFAULT_KINDS | kinds).items():
        check_kind(section, kind)
        part = plugins.load(KINDS[section], kind)
        fields.append((section, part.Config, part.Config()))
    struct: Any = msgspec.defstruct(
        "TrainConfig",
        fields,
        bases=(TrainConfig,),
        module=__name__,
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )
    made: type[TrainConfig] = struct
    return made


def check_kind(section: str, kind: str, where: str = "") -> None:
    """Refuse a kind of a table that there is not."""
    if kind not in KINDS[section]:
        name = "optimiser" if section == "optim" else section
        raise UsageError(
            f"no {name} is called {kind!r}", where=where, hint=nearest(kind, KINDS[section])
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


def kinds_of(value: Mapping[str, Any]) -> dict[str, str]:
    """Return which model, task and optimiser a recipe as nested dicts asks for."""
    kinds = dict(DEFAULT_KINDS)
    for section in kinds:
        part = value.get(section)
        if isinstance(part, Mapping) and isinstance(part.get("kind"), str):
            kinds[section] = part["kind"]
    return kinds


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


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one: {"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat.update(flatten(inner, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def is_free(key: str) -> bool:
    """Say whether a key may change on `--resume`."""
    return key in FREE or key.startswith(ENGINE)


def differences(before: Mapping[str, Any], after: TrainConfig) -> dict[str, str]:
    """Return key → "old → new" for the keys that decide the weights and differ."""
    # Through JSON, as `before` came: it makes lists of tuples.
    old, new = flatten(before), flatten(msgspec.json.decode(msgspec.json.encode(after)))
    return {
        key: f"{old.get(key)!r} → {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if not is_free(key) and old.get(key) != new.get(key)
    }
