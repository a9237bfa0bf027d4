"""Vectors of records: hidden states of a model, pooled over all tokens of a record.

Shapes: B rows, T positions, D width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError
from tokmill.models.heads import Pool, Segment, of_sets, pool_segments
from tokmill.models.model import Inputs, Recurrent, Tensors, take_rows
from tokmill.store.schema import Array
from tokmill.store.store import Spans, Store
from tokmill.tasks.task import Task, borders
from tokmill.tasks.task_inputs import is_framed
from tokmill.training.engines.devices.device import Precision

BATCH_TOKENS = 16_384
"""Positions that are read at a time."""


class Vectors:
    """Makes the vectors of records with the model of a task.

    A record longer than `task.length` is read in segments of that many tokens. A recurrent model
    carries its state from one segment to the next; other models read each segment independently.
    Records are sorted by length and read in groups of at most `batch_tokens` positions, or one by
    one if they are longer; up to rounding, vectors do not depend on this.

    Records without the special tokens with which the task was trained (`Task.frame`) get them
    around each segment; the pooling leaves those out. Columns that a task makes, such as `segment`,
    are 0 everywhere, or as the store has them.

    With pool = "signature" a model of sets makes the vector of a whole record itself.

    Raises `UsageError` for a model that reads vectors and makes no signature.
    """

    def __init__(
        self, task: Task, precision: Precision, pool: Pool, batch_tokens: int = BATCH_TOKENS
    ) -> None:
        if task.reads.vectors and pool != "signature":
            refuse_vectors(task.reads, "task")
        if pool == "signature":
            of_sets(task.model)
        self.task, self.model = task.to(precision.device).eval(), task.model
        self.precision, self.pool, self.batch_tokens = precision, pool, batch_tokens
        self.width = task.model.dim
        self.frame: Mapping[str, tuple[int, int]] = {}
        """Column → the special tokens around records; known of a store."""

    def fill(self, store: Store, number: int, vectors: Array) -> Iterator[int]:
        """Fill the vectors of a shard's records, (records, D) float32; of empty records with 0.

        Yields the number of tokens of each finished batch of records, the longest first. Raises
        `TokmillError` if the shard has ids that the model does not know, so that it is damaged.
        """
        first = sum(entry.records for entry in store.shards[:number])
        lengths = np.diff(store.shard(number)["offsets"].astype(np.int64))
        vectors[lengths == 0] = 0
        self.frame = {} if is_framed(store, self.task.frame) else self.task.frame
        extra = [name for name in self.task.reads.made if name in store.token_columns]
        more: list[str] = []
        read = self.task.vectors(self.task.config, store)
        if self.task.reads.vectors:
            wanted = self.task.extra_columns(store.schema)
            more = [name for name in wanted if name in store.token_columns]
        for records in groups(lengths, self.batch_tokens):
            here = lengths[records]
            columns = read_rows(store, first + records, here, [*self.task.sizes, *extra, *more])
            self._check_ids(store, columns)
            if self.task.reads.vectors:
                document = np.where(np.arange(int(here[0])) < here[:, None], 0, -1)
                columns |= {name: one.of(columns, document) for name, one in read.items()}
                columns = self.task.as_inputs(columns, document)
            with torch.no_grad():
                vectors[records] = self.pooled(columns, here).cpu().numpy()
            yield int(here.sum())

    def pooled(self, columns: dict[str, Array], lengths: Array) -> Tensor:
        """Return the vectors (B, D) of rows, from name → (B, longest) ids.

        `lengths`: int64 (B,), in falling order, at least 1.
        """
        if self.pool == "signature":
            return self.signature(columns, lengths)
        like = torch.empty(len(lengths), self.width, device=self.precision.device)
        return pool_segments(self.segments(columns, lengths), like, self.pool)

    def signature(self, columns: dict[str, Array], lengths: Array) -> Tensor:
        """Return the vectors of rows that a model of sets makes itself."""
        device = self.precision.device
        tensors = {
            name: torch.from_numpy(value if value.dtype == np.float32 else value.astype(np.int64))
            for name, value in columns.items()
        }
        for name in self.task.reads.made:
            tensors.setdefault(name, torch.zeros(len(lengths), int(lengths[0]), dtype=torch.int64))
        tensors = {name: value.to(device) for name, value in tensors.items()}
        with self.precision.autocast():
            batch = side_by_side(tensors, lengths, causal=False)
            return of_sets(self.model).signature(batch).float()

    def segments(self, columns: dict[str, Array], lengths: Array) -> Iterator[Segment]:
        """Yield the hidden states of rows, a segment at a time, without rows that have ended."""
        device, length = self.precision.device, self.held
        model = self.model if isinstance(self.model, Recurrent) else None
        state = model.start(len(lengths)) if model else None
        for start in range(0, int(lengths[0]), length):
            rows = int(np.count_nonzero(lengths > start))
            count = np.minimum(lengths[:rows] - start, length)
            part = {
                name: torch.from_numpy(ids[:rows, start : start + int(count[0])].astype(np.int64))
                for name, ids in columns.items()
            }
            framed = with_frame(part, count, self.frame)
            # A record alone is the first span of a row (`tasks.inputs.SEGMENT`).
            first = next(iter(framed.values()))
            extra = self.task.reads.made
            framed |= {name: torch.zeros_like(first) for name in extra if name not in framed}
            framed = {name: ids.to(device) for name, ids in framed.items()}
            with self.precision.autocast():
                if model:
                    hidden, state = model.run(framed, take_rows(state, slice(rows)))
                else:
                    sizes = count + 2 * bool(self.frame)
                    hidden = self.model(side_by_side(framed, sizes, self.model.causal))
            if self.frame:
                hidden = hidden[:, 1:-1]
            yield hidden, torch.from_numpy(count).to(device)

    @property
    def held(self) -> int:
        """Tokens of a segment, without its special tokens."""
        return self.task.length - 2 * bool(self.frame)

    def _check_ids(self, store: Store, columns: dict[str, Array]) -> None:
        for name, size in self.task.sizes.items():
            if int(columns[name].max()) >= size:
                raise TokmillError(
                    f"the column {name!r} holds the id {columns[name].max()}; the run knows 0 to "
                    f"{size - 1}: a shard is damaged",
                    where=str(store.path),
                    hint=f"`tokmill store validate {store.path}` finds it",
                )


def refuse_vectors(reads: Inputs, where: str) -> None:
    """Raise `UsageError`: a model that reads vectors makes none of records."""
    raise UsageError(
        f"the model reads the vectors {', '.join(reads.vectors)}, but only a model that reads ids, "
        "or a model of sets, can make vectors of records",
        where=where,
        hint="embed with a run of another task",
    )


def with_frame(
    columns: dict[str, Tensor], lengths: Array, frame: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """Return rows (B, T + 2) with a first and a last special token around what counts of them.

    `lengths`: (B,) int64, at least 1. `frame`: column → both tokens; empty: rows as they are.
    """
    if not frame:
        return dict(columns)
    end = torch.from_numpy(lengths)[:, None] + 1
    framed = {}
    for name, ids in columns.items():
        rows = torch.nn.functional.pad(ids, (1, 1))
        rows[:, 0] = frame[name][0]
        framed[name] = rows.scatter(1, end, frame[name][1])
    return framed


def side_by_side(columns: dict[str, Tensor], lengths: Array, causal: bool) -> Tensors:
    """Return rows (B, T), each from its first position on, as a batch for a model.

    `lengths`: (B,) int64; positions after it are padding. A `causal` model does not read padding
    that comes after a row, so no mask is needed. For other models padding is masked.
    """
    some = next(iter(columns.values()))
    first = torch.zeros(some.shape[:2], dtype=torch.int64, device=some.device)
    place = torch.arange(first.shape[1], device=first.device).expand_as(first)
    if causal or (lengths == first.shape[1]).all():
        return Tensors(columns, first, place, whole=True)
    number = np.where(np.arange(first.shape[1]) < lengths[:, None], 0, -1)
    document = torch.from_numpy(number).to(first.device)
    ends = torch.from_numpy(borders(number).astype(np.int32)).to(first.device)
    return Tensors(columns, document, place, whole=False, cu_seqlens=ends)


def groups(lengths: Array, batch_tokens: int) -> Iterator[Array]:
    """Yield the numbers of records that are read together (int64), the longest first.

    A group has at most `batch_tokens` positions including padding, or is a single record. Records
    without tokens are in no group.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[: np.count_nonzero(lengths)]
    start = 0
    while start < len(order):
        stop = start + max(1, batch_tokens // int(lengths[order[start]]))
        yield order[start:stop]
        start = stop


def read_rows(store: Store, records: Array, lengths: Array, names: list[str]) -> dict[str, Array]:
    """Return the token columns of records as rows, (records, longest), padded with 0."""
    count = len(records)
    columns: dict[str, Array] = {}
    nothing = np.zeros(count, np.int64)
    spans = Spans(np.arange(count), records, nothing, nothing, lengths)
    longest = int(lengths[0])
    store.fill(spans, longest, columns, np.zeros((count, longest), np.int32), count, names)
    return columns
