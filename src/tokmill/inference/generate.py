"""Ids that follow ids: many rows side by side, each as if it were alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tokmill.inference.draw import Drawing, choose
from tokmill.inference.reading import Ids, reading, window
from tokmill.models.matmul import product_for
from tokmill.tasks.task import Task

End = Literal["eot", "stop", "tokens"]
"""Why a row ended: the end of a document, a text that ends it, or as many ids as were asked for."""
FEW_PRODUCTS = 1 << 17
"""Multiplications of a matrix with all rows below which a second thread costs more than it does."""


@dataclass
class Row:
    """Ids to continue, and what followed."""

    prompt: int
    """Number of the prompt."""
    sample: int
    """Number of this continuation of it."""
    ids: Ids
    made: dict[str, list[int]] = field(default_factory=dict)
    end: End = "tokens"
    out_of_sight: int = 0
    """Ids at the front that the model no longer saw when it chose the last one."""

    @property
    def length(self) -> int:
        """Ids of the prompt."""
        return len(next(iter(self.ids.values())))


@torch.inference_mode()
def continue_rows(
    task: Task,
    rows: Sequence[Row],
    tokens: int,
    how: Drawing,
    *,
    sizes: Mapping[str, int | None],
    ends: Mapping[str, Collection[int] | None],
    stopped: Callable[[Mapping[str, Sequence[int]]], bool] | None = None,
) -> None:
    """Fill `made`, `end` and `out_of_sight` of rows: at most so many ids of each column.

    Args:
        task: predicts every column that it reads.
        rows: prompts of any lengths, at least 1; the order makes no difference.
        tokens: most ids of a row.
        how: an id is chosen.
        sizes: column → ids below this are drawn alone, as a model may have more rows than its
            vocabulary has ids; None: all.
        ends: column → the ids that end a row, and are not part of it.
        stopped: says of a row's made ids whether it ends with them.

    A recurrent model reads all ids; any other sees the last `window(task)`: as far back as it was
    trained. Columns are drawn on their own, as each has a head of its own. Raises `TokmillError`
    where logits are no numbers.
    """
    names = list(task.sizes)
    for row in rows:
        row.made, row.end, row.out_of_sight = {name: [] for name in names}, "tokens", 0
    alive = sorted(rows, key=lambda row: (-row.length, row.prompt, row.sample)) if tokens else []
    if not alive:
        return
    task.eval()
    # A prompt with several samples is read once.
    first = {row.prompt: row for row in reversed(alive)}
    distinct = [row for row in alive if first[row.prompt] is row]
    place = {row.prompt: number for number, row in enumerate(distinct)}
    reader = reading(task)
    numbers = [how.numbers(row.prompt, row.sample) for row in alive]
    seen = {name: Seen.of(alive, name, task, how) for name in names}
    with threads_for(task, len(alive)):
        hidden = reader.begin([row.ids for row in distinct])
        if len(distinct) < len(alive):
            copies = torch.tensor([place[row.prompt] for row in alive])
            reader.keep(copies)
            hidden = hidden[copies.to(hidden.device)]
        for count in range(1, tokens + 1):
            chosen = {
                name: choose(
                    logits_of(task, hidden, name)[:, : sizes[name]], how, numbers, seen[name].mask
                )
                for name in names
            }
            values = {name: ids.tolist() for name, ids in chosen.items()}
            kept = []
            for number, row in enumerate(alive):
                if any(values[name][number] in (ends[name] or ()) for name in names):
                    row.end = "eot"
                    continue
                for name in names:
                    row.made[name].append(values[name][number])
                if stopped is not None and stopped(row.made):
                    row.end = "stop"
                elif count < tokens:
                    kept.append(number)
            if not kept:
                break
            if len(kept) < len(alive):
                which = torch.tensor(kept)
                reader.keep(which)
                alive = [alive[number] for number in kept]
                numbers = [numbers[number] for number in kept]
                here = which.to(hidden.device)
                chosen = {name: ids[here] for name, ids in chosen.items()}
                seen = {name: one.keep(here) for name, one in seen.items()}
            for name, ids in chosen.items():
                seen[name].add(ids)
            hidden = reader.next({name: ids[:, None] for name, ids in chosen.items()})
    if size := window(task):
        for row in rows:
            # The last id was chosen from those before it, whether it is kept or ended the row.
            before = row.length + len(row.made[names[0]]) - (row.end != "eot")
            row.out_of_sight = max(0, before - size)


def logits_of(task: Task, hidden: Tensor, name: str) -> Tensor:
    """Return the logits of a column, (B, V) from hidden states (B, D), for shapes that recur."""
    weight = task.head(name)
    return product_for(hidden, weight)(hidden, weight)


class Seen:
    """Which ids of a column each row has, where the drawing asks for it."""

    def __init__(self, mask: Tensor | None) -> None:
        self.mask = mask

    @classmethod
    def of(cls, rows: Sequence[Row], name: str, task: Task, how: Drawing) -> Seen:
        """Return it for the prompts of rows."""
        if how.repetition_penalty == 1:
            return cls(None)
        mask = torch.zeros(len(rows), task.sizes[name], dtype=torch.bool)
        for number, row in enumerate(rows):
            mask[number, torch.tensor(row.ids[name], dtype=torch.long)] = True
        return cls(mask.to(next(task.parameters()).device))

    def add(self, ids: Tensor) -> None:
        """Take note of an id of each row (B,)."""
        if self.mask is not None:
            self.mask.scatter_(1, ids[:, None], True)

    def keep(self, rows: Tensor) -> Seen:
        """Return it for some rows."""
        return Seen(None if self.mask is None else self.mask[rows])


@contextlib.contextmanager
def threads_for(task: Task, rows: int) -> Iterator[None]:
    """Compute in one thread where products are too small to share."""
    before = torch.get_num_threads()
    largest = max(weight.numel() for weight in task.model.parameters() if weight.ndim == 2)
    blocks = [p.numel() for name, p in task.model.named_parameters() if "blocks" in name]
    if max(blocks, default=largest) * rows < FEW_PRODUCTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
