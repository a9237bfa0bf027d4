"""Facts about a task's stores, and what follows: inputs of the model, rows, names of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, get_args

import msgspec

from tokmill.base.errors import UsageError, nearest
from tokmill.feed.feed import id_counts
from tokmill.feed.packed import Packed
from tokmill.feed.rows import Rows, Stream, Whole, Windows
from tokmill.models.model_inputs import Inputs
from tokmill.store.schema import Schema
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary


class Measures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a task's metrics, and what its model can be used for."""

    loss: str = ""
    """Unit of the loss, such as "nats a token"; empty: no useful unit."""
    higher: tuple[str, ...] = ()
    """Metrics for which higher is better. For others lower is, unless their names say otherwise."""
    continues: bool = False
    """Whether rows can be continued: `tokmill sample`."""


MOST_CLASSES = 10_000
"""Largest number of classes of a label column."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the training store. A run keeps them, and opens without its store.

    `columns`: the columns that a model can read (`column_sizes`) → the number of their ids. Roles
    of vocabularies are in `vocabularies`, widths of columns in `schema`.
    """

    fingerprint: str
    columns: dict[str, Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]]
    schema: Schema
    vocabularies: dict[str, Vocabulary]
    bytes_per_token: float = 0.0
    vectors: dict[str, Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]] = {}
    """Vectors that the model reads (`Task.vectors`) → their width."""
    vector_models: dict[str, str] = {}
    """These vectors → the digest of the model that made them, if it is known."""
    classes: dict[str, Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_CLASSES)]] = {}
    """Columns of labels (`Task.label_classes`) → the names of their classes, by number."""
    measures: Measures = Measures()
    """The metrics of the task."""
    prefix: dict[str, tuple[int, ...]] = {}
    """Columns → the special tokens before each record (`framing.affixes_of`)."""
    suffix: dict[str, tuple[int, ...]] = {}
    """The same of those after it; of an imported run only those of its template."""
    ends: dict[str, tuple[int, ...]] = {}
    """Columns → all ids that end a text, of an imported run that names some."""


def store_inputs(facts: Facts) -> Inputs:
    """Return all columns of ids that a store has, the roles of their vocabularies, and vectors."""
    return Inputs(
        ids=dict(facts.columns),
        roles=roles_of(facts, facts.columns),
        vectors=dict(facts.vectors),
    )


def roles_of(facts: Facts | Store, columns: Iterable[str]) -> dict[str, Mapping[str, int]]:
    vocabularies = {
        name: facts.schema[name].vocab or "" for name in columns if name in facts.schema
    }
    return {
        name: dict(facts.vocabularies[vocabulary].roles)
        for name, vocabulary in vocabularies.items()
        if vocabulary in facts.vocabularies
    }


def column_sizes(store: Store) -> dict[str, int]:
    """Return the columns that a model can read → the number of their ids.

    These are the columns with a vocabulary and one value for each token. A column `token` without a
    vocabulary (imported from bare ids) counts too: its largest id gives the number of ids.
    """
    return {name: n for name, n in id_counts(store).items() if not store.schema[name].width}


SEGMENT = "segment"
"""A made column with 2 ids: 0 in the first span of a pair and at padding, 1 in the second span."""


RowKind = Literal["windows", "stream", "packed", "whole"]
"""The ways to cut a store into rows."""


def check_cut(kind: RowKind, length: int, step: int, where: str = "") -> None:
    """Refuse lengths and steps of rows that are impossible or lose tokens."""
    if kind not in get_args(RowKind):
        raise UsageError(
            f"rows cannot be cut as {kind!r}",
            where=f"{where}rows",
            hint=nearest(kind, get_args(RowKind)),
        )
    if length < 1:
        raise UsageError(
            "a row needs at least one position",
            where=f"{where}length",
            hint="--set task.length=128, for example",
        )
    if step and kind != "windows":
        raise UsageError(
            f"{kind} rows take no step", where=f"{where}step", hint='step is for rows = "windows"'
        )
    if not 0 <= step <= length:
        raise UsageError(
            f"windows of {length} targets cannot come every {step} tokens",
            where=f"{where}step",
            hint=f"1 to {length}: with more, some tokens would never be learned",
        )


def cut_rows(
    store: Store,
    kind: RowKind,
    length: int,
    step: int = 0,
    seed: int = 0,
    shards: int = 0,
    *,
    overlap: int = 1,
) -> Rows:
    """Return rows of `length` tokens.

    Rows that are cut from one record share `overlap` tokens (a `step` of 0 is `length` -
    `overlap`). For the next token this is 1: the last target of a row is the first input of the
    next row. `shards`: how many are mixed at a time; 0: all.
    """
    if kind == "stream":
        if shards:
            raise UsageError(
                "rows that begin anywhere cannot be mixed a few shards at a time",
                where="data.shards",
                hint='--set task.rows="windows", or --set data.shards=0',
            )
        return Stream(store, length, seed)
    if kind == "packed":
        return Packed(store, length, overlap=overlap, shards=shards, seed=seed)
    if kind == "whole":
        return Whole(store, length, shards=shards, seed=seed)
    return Windows(store, length, step or length - overlap, shards=shards, seed=seed)
