"""Losses that make vectors of similar records near to each other, and ranks that measure it.

Shapes: N rows of a step, D width. All similarities are cosines.
No function depends on the values of a tensor for its shapes, so `--dry-run` can run them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tokmill.base.errors import UsageError
from tokmill.feed.entries import FAMILY, KeyedEntries, Tuples
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows
from tokmill.store.schema import ROLES, Array, Schema, has_entries
from tokmill.store.store import Store

Negatives = Literal["auto", "own", "step"]
"""Which negatives are taken: of the own entry; of the step; own ones if there are any."""
ANCHOR, POSITIVE, OTHER = 0, 1, 2
"""Roles of a row in its entry: a query; similar to the queries; a negative of this entry."""
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


TUPLES = (ROLES, ROLES[:2], ("member",))
"""Columns of references that are looked for, in this order."""
KEYS = ("project", "program", "function", "part")
"""Record columns, if a store has them: records with equal values are similar."""
RELATIONS = ("role", "record", "group")
"""Names of the values that say what the rows of a step are to each other."""
ROLE = "role"
"""Record column of entries of several records: `ANCHOR`, `POSITIVE` or `OTHER`."""
GROUP = "group"
"""Record column of numbers, one for each entry or record: those with the same one are similar."""


def reference_columns(schema: Schema, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that name the records of an entry; none: the store has no such columns."""
    if chosen:
        return tuple(chosen)
    references = {name for name, column in schema.items() if column.ref is not None}
    return next((names for names in TUPLES if references.issuperset(names)), ())


def has_positives(schema: Schema, columns: Sequence[str], same: Sequence[str]) -> bool:
    """Say whether it is known which records of a store are similar."""
    return bool(same or reference_columns(schema, columns)) or has_entries(schema)


def key_columns(store: Store, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the columns by whose equal values records are similar."""
    keys = tuple(chosen) or tuple(name for name in KEYS if name in store.schema)
    if not keys:
        raise UsageError(
            "the similar records are unknown: there are no reference columns ("
            + ", or ".join(" ".join(names) for names in TUPLES)
            + f") and no key columns ({', '.join(KEYS)})",
            where=str(store.path),
            hint="`tokmill build mine` makes a store of references; --set 'task.same=[\"COLUMN\"]' "
            'names key columns, --set \'task.columns=["A","B"]\' columns of references',
        )
    return keys


def entry_rows(
    store: Store, length: int, config: Any, shards: int, seed: int, of_rows: Sequence[str] = ()
) -> Rows:
    """Return the rows of entries: those that columns of references name, or the three records of
    each entry, or some records of equal keys.

    `config`: with the keys `columns`, `same`, `size` and `group`; `of_rows`: see `Entries`.
    """
    names = reference_columns(store.schema, config.columns)
    if (names or has_entries(store.schema)) and config.same:
        raise UsageError(
            "the entries of the store say already which records are similar",
            where="task.same",
            hint="leave it out",
        )
    if names or has_entries(store.schema):
        roles = roles_of([(n, store.schema[n].width) for n in names if n in store.schema])
        return Tuples(
            store,
            length,
            names,
            size=len(ROLES),
            shards=shards,
            seed=seed,
            of_rows=of_rows,
            unlike=np.flatnonzero(roles == OTHER).tolist() if names else [OTHER],
            group=config.group or GROUP,
        )
    keys = key_columns(store, config.same)
    return KeyedEntries(store, length, keys, size=config.size, shards=shards, seed=seed)


def value_columns(schema: Schema, columns: Sequence[str], group: str) -> list[str]:
    """Return the values that `with_relations` needs: record columns, and `FAMILY`.

    A column with a number for each row says itself which rows are similar; else the rows say it.
    """
    named = reference_columns(schema, columns)
    names = [name for name in named if name in schema and schema[name].per == "record"]
    if has_entries(schema) and not named:
        names = [ROLE]
    chosen = schema.get(group or GROUP)
    usable = chosen is not None and chosen.per == "record" and chosen.is_whole
    if group and not (named and usable):
        raise UsageError(
            f"the column {group!r} does not have a whole number for each entry",
            where="task.group",
            hint="it is a record column of the store that has the columns of references",
        )
    if named and usable and chosen is not None and chosen.width:
        return [*names, group or GROUP]
    return [*names, FAMILY]


def with_relations(batch: Batch, columns: Sequence[str], group: str) -> dict[str, Array]:
    """Return values of the rows of a batch, with `role`, `record` and `group`.

    All int64, as `relations` wants them. Columns that begin with `negative` name negatives
    of their entry, others similar records; the first one is the anchor. Without such columns and
    without a `role` all rows of an entry are similar (rows of key columns, or of a column with a
    value per token).
    """
    values = dict(batch.values)
    count = len(batch)
    names = [name for names in (columns, *TUPLES) for name in names]
    references = {
        n: values.pop(n).astype(np.int64).reshape(count, -1) for n in names if n in values
    }
    begins = np.diff(batch.entry, prepend=-2) != 0
    place = np.arange(count) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
    role = values.pop(ROLE, np.zeros(count)).astype(np.int64)
    record = family = values.pop(FAMILY, np.arange(count))
    if references:
        role = roles_of([(name, records.shape[1]) for name, records in references.items()])[place]
    if (numbers := values.pop(group or GROUP, None)) is not None:
        records = np.concatenate([*references.values()], axis=1)
        if numbers.shape != records.shape:
            raise UsageError(
                f"{group or GROUP!r} has {numbers[0].size} numbers an entry of "
                f"{records.shape[1]} records",
                where="task.group",
                hint="one number for an entry, or one for each of its records",
            )
        record = np.take_along_axis(records, place[:, None], axis=1)[:, 0]
        family = np.take_along_axis(numbers, place[:, None], axis=1)[:, 0]
    return values | {"role": role, "record": record, "group": family.astype(np.int64)}


def roles_of(columns: Iterable[tuple[str, int]]) -> Array:
    """Return the roles of an entry's rows, of columns of references and their widths (or 0)."""
    roles = []
    for number, (name, width) in enumerate(columns):
        role = OTHER if name.startswith("negative") else POSITIVE if number else ANCHOR
        roles += [role] * max(1, width)
    return np.asarray(roles, np.int64)


def query_entries(entry: Array, values: Mapping[str, Array]) -> int:
    """Return the number of entries with at least two similar rows; entry -1 is none."""
    positives = entry[(entry >= 0) & (values["role"] != OTHER)]
    return int(np.count_nonzero(np.bincount(positives) > 1)) if len(positives) else 0
