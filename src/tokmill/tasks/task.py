"""What is learned: inputs, rows, targets, head, loss and metrics around a model.

A task runs in two places. `rows`, `prepare`, `count` and `nothing` are numpy and run in the
loader's thread; `forward`, `act` and `compare` are torch and run where the engine says.

A batch holds entries, of one row or of several that belong together (`Batch.entry`). Most tasks
have a loss that is a sum over entries: `forward`. One that compares the entries of a step with each
other sets `compares`; its loss is `compare`, of what `act` gives for all entries of the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows
from tokmill.feed.values import Vectors
from tokmill.models.inputs import Inputs
from tokmill.models.model import Group, Model, Tensors
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store
from tokmill.tasks.inputs import Facts, store_inputs
from tokmill.tasks.measures import Measures
from tokmill.tasks.scores import Scores


class TaskConfig(Protocol):
    """What the configuration of every task says."""

    @property
    def length(self) -> int:
        """Positions T that the model sees of a row."""
        ...


class Task(nn.Module):
    """Wraps a model. Shapes: B rows, T positions, D width of the model, N rows of a whole step.

    `reads`: what the model reads. `sizes`: its columns of the store and the number of their ids.
    """

    Config: ClassVar[type[msgspec.Struct]]
    compares: ClassVar[bool] = False
    """Whether entries of a step are compared with each other: the loss is then `compare`."""
    loop: ClassVar[str] = "rows"
    """What it learns from: a line of `plugins.LOOPS`."""
    predicts_tokens: ClassVar[bool] = False
    """Whether `scored` tells how well each token was predicted, for an evaluation taken apart."""
    predicted: ClassVar[str] = "next_token"
    """What the tokens are called that are predicted, where they are."""
    collects: ClassVar[bool] = False
    """Whether an evaluation keeps what `act` gives for every row, and hands it to `measure`."""

    def __init__(self, config: TaskConfig, model: Model, inputs: Inputs) -> None:
        super().__init__()
        self.config: Any = config
        self.length, self.model, self.reads = config.length, model, inputs
        self.sizes = dict(inputs.ids)

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        """Return what the model reads; by default every column of ids of the store.

        config: of this task; `facts`: of the store that a run learns from. A run opens by these
        two, without its store.
        """
        return store_inputs(facts)

    @classmethod
    def measures(cls, config: Any, inputs: Inputs) -> Measures:
        """Return what reports are told of its metrics; a run keeps it."""
        return Measures()

    @classmethod
    def token_store(cls, config: Any, store: Store) -> Store:
        """Return the store whose tokens the model reads: `store`, or one that it refers to.

        What a run remembers of columns and vocabularies (`Facts`) is of that one, so that a run
        that has learned from entries reads any store with the same vocabularies.
        """
        return store

    @classmethod
    def vectors(cls, config: Any, store: Store) -> dict[str, Vectors]:
        """Return name → the vectors that the model reads under that name, of referred records."""
        return {}

    @classmethod
    def label_classes(cls, config: Any, store: Store) -> dict[str, tuple[str, ...]]:
        """Return the columns of labels that are learned → the names of their classes; a run keeps
        them."""
        return {}

    @classmethod
    def entry_rows(cls, config: Any) -> int:
        """Return the rows of an entry, of entries of several sizes about the most."""
        return 1

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """Return how a store is cut for training; `shards`: so many are mixed at a time, 0: all."""
        raise NotImplementedError

    def evaluation_rows(self, store: Store) -> Rows:
        """Return how a store is cut for evaluation: every token once."""
        return self.rows(store)

    def extra_columns(self, schema: Schema) -> list[str]:
        """Return the columns that `prepare` wants to see besides those that the model reads.

        One with a value a token comes in `Batch.columns`, one with a value a record in
        `Batch.values`. `schema`: of the store, and of that of its tokens.
        """
        return []

    @property
    def target_names(self) -> list[str]:
        """Names of the targets (B, T) of a prepared batch, for `example`."""
        return list(self.sizes)

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with its targets; random choices come from `batch.key`.

        Targets are what the task says: a value a position or a row, several a row, ids or
        fractions (`Batch.targets`).
        """
        raise NotImplementedError

    def count(self, batch: Batch) -> int:
        """Return what the summed loss of a prepared batch will be divided by."""
        return sum(int(np.count_nonzero(target >= 0)) for target in batch.targets.values())

    def nothing(self, batch: Batch, rows: Array) -> Batch:
        """Return a prepared batch of which some rows teach nothing; `rows`: (B,) bool.

        They fill up a batch where another process has more rows. They are in no entry (-1), and
        their targets are -1, fractions NaN; a task for which that is something to learn says
        otherwise.
        """
        targets = {name: target.copy() for name, target in batch.targets.items()}
        for target in targets.values():
            target[rows] = math.nan if target.dtype.kind == "f" else -1
        return dataclasses.replace(batch, targets=targets, entry=np.where(rows, -1, batch.entry))

    def idle(self, like: Tensors) -> Tensors:
        """Return a batch of one position that teaches nothing, in the form of another.

        A pass may be one of all processes, so a process that has no more rows passes this on.
        """
        return Tensors(
            columns={name: value[:1, :1] for name, value in like.columns.items()},
            document=torch.zeros_like(like.document[:1, :1]),
            position=torch.zeros_like(like.position[:1, :1]),
            whole=True,
            values={name: value[:1] for name, value in like.values.items()},
            targets={name: _no_target(target) for name, target in like.targets.items()},
            entry=None if like.entry is None else torch.full_like(like.entry[:1], -1),
        )

    def example(self, rows: int) -> Tensors:
        """Return a prepared batch of whole rows, of zeros, with which `--dry-run` finds the memory.

        A task whose targets are not (B, T) ids puts in its own.
        """
        ids = torch.zeros(rows, self.length, dtype=torch.int64)
        columns = dict.fromkeys(self.reads.embedded, ids)
        for name, width in self.reads.vectors.items():
            columns[name] = torch.zeros(rows, self.length, width)
        targets = dict.fromkeys(self.target_names, ids)
        return Tensors(columns, ids, ids, whole=True, targets=targets, entry=torch.arange(rows))

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss and sums for `report`, detached; one forward of the model.

        Of a task that compares: the loss of these entries among themselves.
        """
        if not self.compares:
            raise NotImplementedError
        results = self.act(batch)
        if batch.entry is not None:
            results["entry"] = batch.entry
        return self.compare(results.pop("vectors"), results)

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        """Return results of each row by name, (B, …), without a loss; one forward of the model.

        A task that compares gives `vectors` (B, …), which carry a gradient, and beside them what
        else `compare` wants to know of the rows.
        """
        raise NotImplementedError

    def compare(
        self, vectors: Tensor, results: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a whole step, summed over entries, and sums for `report`, detached.

        vectors: (N, …), what `act` gave of all micro-batches and processes, without the rows that
        teach nothing. `results`: its other results (N, …), and `entry` (N,) int64, which numbers
        the entries of the step from 0; rows of an entry are adjacent.
        """
        raise NotImplementedError

    def measure(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """Return metrics that are no sums, such as ranks, of all rows of an evaluation.

        results: as of `compare`, `vectors` among them, on the CPU; (N, …) of N rows in the order of
        the evaluation. Called where the task `collects`.
        """
        return {}

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this process beside weights and random states.

        Name → a small tensor, or what JSON can hold: copies, which later steps do not change. With
        another number of processes a run goes on without it.
        """
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `extra_state` returned."""

    @property
    def frame(self) -> Mapping[str, tuple[int, int]]:
        """The special tokens that stand around a record (`tasks.framing`); none by default."""
        return {}

    def at_targets(self, batch: Batch, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return values (B, T) of the positions of a prepared batch as values of its targets.

        For evaluations that are taken apart; by default targets stand at positions.
        """
        return dict(values)

    def whole_units(self, raw: Batch, batch: Batch) -> Array | None:
        """Return of each target the number of its instruction in its row; -1: it is not whole.

        `raw`: what the batch was prepared from, with the column `border`. None: it is not told.
        """
        return None

    def scored(self, batch: Tensors) -> tuple[dict[str, Tensor], dict[str, Scores]]:
        """Return the sums of `forward`, and the scores of each column that tokens are predicted of.

        Without a gradient; for `tokmill eval`, where the task `predicts_tokens`.
        """
        raise NotImplementedError

    @property
    def continues(self) -> bool:
        """Whether rows can be continued (`tokmill sample`): by the next token of all that it reads.

        `measures` says so, and such a task has a `head`.
        """
        return self.measures(self.config, self.reads).continues

    def head(self, column: str) -> Tensor:
        """Return the matrix (V, D) that makes logits of the next token's ids of hidden states."""
        raise NotImplementedError

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        """Return metrics from what `forward` or `compare` returned, added up over batches.

        `loss` is one of them. `bytes_per_token`: of the store, for tasks that measure in bits a
        byte; 0: not known.
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


def _no_target(target: Tensor) -> Tensor:
    one = target[:1] if target.ndim == 1 else target[:1, :1]
    return torch.full_like(one, math.nan if one.is_floating_point() else -1)


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
        entry=tensor(batch.entry),
    )


def perplexity(loss: float) -> float:
    """Return e^loss, infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf
