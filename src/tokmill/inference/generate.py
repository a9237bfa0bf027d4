"""Continues many rows of ids in a batch; each result is as if the row were alone."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.inference.drawing import Drawing, Numbers
from tokmill.inference.vectors import Ids, Reading, reading, window
from tokmill.models.transformers.layers import product_for
from tokmill.tasks.task import Task

End = Literal["eot", "tokens"]
"""Why a row ended: the end of a document, or the largest number of ids."""
FEW_PRODUCTS = 1 << 17
"""With fewer multiplications of a matrix with all rows, a second thread costs more than it
saves."""
ROUNDING = 1e-9
"""Sums of shares that differ by less are equal: .8 of ten equal shares are eight."""


@dataclass
class Row:
    """Ids to continue, and the ids that follow."""

    prompt: int
    """Number of the prompt."""
    sample: int
    """Number of this continuation of the prompt."""
    ids: Ids
    made: dict[str, list[int]] = field(default_factory=dict)
    end: End = "tokens"
    out_of_sight: int = 0
    """Number of first ids that the model no longer saw when it chose the last one."""

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
    ends: Mapping[str, Collection[int]],
) -> None:
    """Fill `made`, `end` and `out_of_sight` of rows, with at most `tokens` ids of each column.

    Args:
        task: predicts every column that it reads.
        rows: prompts of any lengths from 1 on; their order makes no difference.
        tokens: largest number of new ids of a row.
        how: how an id is chosen.
        sizes: column → only ids below this are drawn, because a model may have more rows than its
            vocabulary has ids; None: all.
        ends: column → the ids that end a row and are not part of it.

    A recurrent model reads all ids; any other reads the last `window(task)`, as in training. Each
    column has its own head and is drawn independently. Raises `TokmillError` if logits are not
    numbers.
    """
    names = list(task.sizes)
    for row in rows:
        row.made, row.end, row.out_of_sight = {name: [] for name in names}, "tokens", 0
    alive = sorted(rows, key=lambda row: (-row.length, row.prompt, row.sample)) if tokens else []
    if not alive:
        return
    task.eval()
    reader = reading(task)
    numbers = [how.numbers(row.prompt, row.sample) for row in alive]
    with threads_for(task, len(alive)):
        hidden = begin(reader, alive)
        for count in range(1, tokens + 1):
            chosen = {
                name: choose(logits_of(task, hidden, name)[:, : sizes[name]], how, numbers)
                for name in names
            }
            kept = append(alive, chosen, ends)
            if not kept or count == tokens:
                break
            if len(kept) < len(alive):
                which = torch.tensor(kept)
                reader.keep(which)
                alive = [alive[number] for number in kept]
                numbers = [numbers[number] for number in kept]
                here = which.to(hidden.device)
                chosen = {name: ids[here] for name, ids in chosen.items()}
            hidden = reader.next({name: ids[:, None] for name, ids in chosen.items()})
    if size := window(task):
        for row in rows:
            # The ids before the last choice, whether that id is kept or has ended the row.
            before = row.length + len(row.made[names[0]]) - (row.end != "eot")
            row.out_of_sight = max(0, before - size)


def begin(reader: Reading, rows: Sequence[Row]) -> Tensor:
    """Read the prompts of rows; a prompt with several samples is read once."""
    first = {row.prompt: row for row in reversed(rows)}
    distinct = [row for row in rows if first[row.prompt] is row]
    place = {row.prompt: number for number, row in enumerate(distinct)}
    hidden = reader.begin([row.ids for row in distinct])
    if len(distinct) < len(rows):
        copies = torch.tensor([place[row.prompt] for row in rows])
        reader.keep(copies)
        hidden = hidden[copies.to(hidden.device)]
    return hidden


def append(
    rows: Sequence[Row],
    chosen: Mapping[str, Tensor],
    ends: Mapping[str, Collection[int]],
) -> list[int]:
    """Append the chosen ids to rows that they do not end; return the rows that can go on."""
    values = {name: ids.tolist() for name, ids in chosen.items()}
    kept = []
    for number, row in enumerate(rows):
        if any(ids[number] in ends[name] for name, ids in values.items()):
            row.end = "eot"
            continue
        for name, ids in values.items():
            row.made[name].append(ids[number])
        kept.append(number)
    return kept


def logits_of(task: Task, hidden: Tensor, name: str) -> Tensor:
    """Return the logits (B, V) of a column from hidden states (B, D)."""
    weight = task.head(name)
    return product_for(hidden, weight)(hidden, weight)


@contextlib.contextmanager
def threads_for(task: Task, rows: int) -> Iterator[None]:
    """Compute in a single thread if matrix products are small."""
    before = torch.get_num_threads()
    largest = max(weight.numel() for weight in task.model.parameters() if weight.ndim == 2)
    blocks = [p.numel() for name, p in task.model.named_parameters() if "blocks" in name]
    if max(blocks, default=largest) * rows < FEW_PRODUCTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose(logits: Tensor, how: Drawing, numbers: Sequence[Numbers]) -> Tensor:
    """Return an id for each row, int64 (B,), from logits (B, V).

    Raises `TokmillError` if a logit is not a number.
    """
    # The first of equal logits; NaN counts as the highest.
    likeliest = first_highest(logits)
    highest = logits.gather(-1, likeliest)
    if not bool(highest.isfinite().all()):
        raise TokmillError(
            "the model's logits are not numbers: the training diverged, or weights are damaged",
            hint="sample from other weights, with --at best or --at STEP",
        )
    if how.greedy:
        return likeliest[:, 0]
    # Random ids are drawn on the CPU in float64, so that they are the same on every device.
    values, ids = best(logits.float().cpu(), how.top_k, ordered=how.top_p < 1)
    weights = values.double().sub_(highest.double().cpu()).div_(float(how.temperature)).exp_()
    if how.top_p < 1:
        shares = weights / weights.sum(-1, keepdim=True)
        before = shares.cumsum(-1) - shares
        weights[before >= max(how.top_p - ROUNDING, ROUNDING)] = 0
    sums = weights.cumsum(-1)
    at = torch.tensor([[row.take()] for row in numbers], dtype=torch.float64) * sums[:, -1:]
    # After the last possible id the sums stay equal; rounding must not select an id there.
    most = torch.searchsorted(sums, sums[:, -1:].contiguous())
    place = torch.searchsorted(sums, at, right=True).minimum(most)
    if ids is not None:
        place = ids.gather(-1, place)
    return place[:, 0].to(logits.device)


def first_highest(logits: Tensor) -> Tensor:
    """Return the lowest id (B, 1) with the highest logit; NaN counts as the highest."""
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        return logits.argmax(-1, keepdim=True)
    # numpy takes a tenth of the time.
    return torch.from_numpy(logits.numpy().argmax(-1, keepdims=True))


def best(logits: Tensor, k: int, ordered: bool) -> tuple[Tensor, Tensor | None]:
    """Return the k highest of logits (B, V) and their ids, (B, K) each; k = 0: all.

    Logits are in falling order, equal ones in the order of their ids; of equal ones at the border
    the lowest ids are taken. If all logits are returned and need not be `ordered`, they stay in the
    order of ids, and the ids are None.
    """
    size = logits.shape[-1]
    if not 0 < k < size:
        return logits.sort(dim=-1, descending=True, stable=True) if ordered else (logits, None)
    least = logits.topk(k).values[:, -1:]
    above, level = logits > least, logits == least
    places = k - above.sum(-1, keepdim=True)
    if bool((level.sum(-1, keepdim=True) > places).any()):
        level &= level.cumsum(-1) <= places
    ids = (above | level).nonzero()[:, 1].view(len(logits), k)
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
