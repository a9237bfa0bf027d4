"""Rows of ids that a model reads in a batch; each result is as if the row were alone (up to
rounding).

Shapes: B rows, T positions, D width of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.models.model import Recurrent, Tensors, join_rows, take_rows
from tokmill.tasks.task import Task

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

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows: int64 numbers in rising order, which may be repeated."""
        ...


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
        last: Tensor = hidden[:, -1]
        return last

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
        """Read the end of new rows."""
        cut = [{name: row[name][-self.size :] for name in self.names} for row in rows]
        self.seen, starts = flush_right(cut, self.names, self.device)
        self.lengths = torch.tensor([len(row[self.names[0]]) for row in rows])
        self.sliding = int((self.lengths > self.size).sum())
        if self.cached is None:
            return self._anew(len(rows))
        parts = [self._anew(self.sliding)] if self.sliding else []
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
            return self._anew(rows)
        self.sliding = int((self.lengths > self.size).sum())
        if before < self.sliding < rows:
            self.cached.keep(torch.arange(self.sliding - before, rows - before))
        parts = [self._anew(self.sliding)] if self.sliding else []
        if self.sliding < rows:
            parts.append(self.cached.next({name: c[self.sliding :] for name, c in columns.items()}))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def keep(self, rows: Tensor) -> None:
        """Keep some rows."""
        before, self.lengths = self.sliding, self.lengths[rows]
        self.sliding = int((self.lengths > self.size).sum())
        self.seen = {name: ids[rows.to(self.device)] for name, ids in self.seen.items()}
        if self.cached is not None and self.sliding < len(rows):
            self.cached.keep(rows[self.sliding :] - before)

    def _anew(self, rows: int) -> Tensor:
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
        ends: Tensor = hidden[torch.arange(rows, device=self.device), lengths - 1]
        return ends
