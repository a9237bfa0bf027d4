"""The recipe of a training: `[data] [model] [task] [optim] [run] [engine]`, and its kinds."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokmill import plugins
from tokmill.base.errors import UsageError, nearest
from tokmill.base.recipe import AboveZero, Amount, Natural, Part, Positive, Share

LARGEST_NUMBER = 1 << 31
"""The maximum of whole numbers, and of sizes of what is in memory at a time."""
MOST_STEPS = 10**15
"""The most steps; a recipe of epochs alone has so many until its stores are open."""


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The data that are read, and their order."""

    train: str | tuple[str, ...] = ""
    """The store to learn from; several are mixed."""
    weights: tuple[AboveZero, ...] = ()
    """Relative number of tokens read from each store; empty: each store's number of tokens."""
    val: str = ""
    """The store to evaluate on; none: no evaluation."""
    batch: Annotated[int, Meta(ge=1, le=LARGEST_NUMBER)] = 16
    """Rows a step over all processes; entries, if the task groups several rows."""
    batch_tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Tokens a step, in place of `batch`; 0: `batch` decides."""
    shards: Natural = 0
    """Shards whose rows are mixed at a time; 0: all. A small number suits stores on a network."""
    seed: int = 0
    """Seed of the order of the rows."""
    shuffle: bool = True
    """Whether rows come in a random order, new each epoch."""
    partial: bool = False
    """Accept an unfinished store."""
    verify: bool = True
    """Whether each shard is compared with its digest once, during the first steps."""
    overlays: tuple[str, ...] = ()
    """Overlays of the stores to learn from, which are read as further columns, such as `loss`. Of
    the store to evaluate on, those are read that it has."""

    @property
    def stores(self) -> tuple[str, ...]:
        return (self.train,) if isinstance(self.train, str) else self.train


class OptimConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The optimiser and the learning rate of each step: the keys that all kinds have.

    They are all the keys of AdamW. Another kind (`plugins.OPTIMIZERS`) adds its own.
    """

    kind: str = "adamw"
    """Which optimiser this is: adamw, muon or bert_adam."""
    lr: Amount = 2e-3
    """Largest learning rate; models wider than about 256 want less."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How it falls after the warm-up; wsd: it stays, and falls linearly at the end."""
    decay: Share = 0.2
    """Share of the steps, at the end, during which the rate of wsd falls."""
    warmup: Natural = 50
    """Steps over which it rises linearly."""
    floor: Share = 0.1
    """Share of `lr` at which the schedule ends."""
    weight_decay: Amount = 0.1
    """Decay of matrices."""
    betas: tuple[Part, Part] = (0.9, 0.95)
    """Decay rates of Adam's two moments."""
    eps: Amount = 1e-8
    """Added to the root of the second moment."""
    clip: Amount = 1.0
    """Largest norm of the gradient; 0: no limit."""

    def own_rate(self, step: int, steps: int) -> float | None:
        """Return the learning rate of a step if the kind has its own schedule, else None."""
        return None


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Length, device and precision of a training, and what it writes."""

    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 1000
    """Steps of the optimiser."""
    epochs: Annotated[float, Meta(ge=0, le=MOST_STEPS)] = 0.0
    """Epochs after which it ends, if that is before `steps`; 0: `steps` alone decides. `steps` is
    then what the epochs are."""
    seed: int = 0
    """Seed of the first weights and of dropout."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    engine: str = "auto"
    """single: one process; ddp: data parallelism; deepspeed: also shards weights or moments;
    auto: ddp for several processes."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of matrix products; weights and moments are float32."""
    recompute: bool = False
    """Activation checkpointing: run blocks again in the backward pass."""
    compile: bool = False
    """Compile blocks and loss by torch.compile: half a minute; on a GPU it pays for decoders."""
    micro_tokens: Annotated[int, Meta(ge=1, le=LARGEST_NUMBER)] = 16_384
    """Largest number of tokens of a micro-batch; a process's share of a batch is cut into these."""
    log_every: Positive = 10
    """Steps between lines of metrics."""
    eval_every: Natural = 200
    """Steps between evaluations; 0: only at the end."""
    eval_rows: Natural = 256
    """Rows of the validation store that are evaluated, evenly spaced; 0: all."""
    checkpoint_every: Natural = 500
    """Steps between checkpoints; 0: only when stopped and at the end."""
    keep: Positive = 2
    """Checkpoints that are kept."""
    best: bool = True
    """Whether the weights with the lowest validation loss are kept too."""
    start: str = ""
    """Folder of a run whose weights this one begins with."""
    track: tuple[str, ...] = ()
    """Trackers besides metrics.jsonl: wandb."""
    peak_flops: Amount = 0.0
    """Peak of the device in operations a second, for MFU; 0: no MFU is reported."""
    max_time: str = ""
    """Time after which the run saves a checkpoint and stops, such as 90s, 10m or 2h."""
    prefetch: Annotated[int, Meta(ge=1, le=10_000)] = 2
    """Batches that are made ahead."""
    over_memory: bool = False
    """Train even if the estimate exceeds the memory of the machine."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of single engines."""

    deepspeed: dict[str, Any] = {}
    """Keys of DeepSpeed's JSON but those that the recipe decides; stage 2 of ZeRO by default."""


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole recipe; `config_type` gives `model` and `task` the types of their kinds."""

    data: DataConfig = DataConfig()
    model: Any = None
    task: Any = None
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    engine: EngineConfig = EngineConfig()


KINDS = {"model": plugins.MODELS, "task": plugins.TASKS, "optim": plugins.OPTIMIZERS}
"""Table of a recipe whose keys depend on its `kind` → all kinds."""
DEFAULT_KINDS = {"model": "decoder", "task": "next_token", "optim": "adamw"}
"""The kinds of a recipe that names none."""
LEARNED = ("model", "task")
"""The tables that decide which weights there are."""


def config_type(**kinds: str) -> type[TrainConfig]:
    """Return the strict type of recipes with these kinds; by default those of `DEFAULT_KINDS`."""
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
    return struct


def check_kind(section: str, kind: str, where: str = "") -> None:
    """Raise `UsageError` for an unknown kind of a table."""
    if kind not in KINDS[section]:
        name = "optimiser" if section == "optim" else section
        raise UsageError(
            f"no {name} is called {kind!r}", where=where, hint=nearest(kind, KINDS[section])
        )


def kinds_of(value: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of model, task and optimiser of a recipe given as nested dicts."""
    kinds = dict(DEFAULT_KINDS)
    for section in kinds:
        part = value.get(section)
        if isinstance(part, Mapping) and isinstance(part.get("kind"), str):
            kinds[section] = part["kind"]
    return kinds


def with_size(value: Mapping[str, Any], model: str, where: str = "") -> dict[str, Any]:
    """Return a recipe in which `model.size = "base"` is the keys that it stands for.

    Keys that stand beside it win. `model`: the kind of the model.
    """
    table = value.get("model")
    if not isinstance(table, Mapping) or "size" not in table:
        return dict(value)
    check_kind("model", model, where)
    sizes = getattr(plugins.load(plugins.MODELS, model).Config, "sizes", {})
    size = table["size"]
    if not isinstance(size, str) or size not in sizes:
        raise UsageError(
            f"model.size: no {model} is called {size!r}"
            if sizes
            else f"model.size: the sizes of the model {model} have no names",
            where=where,
            hint=nearest(str(size), sizes)
            if sizes
            else "model.kind=encoder has such sizes; else set model.dim, model.layers, model.heads",
        )
    kept = {key: one for key, one in table.items() if key != "size"}
    return {**value, "model": {**sizes[size], **kept}}
