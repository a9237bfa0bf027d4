"""What is learned: rows, masks, head, loss and metrics around a model.

A task runs in two places. `rows`, `prepare` and `count` are numpy and run in the loader's thread;
`forward` is torch and runs where the engine says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokmill.feed.feed import Batch, id_counts
from tokmill.feed.rows import Rows
from tokmill.models.model import Group, Model, Tensors
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store
from tokmill.tasks.scores import Scores


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

    @property
    def target_names(self) -> list[str]:
        """Names of the targets of a prepared batch."""
        return list(self.sizes)

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with its targets; random choices come from `batch.key`."""
        raise NotImplementedError

    def count(self, batch: Batch) -> int:
        """Return what the summed loss of a prepared batch will be divided by."""
        return sum(int(np.count_nonzero(target >= 0)) for target in batch.targets.values())

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss and sums for `report`, detached; one forward of the model."""
        raise NotImplementedError

    def scored(self, batch: Tensors) -> tuple[dict[str, Tensor], dict[str, Scores]]:
        """Return the sums of `forward`, and the scores of each column that tokens are predicted of.

        Without a gradient; for `tokmill eval`. A task that predicts no tokens has no scores.
        """
        return self(batch)[1], {}

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


def borders(document: Array) -> Array:
    """Return (documents + 1,) int64: where documents begin in the rows end to end, and B · T.

    A run of padding counts as one. This is what attention kernels call `cu_seqlens`.
    """
    first = np.ones(document.shape, bool)
    np.not_equal(document[:, 1:], document[:, :-1], out=first[:, 1:])
    return np.append(np.flatnonzero(first), document.size)


def positions(document: Array, ends: Array | None = None) -> Array:
    """Return (B, T) int64: how far each token is from its document's first token in the row.

    `ends`: the `borders` of the rows, where they are known.
    """
    length, ends = document.shape[1], borders(document) if ends is None else ends
    begins = np.repeat(ends[:-1] % length, np.diff(ends)).reshape(document.shape)
    place: Array = np.subtract(np.arange(length), begins, out=begins)
    return place


def is_whole(document: Array) -> bool:
    """Say whether every row is one document without padding."""
    # Documents are numbered from left to right, and padding is on the right: the ends tell.
    first, last = document[:, 0], document[:, -1]
    return bool((first == last).all() and (first >= 0).all())


def to_tensors(batch: Batch, device: torch.device) -> Tensors:
    """Return a prepared batch as tensors for a device; numbers become int64, fractions float32.

    They lie in the memory of the CPU, pinned where a CUDA device will copy them.
    """

    def tensor(values: Array, integer: type[np.integer[Any]] = np.int64) -> Tensor:
        kind = np.float32 if values.dtype.kind == "f" else integer
        ready = np.ascontiguousarray(values, kind)
        if not ready.flags.writeable:
            ready = ready.copy()
        result = torch.from_numpy(ready)
        return result.pin_memory() if device.type == "cuda" else result

    whole, ends = is_whole(batch.document), borders(batch.document)
    return Tensors(
        columns={name: tensor(value) for name, value in batch.columns.items()},
        document=tensor(batch.document),
        position=tensor(positions(batch.document, ends)),
        whole=whole,
        cu_seqlens=None if whole else tensor(ends, np.int32),
        values={name: tensor(value) for name, value in batch.values.items()},
        targets={name: tensor(value) for name, value in batch.targets.items()},
    )


def perplexity(loss: float) -> float:
    """Return e^loss, infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf
