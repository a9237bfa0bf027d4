"""Whether a training fits into the memory of the machine, checked before it begins."""

from __future__ import annotations

import sys

import msgspec
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from tokmill.builds.resources import machine_memory
from tokmill.errors import MachineError, TokmillError
from tokmill.models.inputs import Inputs
from tokmill.progress import human_bytes
from tokmill.training.memory import process_bytes, shares_of, tensor_bytes
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import make_task

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

    All blocks but the first are alike. `inputs`: what the model reads.
    """
    layers = getattr(config.model, "layers", 0)
    if layers < 4:
        return _count(config, inputs)
    two, three = (_count(with_layers(config, number), inputs) for number in (2, 3))
    return three + (layers - 3) * (three - two)


def step_bytes(config: TrainConfig, inputs: Inputs, rows: int, parts: int, world: int = 1) -> int:
    """Return `tensor_bytes`; for deep models of like blocks computed from two with fewer blocks.

    Raises `TokmillError` for a task that cannot be run without numbers.
    """
    layers = getattr(config.model, "layers", 0)
    try:
        if layers <= DEEP[1]:
            return tensor_bytes(config, inputs, rows, parts, world)
        less, more = (
            tensor_bytes(with_layers(config, number), inputs, rows, parts, world) for number in DEEP
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


def rough_bytes(config: TrainConfig, inputs: Inputs, rows: int, world: int = 1) -> float:
    """Return a quick upper bound of `tensor_bytes`; infinite for models of unknown sizes.

    16 bytes a weight, 4 more with an average, and for each position of `rows` and each block 400
    values of the width, 10 of the hidden width, and attention as a whole matrix.
    """
    model, length = config.model, config.task.length
    if not hasattr(model, "layers") or not hasattr(model, "dim"):
        return float("inf")
    hidden = getattr(model, "hidden", 0) or 4 * model.dim
    matrix = getattr(model, "heads", 0) * length
    each: float = 4.0 * (model.layers + 1) * (400 * model.dim + 10 * hidden + 2 * matrix)
    each_weight = 20.0 if config.optim.ema else 16.0
    weights = each_weight * parameter_count(config, inputs) * max(*shares_of(config, world))
    positions: float = rows * length
    return weights + positions * (each + 8.0 * max(inputs.embedded.values(), default=0))


def batch_bytes(config: TrainConfig, columns: int, share: int) -> int:
    """Return the bytes of the batches that a process makes ahead, of `share` rows each."""
    arrays = 8 * (2 * columns + BATCH_ARRAYS)
    positions: int = share * config.task.length
    return (config.run.prefetch + 2) * positions * arrays


def memory_of(config: TrainConfig) -> tuple[int, str]:
    """Return (bytes, name) of the memory that a training would use; 0 bytes: not known."""
    if on_gpu(config):
        if not torch.cuda.is_available():
            return 0, "the GPU"
        name = config.run.device if config.run.device.startswith("cuda:") else "cuda:0"
        return torch.cuda.get_device_properties(torch.device(name)).total_memory, "the GPU"
    return machine_memory()[0], "the machine"


def on_gpu(config: TrainConfig) -> bool:
    """Say whether a training computes on a GPU."""
    if config.run.device == "auto":
        return torch.cuda.is_available()
    return config.run.device != "cpu"


def whole_bytes(
    config: TrainConfig, tensors: float, columns: int, share: int, local: int
) -> tuple[float, float]:
    """Return (bytes of one process, bytes that must fit into one memory).

    `tensors`: bytes of the process's tensors; `share`: rows of a step that it learns from;
    `local`: processes of this machine, which have a GPU each, or share the machine's memory.
    """
    device = "cuda" if on_gpu(config) else "cpu"
    one = process_bytes(tensors, device, config.run.recompute)
    if device == "cuda":
        return one, one
    one += batch_bytes(config, columns, share)
    return one, one * local


def judge(config: TrainConfig, needed: float) -> tuple[bool, str]:
    """Return whether a training that needs so many bytes is too large, and a warning or ""."""
    total, what = memory_of(config)
    if not total or needed <= MUCH * total:
        return False, ""
    said = f"the training takes about {human_bytes(needed)}, and {what} has {human_bytes(total)}"
    return needed > total, said


def check_memory(config: TrainConfig, inputs: Inputs, rows: int, world: int, local: int) -> None:
    """Refuse a training that does not fit into the memory of the machine or of its cgroup.

    One that nearly fills it gets a warning. `rows`: of a step over all `world` processes, of which
    `local` are on this machine.

    Raises `MachineError`, unless the recipe says `run.over_memory`.
    """
    share = max(1, rows // world)
    micro = min(share, max(1, config.run.micro_tokens // max(1, config.task.length)))
    sure = SURE * memory_of(config)[0]
    rough = rough_bytes(config, inputs, micro, world)
    if whole_bytes(config, rough, len(inputs.embedded), share, local)[1] < sure:
        return
    tensors = step_bytes(config, inputs, micro, -(-share // micro), world)
    refused, said = judge(
        config, whole_bytes(config, tensors, len(inputs.embedded), share, local)[1]
    )
    offloads = "offload" in str(config.engine.deepspeed)
    if refused and not config.run.over_memory and not offloads:
        raise MachineError(
            said,
            where="run",
            hint="a smaller run.micro_tokens, run.recompute=true or a smaller model takes less; "
            "--over-memory begins all the same",
        )
    if said:
        print(f"warning: {said}", file=sys.stderr, flush=True)


def with_layers(config: TrainConfig, layers: int) -> TrainConfig:
    """Return a recipe with another number of blocks."""
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, layers=layers)
    )


def _count(config: TrainConfig, inputs: Inputs) -> int:
    with torch.device("meta"):
        return make_task(config, inputs).parameter_count()
