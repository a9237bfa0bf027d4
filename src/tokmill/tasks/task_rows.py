"""Cuts a store into rows, as the recipe of a task says."""

from __future__ import annotations

from typing import Literal, get_args

from tokmill.base.errors import UsageError, nearest
from tokmill.feed.packed import Packed
from tokmill.feed.rows import Rows, Stream, Whole, Windows
from tokmill.store.store import Store

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
