"""Facts about the training stores of a task, and the inputs of a model that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from tokmill.feed.feed import id_counts
from tokmill.models.model_inputs import Inputs
from tokmill.store.schema import Schema
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.measures import Measures

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
