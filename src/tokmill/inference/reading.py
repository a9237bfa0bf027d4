"""Rows of ids that a model reads side by side, each as if it were alone (up to rounding).

Shapes: B rows, T positions, D width of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tokmill.errors import TokmillError
from tokmill.models.model import Recurrent, Tensors, join_rows, take_rows
from tokmill.tasks.task import Task

Ids = Mapping[str, Sequence[int]]
"""Column → the ids of a row."""


class Reading(Protocol):
    """Rows that are read on."""

    def begin(self, rows: Sequence[Ids]) -> Tensor:
        """Read new rows, the longest first; return the hidden states (B, D) of their last ids."""
        ...

    def next(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states (B, D) of the ids (B, 1) that come next in each row."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone: int64 numbers in rising order; one may come repeatedly."""
        ...


def reading(task: Task) -> Reading:
    """Return how the model of a task reads on.

    Raises `TokmillError` for a model that looks ahead: it cannot say what comes next.
    """
    if not task.model.causal:
        raise TokmillError(
            "the model looks ahead, so it cannot say what comes next",
            where="model.kind",
            hint="sample a run of a causal model, such as decoder or rwkv7",
        )
    return Carried(task) if isinstance(task.model, Recurrent) else Windows(task)


def window(task: Task) -> int:
    """Return how many ids a model sees at most, the last ones; 0: all, however many."""
    if isinstance(task.model, Recurrent):
        return 0
    return min(task.length, task.model.longest or task.length)


def flush_right(
    rows: Sequence[Ids], names: Sequence[str], device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """Return name → (B, T) ids with 0 in front of shorter rows, and where each row begins (B,)."""
    lengths = [len(row[names[0]]) for row in rows]
    longest = max(lengths)
    columns = {
        name: torch.tensor([[0] * (longest - len(row[name])) + list(row[name]) for row in rows])
        for name in names
    }
    starts = longest - torch.tensor(lengths)
    return {name: ids.to(device) for name, ids in columns.items()}, starts


class Carried:
    """Reads with a state: in the same time and memory for each id, however many were before."""

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
        """Read one id of each row."""
        hidden, self.state = self.model.run(columns, self.state)
        last: Tensor = hidden[:, -1]
        return last

    def keep(self, rows: Tensor) -> None:
        """Keep the states of some rows."""
        self.state = take_rows(self.state, rows.to(self.device))


class Windows:
    """Reads the last `size` ids of each row: the positions that the model was trained with.

    Until a row has more than these, each id is read once where the model can do that (`cached`).
    From then on the window slides, and all ids in it are read anew each time: what was kept of them
    depends on ids that are out of sight now.
    """

    def __init__(self, task: Task) -> None:
        self.model, self.size, self.names = task.model, window(task), list(task.sizes)
        self.device = next(task.parameters()).device
        self.cached = task.model.cached()
        self.seen: dict[str, Tensor] = {}
        """Name → ids (B, T) of the rows, flush right."""
        self.lengths = torch.zeros(0, dtype=torch.long)
        """Ids of each row, falling."""
        self.sliding = 0
        """How many rows, the first ones, have more ids than the window."""

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
        """Read on: with what was kept, or the whole window."""
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
        """Return the hidden states of the first rows, all of whose ids are read again."""
        lengths = self.lengths[:rows].clamp(max=self.size).to(self.device)
        longest = int(lengths[0])
        place = torch.arange(longest, device=self.device)
        # Flush left: what stands behind a row's end comes after all that counts.
        last = next(iter(self.seen.values())).shape[1] - 1
        source = (place + last + 1 - lengths[:, None]).clamp(max=last)
        columns = {name: ids[:rows].gather(1, source) for name, ids in self.seen.items()}
        places = place.expand(rows, -1)
        hidden = self.model(Tensors(columns, torch.zeros_like(places), places, whole=True))
        ends: Tensor = hidden[torch.arange(rows, device=self.device), lengths - 1]
        return ends
