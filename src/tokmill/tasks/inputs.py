"""What is known of the stores that a task learns from, and which inputs follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
import numpy as np

from tokmill.feed.feed import Batch, id_counts
from tokmill.models.inputs import Inputs
from tokmill.store.schema import Schema
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.measures import Measures

MOST_CLASSES = 10_000
"""Classes above which a column is no label."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a run remembers of the store that it learns from; a run opens by it, without the store.

    `columns`: what a model can read (`column_sizes`), and the number of ids of each. `roles` of
    vocabularies and widths of columns stand in `vocabularies` and `schema`.
    """

    fingerprint: str
    columns: dict[str, Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]]
    schema: Schema
    vocabularies: dict[str, Vocabulary]
    bytes_per_token: float = 0.0
    vectors: dict[str, Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]] = {}
    """Vectors that the model reads (`Task.vectors`) → their width."""
    classes: dict[str, Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_CLASSES)]] = {}
    """Columns of labels (`Task.label_classes`) → the names of their classes, by number."""
    measures: Measures | None = None
    """What the task measures; None: the run is older than this."""


def store_inputs(facts: Facts) -> Inputs:
    """Return all columns of ids that a store has, the roles of their vocabularies, and vectors."""
    return Inputs(
        ids=dict(facts.columns),
        roles=roles_of(facts, facts.columns),
        vectors=dict(facts.vectors),
    )


def roles_of(facts: Facts, columns: Iterable[str]) -> dict[str, Mapping[str, int]]:
    """Return column → role → id, for columns whose vocabulary says roles."""
    vocabularies = {
        name: facts.schema[name].vocab or "" for name in columns if name in facts.schema
    }
    return {
        name: dict(facts.vocabularies[vocabulary].roles)
        for name, vocabulary in vocabularies.items()
        if vocabulary in facts.vocabularies
    }


def column_sizes(store: Store) -> dict[str, int]:
    """Return the columns that a model can read, with the number of their ids.

    These are the columns with a vocabulary and a value a token; and a column `token` without one
    (imported from bare ids), whose largest id then says how many there are.
    """
    return {name: n for name, n in id_counts(store).items() if not store.schema[name].width}


SEGMENT = "segment"
"""A column that tells the spans of a pair apart: 0, 1; 0 at padding. It is made, of 2 ids."""


def joined(batch: Batch) -> Batch:
    """Return rows of pairs (`feed.entries.Pairs`) that are read together, with a `SEGMENT`.

    What were two documents of a row is one, so that a model sees both at once.
    """
    segment = np.maximum(batch.document, 0).astype(np.int64)
    return dataclasses.replace(
        batch,
        columns={**batch.columns, SEGMENT: segment},
        document=np.minimum(batch.document, 0),
    )
