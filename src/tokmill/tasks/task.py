"""What is learned: rows, masks, head, loss and metrics around a model.

A task runs in two places. `rows`, `prepare` and `count` are numpy and run in the loader's thread;
`forward` is torch and runs where the engine says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokmill.feed.feed import Batch, id_counts
from tokmill.feed.rows import Rows
from tokmill.models.model import Group, Model, Tensors
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store


class TaskConfig(Protocol):
    """What the configuration of every task says."""

    @property
    def length(self) -> int:
        """Positions T that the model sees of a row."""
        ...


class Task(nn.Module):
    """Wraps a model. `sizes`: the columns that it reads and the number of their ids."""

    Config: ClassVar[type[msgspec.Struct]]

    def __init__(self, config: TaskConfig, model: Model, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.length, self.model, self.sizes = config.length, model, dict(sizes)

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """Return how a store is cut for training; `shards`: so many are mixed at a time, 0: all."""
        raise NotImplementedError

    def evaluation_rows(self, store: Store) -> Rows:
        """Return how a store is cut for evaluation: every token once."""
        return self.rows(store)

    def extra_columns(self, schema: Schema) -> list[str]:
        """Return the columns that `prepare` wants to see besides those that the model reads."""
        return []

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with its targets; random choices come from `batch.key`."""
        raise NotImplementedError

    def count(self, batch: Batch) -> int:
        """Return what the summed loss of a prepared batch will be divided by."""
        return sum(int(np.count_nonzero(target >= 0)) for target in batch.targets.values())

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss and sums for `report`, detached; one forward of the model."""
        raise NotImplementedError

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        """Return metrics from what `forward` returned, added up over batches.

        `bytes_per_token`: of the store, for tasks that measure in bits a byte; 0: not known.
        """
        return {name: value / max(count, 1) for name, value in sums.items()}

    def param_groups(self, weight_decay: float) -> list[Group]:
        """Return the parameter groups of the model and of the task's heads."""
        return self.model.param_groups(weight_decay)

    def flops_per_token(self, length: int) -> float:
        """Return the floating point operations of a training step a token, heads included."""
        return self.model.flops_per_token(length)

    def parameter_count(self) -> int:
        """Return the number of weights; one that is used twice counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def column_sizes(store: Store) -> dict[str, int]:
    """Return the columns that a model can read, with the number of their ids.

    These are the columns with a vocabulary and a value a token; and a column `token` without one
    (imported from bare ids), whose largest id then says how many there are.
    """
    return {name: n for name, n in id_counts(store).items() if not store.schema[name].width}


def positions(document: Array) -> Array:
    """Return (B, T) int64: how far each token is from its document's first token in the row."""
    place = np.broadcast_to(np.arange(document.shape[1]), document.shape)
    first = np.ones(document.shape, bool)
    first[:, 1:] = document[:, 1:] != document[:, :-1]
    return place - np.maximum.accumulate(np.where(first, place, 0), axis=1)


def is_whole(document: Array) -> bool:
    """Say whether every row is one document without padding."""
    return bool((document >= 0).all() and (document == document[:, :1]).all())


def to_tensors(batch: Batch, device: torch.device) -> Tensors:
    """Return a prepared batch as tensors on a device; numbers become int64, fractions float32."""

    def tensor(values: Array) -> Tensor:
        kind = np.float32 if values.dtype.kind == "f" else np.int64
        ready = np.ascontiguousarray(values, kind)
        if not ready.flags.writeable:
            ready = ready.copy()
        result = torch.from_numpy(ready)
        if device.type == "cuda":
            return result.pin_memory().to(device, non_blocking=True)
        return result.to(device)

    return Tensors(
        columns={name: tensor(value) for name, value in batch.columns.items()},
        document=tensor(batch.document),
        position=tensor(positions(batch.document)),
        whole=is_whole(batch.document),
        values={name: tensor(value) for name, value in batch.values.items()},
        targets={name: tensor(value) for name, value in batch.targets.items()},
    )


def perplexity(loss: float) -> float:
    """Return e^loss, infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf
