"""What `--dry-run` reports, and how much memory a step takes, by a step on tensors without data.

Torch's fake tensors go through the forward and backward pass as real ones would, and the bytes that
are alive at each moment are added up. So no formula has to follow the models.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokmill import plugins
from tokmill.base.bounds import machine_memory
from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.progress import human_bytes
from tokmill.feed.feed import Feed
from tokmill.feed.rows import Rows
from tokmill.models.model import Inputs, Tensors, blocks_of
from tokmill.models.transformers.layers import CHUNK
from tokmill.tasks.task import Task
from tokmill.training.data import (
    inputs_of_start,
    make_feed,
    micro_batches,
    open_stores,
    with_epochs,
)
from tokmill.training.engines.devices.device import DTYPES, Precision, moved, pick_device
from tokmill.training.engines.optimisers.optim import make_optimizer, moment_bytes
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import make_task, task_type

FIXED = {"cpu": 0.42e9, "cuda": 0.8e9}
"""Bytes of Python, torch and its libraries; of CUDA the size of a context."""
HELD, HELD_RECOMPUTING = {"cpu": 1.45, "cuda": 1.05}, {"cpu": 1.75, "cuda": 1.05}
"""Bytes held for each byte of tensors. On a CPU: measured with glibc 2.36, which keeps freed blocks
and seldom uses them again. On an H100: 1.024 in a step of 124 million weights."""
LOGIT = 10
"""Bytes of a logit in bf16, in float32 and of its gradient; a GPU has more of them at a time."""


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of the tensors that operations make; `most`: the largest sum so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.alive: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed; views share memory."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.alive:
            return

        def gone(_: object) -> None:
            self.now -= size
            del self.alive[key]

        self.alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def process_bytes(tensors: float, device: str, recompute: bool) -> float:
    """Return an estimate of the memory of a process whose tensors take `tensors` bytes.

    `device`: "cpu" for the memory of the process, "cuda" for that of the GPU.
    """
    return FIXED[device] + (HELD_RECOMPUTING if recompute else HELD)[device] * tensors


def tensor_bytes(config: TrainConfig, inputs: Inputs, rows: int, parts: int) -> int:
    """Return the most bytes that tensors of a process take at a time while a model is trained.

    These are the weights in float32, all moments (with AdamW twice the weights), and what else is
    alive at the worst moment of forward and backward passes over micro-batches of `rows` whole
    rows, gradients among it. What ZeRO splits over processes is counted whole.

    `inputs`: what the model reads; `parts`: micro-batches a step.
    """
    without = task_type(config).runs_without_numbers
    with FakeTensorMode(allow_non_fake_inputs=True) if without else contextlib.nullcontext():
        task = make_task(config, inputs).train()
        task.model.recompute = config.run.recompute
        batch = task.example(rows)
        dtype = DTYPES[config.run.precision]
        autocast = torch.autocast("cpu", dtype, enabled=dtype is not torch.float32)
        peak = Peak()
        for parameter in task.parameters():
            peak.count(parameter)
        optimizer = make_optimizer(task.param_groups(0.0), config.optim, blocks_of(task))
        with peak:
            # From the second micro-batch on, gradients are there already.
            for _ in range(min(parts, 2)):
                with autocast:
                    loss, sums = example_loss(task, batch)
                torch.autograd.backward(loss)
                del loss, sums
    return peak.most + moment_bytes(optimizer)


def example_loss(task: Task, batch: Tensors) -> tuple[Tensor, Any]:
    """Return a loss that takes about the memory of the task's own, and the other results.

    A comparison of vectors takes little memory beside the vectors, and may need real numbers.
    """
    if not task.compares:
        loss, sums = task(batch)
        return loss, sums
    results = task.act(batch)
    return results["vectors"].float().sum(), results


MUCH = 0.8
"""A training that takes more than this share of the memory gets a warning."""
SURE = 0.2
"""Below this share of the memory the rough bound is enough, and nothing is measured."""
DEEP = (3, 6)
"""A model with more than 6 blocks is estimated from models with 3 and with 6."""
BATCH_ARRAYS = 2
"""Arrays of a batch beside its columns: documents and positions."""


def parameter_count(config: TrainConfig, inputs: Inputs) -> int:
    """Return the number of weights of a model, computed from two models with few blocks.

    All blocks but the first are the same. `inputs`: what the model reads.
    """
    layers = getattr(config.model, "layers", 0)
    if layers < 4:
        return _count(config, inputs)
    two, three = (_count(with_layers(config, number), inputs) for number in (2, 3))
    return three + (layers - 3) * (three - two)


def step_bytes(config: TrainConfig, inputs: Inputs, rows: int, parts: int) -> int:
    """Return `tensor_bytes`; for deep models of like blocks computed from two with fewer blocks."""
    layers = getattr(config.model, "layers", 0)
    try:
        if layers <= DEEP[1]:
            return tensor_bytes(config, inputs, rows, parts)
        less, more = (
            tensor_bytes(with_layers(config, number), inputs, rows, parts) for number in DEEP
        )
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TokmillError(
            f"the memory of the task {config.task.kind} cannot be estimated: its computation "
            f"depends on the values of a batch ({error})",
            where="task.kind",
            hint="this is a fault of the task: docs/tasks.md says what it may not do",
        ) from error
    except (RuntimeError, OverflowError):
        # Sizes of which torch cannot even count the bytes.
        return sys.maxsize
    return more + (layers - DEEP[1]) * (more - less) // (DEEP[1] - DEEP[0])


def rough_bytes(config: TrainConfig, inputs: Inputs, rows: int) -> float:
    """Return a quick upper bound of `tensor_bytes`; infinite for models of unknown sizes.

    16 bytes a weight, and for each position of `rows` and each block 400 values of the width, 10 of
    the hidden width, and attention as a whole matrix.
    """
    model, length = config.model, config.task.length
    if not hasattr(model, "layers") or not hasattr(model, "dim"):
        return float("inf")
    hidden = getattr(model, "hidden", 0) or 4 * model.dim
    matrix = getattr(model, "heads", 0) * length
    each: float = 4.0 * (model.layers + 1) * (400 * model.dim + 10 * hidden + 2 * matrix)
    weights = 16.0 * parameter_count(config, inputs)
    positions: float = rows * length
    return weights + positions * (each + 8.0 * max(inputs.embedded.values(), default=0))


def memory_of(config: TrainConfig) -> tuple[int, str]:
    """Return (bytes, name) of the memory that a training would use; 0 bytes: not known."""
    if on_gpu(config):
        if not torch.cuda.is_available():
            return 0, "the GPU"
        name = config.run.device if config.run.device.startswith("cuda:") else "cuda:0"
        return torch.cuda.get_device_properties(torch.device(name)).total_memory, "the GPU"
    return machine_memory()[0], "the machine"


def on_gpu(config: TrainConfig) -> bool:
    if config.run.device == "auto":
        return torch.cuda.is_available()
    return config.run.device != "cpu"


def whole_bytes(
    config: TrainConfig, tensors: float, embedded: Mapping[str, int], share: int, local: int
) -> tuple[float, float]:
    """Return (bytes of one process, bytes that must fit into one memory).

    `tensors`: bytes of the process's tensors; `embedded`: column → ids; `share`: rows of a step
    that it learns from; `local`: processes of this machine, which have a GPU each, or share the
    machine's memory.
    """
    if on_gpu(config):
        logits = min(share * config.task.length, config.run.micro_tokens) * max(
            embedded.values(), default=0
        )
        tensors += LOGIT * min(logits, CHUNK["cuda"])
        one = process_bytes(tensors, "cuda", config.run.recompute)
        return one, one
    one = process_bytes(tensors, "cpu", config.run.recompute)
    # The batches that a process makes ahead.
    arrays = 8 * (2 * len(embedded) + BATCH_ARRAYS)
    one += (config.run.prefetch + 2) * share * config.task.length * arrays
    return one, one * local


def judge(config: TrainConfig, needed: float) -> tuple[bool, str]:
    """Return whether a training that needs so many bytes is too large, and a warning or ""."""
    total, what = memory_of(config)
    if not total or needed <= MUCH * total:
        return False, ""
    message = f"the training takes about {human_bytes(needed)}, and {what} has {human_bytes(total)}"
    return needed > total, message


def check_memory(config: TrainConfig, inputs: Inputs, rows: int, world: int, local: int) -> None:
    """Refuse a training that does not fit into the memory of the machine or of its cgroup.

    One that nearly fills it gets a warning, and so does one of DeepSpeed, which may split or
    offload what is counted whole. `rows`: of a step over all `world` processes, of which `local`
    are on this machine.
    """
    share = max(1, rows // world)
    micro = min(share, max(1, config.run.micro_tokens // max(1, config.task.length)))
    sure = SURE * memory_of(config)[0]
    rough = rough_bytes(config, inputs, micro)
    if whole_bytes(config, rough, inputs.embedded, share, local)[1] < sure:
        return
    tensors = step_bytes(config, inputs, micro, -(-share // micro))
    refused, message = judge(config, whole_bytes(config, tensors, inputs.embedded, share, local)[1])
    if refused and not config.run.over_memory and config.run.engine != "deepspeed":
        raise MachineError(
            message,
            where="run",
            hint="a smaller run.micro_tokens, run.recompute=true or a smaller model takes less; "
            "--over-memory begins all the same",
        )
    if message:
        print(f"warning: {message}", file=sys.stderr, flush=True)


def with_layers(config: TrainConfig, layers: int) -> TrainConfig:
    """Return a recipe with another number of blocks."""
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, layers=layers)
    )


def _count(config: TrainConfig, inputs: Inputs) -> int:
    with torch.device("meta"):
        return make_task(config, inputs).parameter_count()


SAMPLE = 1000
"""Rows of a store from which the share of padding is estimated."""
SAMPLE_STEPS = 8
"""Steps from which the share of positions that are computed is estimated."""
MOST_FLOPS = {"cpu": 2e11, "cuda": 1e14}
"""Operations of a pass that is measured: some seconds."""
SHARE = 0.1
"""Share of the memory that weights and gradients may take for that."""


def estimate(
    config: TrainConfig, processes: int = 1, local: int = 0, *, timed: bool = False
) -> dict[str, Any]:
    """Return the facts that `--dry-run` prints; weights are never made.

    `tensor_bytes`: of one process, for whole rows of one document (`memory.tensor_bytes`).
    `memory_bytes`: an estimate of all that the process takes, or of its GPU's memory.
    `memory_warning`: a text if that is much for the `local` processes of this machine (0: all).

    `timed`: measure how long a step takes (`pace`), with weights that are made for that;
    `seconds_per_step` is None where it is not measured, as without stores.
    """
    config = with_epochs(config, processes)
    kind = plugins.load(plugins.LOOPS, task_type(config).loop)
    stores = open_stores(config.data) if kind.reads_stores else []
    inputs = inputs_of_start(config, stores)
    with torch.device("meta"):
        task = make_task(config, inputs)
    environment = kind.check(config)
    feed = make_feed(config, task, stores, processes) if stores else None
    each = task.entry_rows(config.task)
    batch: int = kind.rows_a_step(config, processes)
    share = batch // processes
    micro = min(share, each * max(1, config.run.micro_tokens // (task.length * each)))
    a_step = batch * task.length
    flops = task.flops_per_token(task.length)
    tensors = step_bytes(config, inputs, micro, -(-share // micro))
    one, needed = whole_bytes(config, tensors, inputs.embedded, share, local or processes)
    pace: dict[str, Any] = {"seconds_per_step": None} if timed else {}
    # A step in an environment takes as long as the environment does.
    if timed and kind.reads_stores:
        seconds = seconds_per_step(config, inputs, micro, -(-share // micro), flops * task.length)
        part = computed(feed, task, config, processes) if seconds is not None and feed else 1.0
        pace["seconds_per_step"] = seconds and seconds * part
    return {
        "model": config.model.kind,
        "task": config.task.kind,
        "columns": inputs.embedded,
        "environment": dict(environment),
        "parameters": task.parameter_count(),
        "tensors": {name: list(tensor.shape) for name, tensor in task.named_parameters()},
        "batch": [batch, task.length],
        "micro_batch": [micro, task.length],
        "tokens_per_step": a_step,
        "steps": config.run.steps,
        "tokens": a_step * config.run.steps,
        "epochs": config.run.steps * feed.batch_size / max(1, feed.rows_in_all) if feed else 0.0,
        "store_tokens": sum(store.tokens for store in stores),
        "rows": sum(map(len, feed.sources)) if feed else 0,
        "rows_kind": getattr(config.task, "rows", ""),
        "overlays": list(config.data.overlays),
        "stores": stores_of(feed, config.data.weights) if feed else [],
        "flops_per_token": flops,
        "flops": flops * a_step * config.run.steps,
        **pace,
        "tensor_bytes": tensors,
        "memory_bytes": round(one),
        "memory_warning": judge(config, needed)[1],
    }


def computed(feed: Feed, task: Task, config: TrainConfig, processes: int) -> float:
    """Return the share of a step's positions that are left when padding is trimmed."""
    whole = left = 0
    for step in range(min(config.run.steps, SAMPLE_STEPS)):
        batch = task.prepare(feed.batch(step, 0, processes))
        whole += batch.document.size
        left += sum(part.document.size for part in micro_batches(batch, config.run.micro_tokens))
    return left / whole


