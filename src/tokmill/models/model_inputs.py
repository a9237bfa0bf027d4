"""What a model reads from a batch: columns of ids, columns that a task makes, columns of
vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tokmill.base.errors import UsageError
from tokmill.store.schema import Array


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
        roles = self.roles.get(column, {})
        if name not in roles:
            has = ", ".join(f"{role}={number}" for role, number in roles.items())
            raise UsageError(
                f"the vocabulary of the column {column!r} has no {name!r} token "
                f"(roles: {has or 'none'})",
                hint="build the store with a vocabulary that has one: "
                f"`tokmill build … --set roles.{name}=TOKEN` names it",
            )
        return roles[name]


def predicted(targets: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Return the positions where any column has a target, and the targets there; (B, M) int64 each.

    `targets`: name → (B, T) int64, -1 where there is nothing to learn. The places of a row ascend;
    after them come unused ones (-1, with targets of -1). M is at least 1, so that a batch without
    targets is still a batch.
    """
    wanted = np.any([target >= 0 for target in targets.values()], axis=0)
    most = max(1, int(wanted.sum(1).max(initial=0)))
    places = np.argsort(~wanted, axis=1, kind="stable")[:, :most]
    used = np.take_along_axis(wanted, places, axis=1)
    return np.where(used, places, -1), {
        name: np.where(used, np.take_along_axis(target, places, axis=1), -1)
        for name, target in targets.items()
    }


def taken(x_BTD: Tensor, places_BM: Tensor) -> Tensor:
    """Return (B, M, D), the positions of each row that `places` (int64) names; -1: any one."""
    index_BMD = places_BM.clamp(min=0)[..., None].expand(-1, -1, x_BTD.shape[-1])
    return x_BTD.gather(1, index_BMD)
