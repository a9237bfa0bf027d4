"""Vectors of records: hidden states of a model, pooled over all tokens of a record.

Shapes: B rows, T positions, D width of the model.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError
from tokmill.models.heads import Pool, Segment, of_sets, pool_segments
from tokmill.models.model import Inputs, Recurrent, Tensors, join_rows, take_rows
from tokmill.store.gather import Spans
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.tasks.task import Task, borders
from tokmill.tasks.task_inputs import is_framed
from tokmill.training.engines.devices.device import Precision

Ids = Mapping[str, Sequence[int]]
"""Column → the ids of a row."""


class Reading(Protocol):
    """Rows of ids that grow while a model reads them."""

    def begin(self, rows: Sequence[Ids]) -> Tensor:
        """Read new rows, the longest first; return the hidden states (B, D) of their last ids."""
        ...

    def next(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Read the next id of each row, (B, 1); return their hidden states (B, D)."""
        ...

    def keep(self, rows: Tensor) -> None: ...


def reading(task: Task) -> Reading:
    """Return the way in which the model of a task reads.

    Raises `TokmillError` for a model that is not causal: it cannot predict the next id.
    """
    if not task.model.causal:
        raise TokmillError(
            "the model is not causal, so it cannot predict the next id",
            where="model.kind",
            hint="sample a run of a causal model, such as decoder or rwkv7",
        )
    return Carried(task) if isinstance(task.model, Recurrent) else Windows(task)


def window(task: Task) -> int:
    """Return the largest number of last ids that a model reads; 0: no limit."""
    if isinstance(task.model, Recurrent):
        return 0
    return min(task.length, task.model.longest or task.length)


def flush_right(
    rows: Sequence[Ids], names: Sequence[str], device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """Return name → (B, T) ids aligned to the right, padded with 0, and the rows' starts (B,)."""
    lengths = [len(row[names[0]]) for row in rows]
    longest = max(lengths)
    columns = {
        name: torch.tensor([[0] * (longest - len(row[name])) + list(row[name]) for row in rows])
        for name in names
    }
    starts = longest - torch.tensor(lengths)
    return {name: ids.to(device) for name, ids in columns.items()}, starts


class Carried:
    """Reads with a recurrent state: time and memory of an id do not depend on its position."""

    def __init__(self, task: Task) -> None:
        assert isinstance(task.model, Recurrent)
        self.model, self.piece, self.names = task.model, task.length, list(task.sizes)
        self.device = next(task.parameters()).device
        self.state: Any = None

    def begin(self, rows: Sequence[Ids]) -> Tensor:
        """Read new rows, at most `task.length` positions at a time; shorter ones join later."""
        columns, starts = flush_right(rows, self.names, self.device)
        length = next(iter(columns.values())).shape[1]
        cuts = sorted({*starts.tolist(), *range(0, length, self.piece), length})
        hidden, joined = torch.zeros(0), 0
        for begin, end in itertools.pairwise(cuts):
            if new := int((starts <= begin).sum()) - joined:
                state = self.model.start(new)
                self.state = join_rows(self.state, state) if joined else state
                joined += new
            piece = {name: ids[:joined, begin:end] for name, ids in columns.items()}
            hidden, self.state = self.model.run(piece, self.state)
        return hidden[:, -1]

    def next(self, columns: Mapping[str, Tensor]) -> Tensor:
        hidden, self.state = self.model.run(columns, self.state)
        return hidden[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.state = take_rows(self.state, rows.to(self.device))


class Windows:
    """Reads the last `size` ids of each row: as many positions as in training.

    Until a row is longer, each id is read only once if the model has a cache (`cached`). After that
    the window slides, and all its ids are read again for each new one: the cache depends on ids
    that are no longer in the window.
    """

    def __init__(self, task: Task) -> None:
        self.model, self.size, self.names = task.model, window(task), list(task.sizes)
        self.device = next(task.parameters()).device
        self.cached = task.model.cached()
        self.seen: dict[str, Tensor] = {}
        """Name → ids (B, T) of the rows, aligned to the right."""
        self.lengths = torch.zeros(0, dtype=torch.long)
        """Number of ids of each row, in falling order."""
        self.sliding = 0
        """Number of rows with more ids than the window; they come first."""

    def begin(self, rows: Sequence[Ids]) -> Tensor:
        cut = [{name: row[name][-self.size :] for name in self.names} for row in rows]
        self.seen, starts = flush_right(cut, self.names, self.device)
        self.lengths = torch.tensor([len(row[self.names[0]]) for row in rows])
        self.sliding = int((self.lengths > self.size).sum())
        if self.cached is None:
            return self._reread(len(rows))
        parts = [self._reread(self.sliding)] if self.sliding else []
        if self.sliding < len(rows):
            columns = {name: ids[self.sliding :] for name, ids in self.seen.items()}
            starts = starts[self.sliding :]
            least = int(starts.min())
            columns = {name: ids[:, least:] for name, ids in columns.items()}
            parts.append(self.cached.begin(columns, starts - least))
        return torch.cat(parts)

    def next(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Read the next ids, with the cache or with the whole window."""
        self.seen = {
            name: torch.cat([ids, columns[name]], 1)[:, -self.size :]
            for name, ids in self.seen.items()
        }
        self.lengths += 1
        rows, before = len(self.lengths), self.sliding
        if self.cached is None:
            return self._reread(rows)
        self.sliding = int((self.lengths > self.size).sum())
        if before < self.sliding < rows:
            self.cached.keep(torch.arange(self.sliding - before, rows - before))
        parts = [self._reread(self.sliding)] if self.sliding else []
        if self.sliding < rows:
            parts.append(self.cached.next({name: c[self.sliding :] for name, c in columns.items()}))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def keep(self, rows: Tensor) -> None:
        before, self.lengths = self.sliding, self.lengths[rows]
        self.sliding = int((self.lengths > self.size).sum())
        self.seen = {name: ids[rows.to(self.device)] for name, ids in self.seen.items()}
        if self.cached is not None and self.sliding < len(rows):
            self.cached.keep(rows[self.sliding :] - before)

    def _reread(self, rows: int) -> Tensor:
        """Read all ids of the first rows again; return the hidden states of their last ids."""
        lengths = self.lengths[:rows].clamp(max=self.size).to(self.device)
        longest = int(lengths[0])
        place = torch.arange(longest, device=self.device)
        # Aligned to the left, so that padding comes after the row.
        last = next(iter(self.seen.values())).shape[1] - 1
        source = (place + last + 1 - lengths[:, None]).clamp(max=last)
        columns = {name: ids[:rows].gather(1, source) for name, ids in self.seen.items()}
        places = place.expand(rows, -1)
        hidden = self.model(Tensors(columns, torch.zeros_like(places), places, whole=True))
        return hidden[torch.arange(rows, device=self.device), lengths - 1]


BATCH_TOKENS = 16_384
"""Positions per batch."""


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
        device, length = self.precision.device, self.segment_length
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
    def segment_length(self) -> int:
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
