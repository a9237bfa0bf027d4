"""The recipe of a training: `[data] [model] [task] [optim] [run] [engine]`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


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
    """A whole recipe; `kinds.config_type` gives `model` and `task` the types of their kinds."""

    data: DataConfig = DataConfig()
    model: Any = None
    task: Any = None
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    engine: EngineConfig = EngineConfig()
