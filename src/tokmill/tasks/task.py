"""The training objective around a model: inputs, rows, targets, head, loss and metrics.

A task runs in two places. `rows`, `prepare`, `count` and `nothing` are numpy and run in the
loader's thread; `forward`, `act` and `compare` are torch and run on the engine's device.

A batch holds entries. An entry is one row, or several rows that belong together (`Batch.entry`).
Most tasks have a loss that is a sum over entries: `forward`. A task that compares the entries of a
step with each other sets `compares`. Its loss is `compare`, which gets the results of `act` for all
entries of the step.
"""

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokmill.base.errors import UsageError
from tokmill.feed.entries import Vectors
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows
from tokmill.models.heads import Pool
from tokmill.models.model import Group, Inputs, Model, Tensors
from tokmill.models.transformers.layers import Scores
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store
from tokmill.tasks.measures import Measures
from tokmill.tasks.task_inputs import Facts, store_inputs


class TaskConfig(Protocol):
    """The common part of the configuration of all tasks."""

    @property
    def length(self) -> int:
        """Positions T of a row that the model sees."""
        ...


class Task(nn.Module):
    """Wraps a model. Shapes: B rows, T positions, D width of the model, N rows of a whole step.

    `reads`: the inputs of the model. `sizes`: its columns of the store → the number of their ids.
    """

    Config: ClassVar[type[msgspec.Struct]]
    compares: ClassVar[bool] = False
    """Whether entries of a step are compared with each other: the loss is then `compare`."""
    loop: ClassVar[str] = "rows"
    """The training loop: a line of `plugins.LOOPS`."""
    predicts_tokens: ClassVar[bool] = False
    """Whether `scored` gives the score of each predicted token, for the tables of an evaluation."""
    predicted: ClassVar[str] = "next_token"
    """The name of the predicted tokens in the tables of an evaluation."""
    runs_without_numbers: ClassVar[bool] = True
    """Whether shapes alone decide what is computed, so that memory is measured without data."""
    places_by_value: ClassVar[bool] = False
    """Whether the values of tokens decide their positions (`placed`)."""
    collects: ClassVar[bool] = False
    """Whether an evaluation keeps the results of `act` of all rows and gives them to `measure`."""

    def __init__(self, config: TaskConfig, model: Model, inputs: Inputs) -> None:
        super().__init__()
        self.config: Any = config
        self.length, self.model, self.reads = config.length, model, inputs
        self.sizes = dict(inputs.ids)
        self.step = 0
        """The step of a training after which its weights were taken; 0: it was not loaded."""

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        """Return the inputs of the model; by default every column of ids of the store.

        `facts`: of the training store. A run is opened from `config` and `facts`, without its
        store.
        """
        return store_inputs(facts)

    @classmethod
    def measures(cls, config: Any, inputs: Inputs) -> Measures:
        """Return the description of the task's metrics for reports; it is saved in the run."""
        return Measures()

    @classmethod
    def token_store(cls, config: Any, store: Store) -> Store:
        """Return the store whose tokens the model reads: `store`, or one that it refers to.

        The columns and vocabularies that a run remembers (`Facts`) are those of this store. So a
        run that was trained on entries can read any store with the same vocabularies.
        """
        return store

    @classmethod
    def vectors(cls, config: Any, store: Store) -> dict[str, Vectors]:
        """Return input name → the vectors of referred records that the model reads."""
        return {}

    @classmethod
    def label_classes(cls, config: Any, store: Store) -> dict[str, tuple[str, ...]]:
        """Return column of labels → the names of its classes; they are saved in the run."""
        return {}

    @classmethod
    def pool_of(cls, config: Any) -> Pool:
        """Return how hidden states become one vector of a record (`tokmill embed`)."""
        return "mean"

    @classmethod
    def entry_rows(cls, config: Any) -> int:
        """Return the number of rows of an entry; if sizes differ, about the largest."""
        return 1

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """Return the rows for training; `shards`: how many are mixed at a time, 0: all."""
        raise NotImplementedError

    def evaluation_rows(self, store: Store) -> Rows:
        """Return the rows for an evaluation: every token once."""
        return self.rows(store)

    def extra_columns(self, schema: Schema) -> list[str]:
        """Return the columns that `prepare` needs besides the inputs of the model.

        Columns with a value for each token come in `Batch.columns`, columns with a value for each
        record in `Batch.values`. `schema`: of the store and of its token store.
        """
        return []

    def as_inputs(self, columns: Mapping[str, Array], document: Array) -> dict[str, Array]:
        """Return the columns of rows as the model reads them: name → (B, T) or (B, T, W).

        For a task whose model reads vectors. `columns`: the token columns of `extra_columns`, and
        the vectors; `document`: as in `Batch`.
        """
        return dict(columns)

    def predicts_first(self, store: Store) -> bool:
        """Say whether an evaluation predicts the first token of a record too, like the others."""
        return False

    def loses_text(self, store: Store) -> str:
        """Return why the predicted tokens of a store are less than its text, or ""."""
        return ""

    @property
    def target_names(self) -> list[str]:
        """Names of the targets (B, T) of a prepared batch, for `example`."""
        return list(self.sizes)

    def placed(self, batch: Batch) -> Batch:
        """Return the batch with all its columns at the positions of `prepare`, for `tokmill trace`.

        Positions without a token of the store are 0. A task that moves tokens overrides it; other
        columns are only there if it `places_by_value`.
        """
        return batch

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with its targets; random choices come from `batch.key`.

        The task decides what its targets are: one for each position, one or several for each row,
        ids or fractions (`Batch.targets`).
        """
        raise NotImplementedError

    def count(self, batch: Batch) -> int:
        """Return the divisor of the summed loss of a prepared batch."""
        return sum(int(np.count_nonzero(target >= 0)) for target in batch.targets.values())

    def nothing(self, batch: Batch, rows: Array) -> Batch:
        """Return a prepared batch with some rows ignored by the loss; `rows`: (B,) bool.

        Such rows fill up a batch if another process has more rows. They are in no entry (-1), and
        their targets are -1, or NaN for fractions. A task that learns from these values overrides
        this.
        """
        targets = {name: target.copy() for name, target in batch.targets.items()}
        for target in targets.values():
            target[rows] = math.nan if target.dtype.kind == "f" else -1
        return dataclasses.replace(batch, targets=targets, entry=np.where(rows, -1, batch.entry))

    def idle(self, like: Tensors) -> Tensors:
        """Return a batch of one ignored position, with the inputs and targets of another batch.

        All processes may have to take part in a pass. A process without more rows then passes this.
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
        """Return a prepared batch of whole rows of zeros, with which `--dry-run` measures memory.

        A task overrides this if its targets are not (B, T) ids.
        """
        ids = torch.zeros(rows, self.length, dtype=torch.int64)
        columns = dict.fromkeys(self.reads.embedded, ids)
        for name, width in self.reads.vectors.items():
            columns[name] = torch.zeros(rows, self.length, width)
        targets = dict.fromkeys(self.target_names, ids)
        return Tensors(columns, ids, ids, whole=True, targets=targets, entry=torch.arange(rows))

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss and sums for `report`, detached; one forward of the model.

        If the task compares entries, it compares these entries only.
        """
        if not self.compares:
            raise NotImplementedError
        results = self.act(batch)
        if batch.entry is not None:
            results["entry"] = batch.entry
        return self.compare(results.pop("vectors"), results)

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        """Return results of each row by name, (B, …), without a loss; one forward of the model.

        A task that compares entries returns `vectors` (B, …) with a gradient, and all other values
        of the rows that `compare` needs.
        """
        raise NotImplementedError

    def compare(
        self, vectors: Tensor, results: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a whole step, summed over entries, and sums for `report`, detached.

        `vectors`: (N, …), from `act`, of all micro-batches and processes, without ignored rows.
        `results`: the other results of `act`, (N, …), and `entry` (N,) int64, which numbers the
        entries of the step from 0; rows of an entry are adjacent.
        """
        raise NotImplementedError

    def measure(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """Return metrics that are not sums, such as ranks, of all rows of an evaluation.

        `results`: as in `compare`, with `vectors`, on the CPU; (N, …) of N rows in the order of the
        evaluation. Called only if the task `collects`.
        """
        return {}

    def tables(self, results: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what `tokmill eval` shows besides, of the same results, as values of JSON."""
        return {}

    def start_from(self, place: Path) -> list[str] | None:
        """Take the weights of a run with another task in a way of its own, and return notes on it.

        None: weights with equal names are taken. `place`: as in `training.runs.weights`.
        """
        return None

    def extra_state(self) -> dict[str, Any]:
        """Return the state of this process for a checkpoint, besides weights and random states.

        Name → a small tensor or a JSON value. They are copies, which later steps do not change. A
        run that continues with another number of processes does not get this state.
        """
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `extra_state` returned."""

    @property
    def frame(self) -> Mapping[str, tuple[int, int]]:
        """The special tokens that stand around a record (`task_inputs`); none by default."""
        return {}

    def at_targets(self, batch: Batch, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return values (B, T) of the positions of a prepared batch, as values of its targets.

        For the tables of an evaluation; by default there is a target at each position.
        """
        return dict(values)

    def scored(self, batch: Tensors) -> tuple[dict[str, Tensor], dict[str, Scores]]:
        """Return the sums of `forward`, and the scores of each predicted column.

        Without a gradient; for `tokmill eval` of a task that `predicts_tokens`.
        """
        raise NotImplementedError

    @property
    def continues(self) -> bool:
        """Whether the task can continue rows (`tokmill sample`): it predicts all that it reads.

        `measures` says so, and such a task has a `head`.
        """
        return self.measures(self.config, self.reads).continues

    def head(self, column: str) -> Tensor:
        """Return the matrix (V, D) that maps hidden states to logits of the next token."""
        raise NotImplementedError

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        """Return metrics from the sums of `forward` or `compare`, added up over batches.

        `loss` is one of them. `bytes_per_token`: of the store, for tasks that report bits per
        byte; 0: not known.
        """
        return {name: value / max(count, 1) for name, value in sums.items()}

    def param_groups(self, weight_decay: float) -> list[Group]:
        """Return the parameter groups of the model and of the task's heads."""
        return self.model.param_groups(weight_decay)

    def flops_per_token(self, length: int) -> float:
        """Return the floating point operations of a training step per token, heads included."""
        return self.model.flops_per_token(length)

    def parameter_count(self) -> int:
        """Return the number of weights; shared weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())


def _no_target(target: Tensor) -> Tensor:
    one = target[:1] if target.ndim == 1 else target[:1, :1]
    return torch.full_like(one, math.nan if one.is_floating_point() else -1)


def borders(document: Array) -> Array:
    """Return (documents + 1,) int64: where documents begin in the concatenated rows, and B · T.

    A run of padding counts as a document. Attention kernels call this `cu_seqlens`.
    """
    first = np.ones(document.shape, bool)
    np.not_equal(document[:, 1:], document[:, :-1], out=first[:, 1:])
    return np.append(np.flatnonzero(first), document.size)


def positions(document: Array, ends: Array | None = None) -> Array:
    """Return (B, T) int64: the distance of each token from its document's first token in the row.

    `ends`: the `borders` of the rows, if they are known already.
    """
    length, ends = document.shape[1], borders(document) if ends is None else ends
    begins = np.repeat(ends[:-1] % length, np.diff(ends)).reshape(document.shape)
    return np.subtract(np.arange(length), begins, out=begins)


def is_whole(document: Array) -> bool:
    # Documents are numbered from left to right, and padding is on the right: both ends suffice.
    first, last = document[:, 0], document[:, -1]
    return bool((first == last).all() and (first >= 0).all())


def to_tensors(batch: Batch, device: torch.device) -> Tensors:
    """Return a prepared batch as tensors for a device; numbers become int64, fractions float32.

    They are in CPU memory, which is pinned if a CUDA device will copy them.
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
    """Return e^loss, or infinity if it is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


def same_classes(parts: Sequence[tuple[Store, tuple[str, ...]]]) -> tuple[str, ...]:
    """Return the classes of several stores; the longest list, of which the others are a beginning.

    Raises `UsageError` if a number means different classes in two stores.
    """
    longest = max((names for _, names in parts), key=len)
    for store, names in parts:
        check_classes(store, names, longest, "another store has")
    return longest


def check_classes(store: Store, names: Sequence[str], learned: Sequence[str], who: str) -> None:
    """Refuse a store whose classes are not the known classes or the first of them."""
    if list(names) != list(learned[: len(names)]):
        shown = [", ".join(some[:8]) + ", …" * (len(some) > 8) for some in (names, learned)]
        raise UsageError(
            f"its classes are {shown[0]}; {who} {shown[1]}",
            where=str(store.path),
            hint="number the classes as the run did"
            if store.manifest.source != "tsv" and all(map(str.isdecimal, learned))
            else "a store with the same classes in the same order: `tokmill build tsv … --label "
            f"{' --label '.join(map(shlex.quote, learned[:8]))}`",
        )
