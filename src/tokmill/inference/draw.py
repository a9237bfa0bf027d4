"""The choice of the next id from logits: the likeliest id or a random one, for many rows at once.

Shapes: B rows, V ids of a column, K of them that may be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokmill.errors import TokmillError
from tokmill.inference.drawing import Drawing, Numbers

ROUNDING = 1e-9
"""Sums of shares that differ by less are equal: .8 of ten equal shares are eight."""


def choose(logits: Tensor, how: Drawing, numbers: Sequence[Numbers], seen: Tensor | None) -> Tensor:
    """Return an id for each row, int64 (B,), from logits (B, V).

    `seen`: bool (B, V), the ids that a row has already; None: without a penalty. Raises
    `TokmillError` if a logit is not a number.
    """
    if seen is not None:
        penalty = float(how.repetition_penalty)
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen[:, : logits.shape[-1]], penalised, logits)
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
    if how.min_p:
        weights[weights < how.min_p] = 0
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
