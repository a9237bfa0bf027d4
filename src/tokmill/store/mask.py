"""The column `loss`: 1 for tokens that are learned, 0 for tokens that are only read."""

from __future__ import annotations

from tokmill.base.errors import TokmillError
from tokmill.store.schema import Column
from tokmill.store.store import Store

LOSS = "loss"
"""Name of the column."""
WHOLE = "use integers (uint8): 1 for a token that is learned, 0 for one that is only read"


def check_mask(column: Column, values: tuple[float, float], where: str) -> None:
    """Refuse a column `loss` that is no mask; `values`: its smallest and largest value.

    Raises `TokmillError` unless it has one value per token, and only the values 0 and 1.
    """
    if column.per != "token" or column.width:
        each = "a vector" if column.width else "one value"
        raise TokmillError(
            f"the column {LOSS!r} has {each} per {column.per}; a loss mask needs one value "
            "per token",
            where=where,
            hint="repeat a record's value for each of its tokens, or give the column another name",
        )
    if column.dtype == "f4":
        raise TokmillError(
            f"the column {LOSS!r} holds floating-point numbers; a loss mask is 0 or 1",
            where=where,
            hint=WHOLE,
        )
    low, high = values
    if low < 0 or high > 1:
        raise TokmillError(
            f"the column {LOSS!r} holds {low if low < 0 else high}; a loss mask is 0 or 1",
            where=where,
            hint=WHOLE,
        )


def leaves_out(store: Store) -> bool:
    """Say whether a store with its overlays has a column `loss` that leaves tokens out."""
    return LOSS in store.schema and store.manifest.ranges.get(LOSS, (0, 1))[0] == 0


def check_mask_of(store: Store) -> None:
    """Refuse a store with its overlays if `loss` is no mask, or leaves no token to learn.

    The range of values is taken from the manifest. Raises `TokmillError`.
    """
    holders = [overlay.path for overlay in store.overlays.values() if LOSS in overlay.schema]
    where = str(next(iter(holders), store.path))
    low, high = store.manifest.ranges.get(LOSS, (1, 1))
    check_mask(store.schema[LOSS], (low, high), where)
    if high == 0:
        raise TokmillError(
            f"the column {LOSS!r} is 0 everywhere, so there is no token to learn or to measure",
            where=where,
            hint=WHOLE,
        )