def stores_of(feed: Feed, weights: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return each store's share of a training, and how much of its rows is padding."""
    parts = weights or [source.tokens for source in feed.sources]
    return [
        {
            "store": str(source.store.path),
            "tokens": source.store.tokens,
            "rows": len(source),
            "share": part / sum(parts),
            "padding": padding(source),
            "cut_records": getattr(source, "cut_records", 0),
            "cut_tokens": getattr(source, "cut_tokens", 0),
        }
        for source, part in zip(feed.sources, parts, strict=True)
    ]


def padding(source: Rows) -> float:
    """Return the share of positions that are padding, from a sample if there are many rows."""
    count = min(len(source), SAMPLE)
    sample = np.arange(count) * len(source) // count
    spans, sizes = source.spans(sample, 0), source.sizes(sample)
    rows = count if sizes is None else int(sizes.sum())
    return 1 - int((spans.stop - spans.start).sum()) / (rows * source.length)


def seconds_per_step(
    config: TrainConfig, inputs: Inputs, rows: int, parts: int, flops: float
) -> float | None:
    """Return the seconds of forward and backward of a step in one process; None: not measured.

    A pass over a batch of zeros is measured, of as many rows as some seconds allow. It is not where
    one row or the weights are too large for that, or the device is not here. The optimiser's own
    time is not in it.
    """
    device = pick_device(config.run.device)
    most = MOST_FLOPS.get(device.type, 0.0)
    memory = memory_of(config)[0]
    if flops > most or not memory or 8 * parameter_count(config, inputs) > SHARE * memory:
        return None
    tried = max(1, min(rows, int(most / flops)))
    task = make_task(config, inputs).to(device).train()
    batch = moved(task.example(tried), device)
    seconds = []
    for _ in range(3):  # The first pass also finds memory, and another program may use the machine.
        begun = time.perf_counter()
        with Precision(config.run.precision, device).autocast():
            loss, _sums = example_loss(task, batch)
        torch.autograd.backward(loss)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds) * rows * parts / tried
