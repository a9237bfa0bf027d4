"""What a model reads from a batch: columns of ids, columns that a task makes, columns of
vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokmill.errors import UsageError


@dataclass(frozen=True)
class Inputs:
    """The columns that a model reads; the task names them (`Task.inputs`).

    `ids`: column of the store → number of its ids. `roles`: column → role → id, from the store's
    vocabularies, such as `{"token": {"mask": 4, "pad": 0}}`; special tokens are found by role,
    because their ids differ between vocabularies. `made`: column that no store holds, such as
    `segment` → number of its ids; the task fills it (`Task.prepare`). `vectors`: column → width W;
    in a batch they are (B, T, W) float32, the others (B, T) int64. `classes`: column of labels →
    the names of its classes, by number.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    made: Mapping[str, int] = field(default_factory=dict)
    vectors: Mapping[str, int] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def embedded(self) -> dict[str, int]:
        """The columns of ids, of the store and made: column → number of its ids."""
        return {**self.ids, **self.made}

    def role(self, column: str, name: str) -> int:
        """Return the id that has a role in a column's vocabulary.

        Raises `UsageError` if there is no such id; no default is used.
        """
        known = self.roles.get(column, {})
        if name not in known:
            has = ", ".join(f"{role}={number}" for role, number in known.items())
            raise UsageError(
                f"the vocabulary of the column {column!r} has no {name!r} token "
                f"(roles: {has or 'none'})",
                hint="build the store with a vocabulary that has one: "
                f"`tokmill build … --set roles.{name}=TOKEN` names it",
            )
        return known[name]
