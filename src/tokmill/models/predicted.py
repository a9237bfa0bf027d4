"""Selects the positions that are predicted, so that no others are computed.

Shapes: B rows, T positions, M positions that are predicted in the row that has most of them, D
width of the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from tokmill.store.schema import Array


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
