"""Losses that make vectors of alike records near to each other, and ranks that measure it.

Shapes: N rows of a step, D width. All similarities are cosines.
No function depends on the values of a tensor for its shapes, so `--dry-run` can run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Negatives = Literal["auto", "own", "step"]
"""Which negatives are taken: of the own entry; of the step; own ones if there are any."""
ANCHOR, ALIKE, OTHER = 0, 1, 2
"""Roles of a row in its entry: a query; alike to the queries; a negative of this entry."""
NOTHING = -1e30
"""In the place of -inf: a softmax over nothing else has a gradient of 0 and not NaN."""
TIE = 1e-6
"""Similarities that differ by less are equal: rounding must not decide a rank."""
CHUNK = 1 << 24
"""Similarities of an evaluation that are held at a time."""


class Relations(NamedTuple):
    """What the rows of a step are to each other."""

    positive: Tensor
    """(Q, N) bool: the row is a positive of the query."""
    other: Tensor
    """(Q, N) bool: the row is a negative of the query."""
    own: Tensor
    """(Q, N) bool: the row is a negative of the query's own entry."""


def relations(results: Mapping[str, Tensor], rows: Tensor | None = None) -> Relations:
    """Return what all rows are to some queries; by default all rows are queries.

    results: `entry` (N,); `role` (N,); `record` (N,), the number of each row's record; `group`
    (N,), that of the records which are like it. All int64. A row is no negative of a query if it
    is the query's record, or, of another entry, if it has the query's group.
    """
    entry, role, record, group = (results[n] for n in ("entry", "role", "record", "group"))
    place = torch.arange(len(entry), device=entry.device)
    rows = place if rows is None else rows
    same = entry[rows, None] == entry
    asks, member = (role[rows] != OTHER)[:, None], role != OTHER
    own = same & ~member & asks & (record[rows, None] != record)
    return Relations(
        positive=same & member & asks & (place != rows[:, None]),
        other=(~same & asks & (group[rows, None] != group)) | own,
        own=own,
    )


def in_batch(cosine_NN: Tensor, related: Relations, temperature: float) -> Tensor:
    """Return InfoNCE of each row, (N,): the mean over its positives p of -log softmax.

    -log(exp(s_p / t) / (exp(s_p / t) + Σ_n exp(s_n / t))) over all negatives n of the row (van den
    Oord et al. 2018; in both directions as NT-Xent, Chen et al. 2020). Other positives of the row
    are in no sum.
    """
    logits = cosine_NN / temperature
    rest = logits.masked_fill(~related.other, NOTHING).logsumexp(1, keepdim=True)
    return mean_where(F.softplus(rest - logits), related.positive)


def circle(cosine_NN: Tensor, related: Relations, margin: float, gamma: float) -> Tensor:
    """Return the circle loss of each row, (N,) (Sun et al. 2020, formula 6, for one query).

    softplus(LSE_n(γ α_n (s_n - m)) + LSE_p(-γ α_p (s_p - 1 + m))), with α_p = relu(1 + m - s_p) and
    α_n = relu(s_n + m) without gradients. A row without positives or negatives has about 0.
    """
    weight_p = (1 + margin - cosine_NN).relu().detach()
    weight_n = (cosine_NN + margin).relu().detach()
    near = -gamma * weight_p * (cosine_NN - 1 + margin)
    far = gamma * weight_n * (cosine_NN - margin)
    near, far = (
        part.masked_fill(~which, NOTHING).logsumexp(1)
        for part, which in ((near, related.positive), (far, related.other))
    )
    return F.softplus(near + far)


def triplet(cosine_NN: Tensor, related: Relations, margin: float, negatives: Negatives) -> Tensor:
    """Return the triplet loss of each row, (N,): the mean over its positives p of
    relu(margin - s_p + s_n).

    negatives: of "own", n is the nearest negative of the row's own entry. Of "step" it is the
    nearest negative that is farther than p, or the farthest negative if there is none (semi-hard,
    Schroff et al. 2015). "auto" is "own" for rows with such negatives. Without negatives the loss
    is 0.
    """
    chosen = cosine_NN.masked_fill(~related.own, NOTHING).amax(1, keepdim=True)
    if negatives != "own":
        hard = semi_hard(cosine_NN, related.other)
        has_own = related.own.any(1, keepdim=True)
        chosen = torch.where(has_own, chosen, hard) if negatives == "auto" else hard
    return mean_where((margin - cosine_NN + chosen).relu(), related.positive)


def semi_hard(cosine_NN: Tensor, other: Tensor) -> Tensor:
    """Return for each row and each p the similarity of the semi-hard negative, (N, N)."""
    ordered = cosine_NN.masked_fill(~other, NOTHING).sort(1).values
    lacking = (~other).sum(1, keepdim=True)
    below = torch.searchsorted(ordered.detach(), cosine_NN.detach().contiguous()) - 1
    last = cosine_NN.shape[1] - 1
    return ordered.gather(1, torch.maximum(below, lacking).clamp(max=last))


def mean_where(values: Tensor, which: Tensor) -> Tensor:
    """Return the mean of each row's values where `which` is True, (N,); 0 where it never is."""
    return torch.where(which, values, 0).sum(1) / which.sum(1).clamp(min=1)


def over_entries(each_N: Tensor, asks_N: Tensor, entry_N: Tensor) -> Tensor:
    """Return the sum over entries of the mean of their rows' losses; `asks`: rows that count."""
    zero = each_N.new_zeros(len(each_N))
    counts = zero.index_add(0, entry_N, asks_N.to(each_N.dtype))
    return (torch.where(asks_N, each_N, 0) / counts[entry_N].clamp(min=1)).sum()


def ranks(vectors_ND: Tensor, results: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return for each query (rank of its nearest positive, number of candidates), (Q,) float64.

    Queries are the anchors with a positive; candidates are that positive and all negatives of the
    query (`relations`). The rank counts from 1; of equally near candidates it is the mean, so that
    equal vectors score as chance does.
    """
    units = F.normalize(vectors_ND.float(), dim=1)
    queries = torch.nonzero(results["role"] == ANCHOR)[:, 0]
    parts: list[tuple[Tensor, Tensor]] = []
    for some in torch.split(queries, max(1, CHUNK // max(1, len(units)))):
        related = relations(results, some)
        cosines = units[some] @ units.T
        best = cosines.masked_fill(~related.positive, NOTHING).amax(1, keepdim=True)
        nearer = (related.other & (cosines > best + TIE)).sum(1)
        tied = (related.other & ((cosines - best).abs() <= TIE)).sum(1)
        asks = related.positive.any(1)
        rank = 1 + nearer.double() + tied.double() / 2
        parts.append((rank[asks], 1 + related.other.sum(1)[asks].double()))
    if not parts:
        return torch.zeros(0).double(), torch.zeros(0).double()
    return torch.cat([rank for rank, _ in parts]), torch.cat([pool for _, pool in parts])


def rank_metrics(vectors_ND: Tensor, results: Mapping[str, Tensor]) -> dict[str, float]:
    """Return `mrr`, `recall_1`, `recall_10`, and `pool`, the mean number of candidates.

    A rank between two whole numbers, which ties make, counts for the recall if it is at most k.
    """
    rank, pool = ranks(vectors_ND, results)
    if not len(rank):
        return {}
    return {
        "mrr": float((1 / rank).mean()),
        "recall_1": float((rank <= 1).double().mean()),
        "recall_10": float((rank <= 10).double().mean()),
        "pool": float(pool.mean()),
    }
