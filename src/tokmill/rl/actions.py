"""Masked actions of several parts: a kind, then tiles of loops or an order of them.

Only the parts of the chosen kind count in probabilities and entropies. Two rules hold along the
places of a part, so its masks depend on what was chosen before: a tiling cuts one loop at least,
and an order names each loop once. Shapes: B rows, K kinds, C of them with tiles, L loops, T tiles.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """The numbers of an action: place 0 its kind, then a tile a loop, then a loop a place."""

    kinds: tuple[str, ...]
    parts: Mapping[str, str]
    """Kind → what else it says (`mlir.space.Space`): tiles of some sort, or an `order`."""
    loops: int
    tiles: int

    @property
    def cuts(self) -> tuple[str, ...]:
        return tuple(kind for kind in self.kinds if self.parts.get(kind, "order") != "order")

    @property
    def width(self) -> int:
        return 1 + 2 * self.loops


class Scores(NamedTuple):
    """What a policy gives for each row, before masks."""

    kind: Tensor
    """(B, K)."""
    tiles: Tensor
    """(B, C, L, T)."""
    order: Tensor
    """(B, L, L): for each place the loops."""


class Masks(NamedTuple):
    """What is allowed, bool."""

    kind: Tensor
    """(B, K)."""
    cuts: Tensor
    """(B, K, L, T): the tiles of each kind."""
    loops: Tensor
    """(B, L): the loops that the operation has."""


class Judged(NamedTuple):
    """Actions as a policy sees them, each (B,)."""

    logp: Tensor
    entropy: Tensor
    """Entropy of the kind, and of each place of the chosen kind's part after what was chosen."""
    most: Tensor
    """The entropy that even choices would have."""


def evaluate(scores: Scores, masks: Masks, actions: Tensor, layout: Layout) -> Judged:
    """Return log-probability and entropy of actions (B, 1 + 2 L) int64."""
    kind = actions[:, 0]
    sums = _part(scores.kind[:, None], masks.kind[:, None], kind[:, None])
    cut, tile_scores, tile_mask = _chosen_tiles(scores, masks, kind, layout)
    tiles = actions[:, 1 : 1 + layout.loops]
    tiled = (tiles > 0).long()
    before = tiled.cumsum(1) - tiled > 0
    sums = sums + cut[:, None] * _part(tile_scores, _cutting(tile_mask, before), tiles)
    ordered = _ordered(kind, layout)
    order = actions[:, 1 + layout.loops :]
    once = torch.nn.functional.one_hot(order, layout.loops)
    used = once.cumsum(1) - once > 0
    free = _free(used, masks.loops)
    sums = sums + ordered[:, None] * _part(scores.order, free, order, masks.loops)
    return Judged(*sums.unbind(1))


@torch.no_grad()
def choose(scores: Scores, masks: Masks, layout: Layout, *, greedy: bool = False) -> Tensor:
    """Return actions (B, 1 + 2 L) int64: drawn, or the likeliest part after part.

    Random numbers are torch's own. Parts that do not belong to the kind are 0.
    """
    kind = _draw(scores.kind, masks.kind, greedy)
    cut, tile_scores, tile_mask = _chosen_tiles(scores, masks, kind, layout)
    rows = len(kind)
    tiles = torch.zeros(rows, layout.loops, dtype=torch.int64)
    for loop in range(layout.loops):
        before = (tiles[:, :loop] > 0).any(1, keepdim=True).expand(-1, layout.loops)
        allowed = _cutting(tile_mask, before)[:, loop]
        tiles[:, loop] = _draw(tile_scores[:, loop], allowed, greedy)
    order = torch.zeros(rows, layout.loops, dtype=torch.int64)
    used = torch.zeros(rows, layout.loops, layout.loops, dtype=torch.bool)
    for place in range(layout.loops):
        order[:, place] = _draw(scores.order[:, place], _free(used, masks.loops)[:, place], greedy)
        used |= torch.nn.functional.one_hot(order[:, place], layout.loops).bool()[:, None]
    order *= masks.loops
    ordered = _ordered(kind, layout)
    return torch.cat((kind[:, None], tiles * cut[:, None], order * ordered[:, None]), 1)


def _chosen_tiles(
    scores: Scores, masks: Masks, kind: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether the kind has tiles (B,), and its scores and mask (B, L, T)."""
    cuts, rows = layout.cuts, torch.arange(len(kind), device=kind.device)
    head = torch.tensor(
        [cuts.index(name) if name in cuts else -1 for name in layout.kinds], device=kind.device
    )[kind]
    return head >= 0, scores.tiles[rows, head.clamp(min=0)], masks.cuts[rows, kind]


def _ordered(kind: Tensor, layout: Layout) -> Tensor:
    has = [layout.parts.get(name) == "order" for name in layout.kinds]
    return torch.tensor(has, device=kind.device)[kind]


def _cutting(mask: Tensor, before: Tensor) -> Tensor:
    """Forbid to leave a loop whole if none before is cut and none behind can be.

    `mask`: (B, L, T); `before`: (B, L), whether a loop before is cut.
    """
    can = mask[:, :, 1:].any(2)
    behind = can.flip(1).long().cumsum(1).flip(1) - can.long() > 0
    must = can & ~before & ~behind
    whole = mask[:, :, :1] & ~must[:, :, None]
    return torch.cat((whole, mask[:, :, 1:]), 2)


def _free(used: Tensor, loops: Tensor) -> Tensor:
    """Return (B, L, L): the loops that may come at each place; one where nothing may."""
    free = ~used & loops[:, None, :]
    none = ~free.any(2, keepdim=True)
    first = torch.zeros_like(free)
    first[:, :, 0] = True
    return torch.where(none, first, free)


def _part(scores: Tensor, mask: Tensor, chosen: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return log-probability, entropy and largest entropy of places, summed: (B, 3).

    `scores`, `mask`: (B, P, N); `chosen`: (B, P); `counts`: (B, P), the places that count.
    """
    logs = torch.log_softmax(scores.float().masked_fill(~mask, -torch.inf), -1)
    logp = logs.gather(2, chosen[:, :, None])[:, :, 0]
    entropy = -(logs.exp() * logs.masked_fill(~mask, 0)).sum(2)
    most = mask.sum(2).clamp(min=1).float().log()
    if counts is not None:
        logp, entropy, most = (torch.where(counts, one, 0) for one in (logp, entropy, most))
    # What was not chosen by this row may be masked for it; such rows are multiplied by 0.
    logp = logp.masked_fill(logp.isneginf(), 0)
    return torch.stack((logp.sum(1), entropy.sum(1), most.sum(1)), 1)


def _draw(scores: Tensor, mask: Tensor, greedy: bool) -> Tensor:
    """Return a number of each row (B, N), by the Gumbel trick: what is masked cannot come."""
    logits = scores.float().masked_fill(~mask, -torch.inf)
    if not greedy:
        noise = torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)
        logits = logits - (-noise.log()).log()
    return logits.argmax(1)


def masks_of(masks: Sequence[Mapping[str, Any]]) -> Masks:
    parts = (torch.stack([torch.as_tensor(one[name]).bool() for one in masks]) for name in
             Masks._fields)  # fmt: skip
    return Masks(*parts)
