"""Stores in other people's training loops: a torch Dataset.

It learns the same targets as the task next_token (`targets_of`).
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tokmill.base.errors import UsageError
from tokmill.feed.feed import Feed
from tokmill.store.overlay import LOSS, check_mask_of
from tokmill.store.store import Store
from tokmill.tasks.next_token import choose_column, ends_of, nothing_to_learn, targets_of
from tokmill.tasks.task import positions
from tokmill.tasks.task_inputs import RowKind, check_cut, column_sizes, cut_rows, roles_of

IGNORED = -100
"""The label of a token that is not learned: torch's cross-entropy ignores it by default."""


class TokenDataset(Dataset[dict[str, Any]]):
    """The rows of a store as the causal models of transformers take them; item i is row i.

    An item is a dict of int64 tensors, (length,) each: `input_ids`; `labels`, which are not
    shifted, as the models do that; and `attention_mask`, 0 at padding. Packed rows have
    `position_ids` in place of the mask: counted from each document's first token they keep the
    documents apart, but only without a mask and with `use_cache=False` (`transformers.Trainer` sets
    it; see `transformers.masking_utils`).

    Of several columns, such as the six streams of programs, an item holds each by its name in place
    of `input_ids`, and `labels` is a dict of the same names.

    A label is -100 where nothing is learned: at padding, at the first token of a row, at that of a
    document without an `eot` before it, at tokens of an earlier window, and where `loss` is 0.

    A DataLoader fetches a batch in one call. Pickled, as for its workers, a dataset is the path of
    its store, which each process maps for itself.

    Args:
        store: a store or its folder. An unfinished one has to be given as a `Store`.
        length: tokens of a row.
        rows: `windows` of all records end to end, `packed` documents, a `whole` record a row cut
            off at `length`, or a `stream` of windows that begin anywhere.
        step: tokens from one window to the next; 0: `length` - 1, so that each token but a
            document's first is learned once.
        seed: of what is random: the places of a stream, the neighbours in packed rows.
        column: the only column of tokens that is read; left out, all of the store.

    Raises:
        TokmillError: the store cannot be read, is not complete, or holds nothing.
        UsageError: rows of these numbers cannot be cut, or several stores are given.
    """

    def __init__(
        self,
        store: Store | Path | str,
        length: int,
        *,
        rows: RowKind = "windows",
        step: int = 0,
        seed: int = 0,
        column: str = "",
    ) -> None:
        check_cut(rows, length - 1, step)
        self.store, self.column = opened(store), column
        self.length, self.rows, self.step, self.seed = length, rows, step, seed
        # Workers of a DataLoader may live through several epochs, so they share its memory.
        self.epoch = torch.zeros((), dtype=torch.int64, device="cpu")
        self.epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._feed = self._make_feed()

    def _make_feed(self) -> Feed:
        cut = cut_rows(self.store, self.rows, self.length, self.step, self.seed)
        self.columns, read = read_columns(self.store, self.column)
        self.ends = ends_of(roles_of(self.store, self.columns[:1]))
        return Feed(cut, 1, seed=self.seed, columns=read)

    def __len__(self) -> int:
        return len(self._feed.sources[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return some items; their tensors are views of those of the whole batch."""
        rows = np.asarray([int(index) for index in indices], np.int64)
        rows = np.where(rows < 0, rows + len(self), rows)
        if ((rows < 0) | (rows >= len(self))).any():
            raise IndexError(f"the rows of {self.store.path} are numbered 0 to {len(self) - 1}")
        batch = self._feed.make(np.full(len(rows), int(self.epoch), np.int64), rows)
        tokens = {name: batch.columns[name].astype(np.int64) for name in self.columns}
        labels = {name: np.full(batch.document.shape, IGNORED, np.int64) for name in self.columns}
        unlearned = nothing_to_learn(batch, self.ends)
        for name, ahead in targets_of(batch, labels, unlearned, IGNORED).items():
            labels[name][:, 1:] = ahead
        item: dict[str, Any] = tokens if len(tokens) > 1 else {"input_ids": alone(tokens)}
        item["labels"] = alone(labels)
        if self.rows == "packed":
            item["position_ids"] = positions(batch.document)
        else:
            item["attention_mask"] = (batch.document >= 0).astype(np.int64)
        tensors = each(torch.from_numpy, item)
        return [each(lambda tensor: tensor[i], tensors) for i in range(len(rows))]  # noqa: B023

    def set_epoch(self, epoch: int) -> None:
        """Draw what is random for another epoch; the trainers of accelerate call it.

        Call it between iterations: one that has begun takes up the new epoch at any row.
        """
        self.epoch.fill_(epoch)

    def __copy__(self) -> "TokenDataset":
        # With an epoch of its own.
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, object]:
        state = vars(self) | {"store": (self.store.path.absolute(), tuple(self.store.overlays))}
        del state["_feed"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, store=Store(*state["store"]))
        self.epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._feed = self._make_feed()


def alone(columns: dict[str, Any]) -> Any:
    return next(iter(columns.values())) if len(columns) == 1 else columns


def each(change: Callable[[Any], Any], value: Any) -> Any:
    """Change an array or tensor, or each of nested dicts."""
    if isinstance(value, dict):
        return {name: each(change, one) for name, one in value.items()}
    return change(value)


def read_columns(store: Store, column: str) -> tuple[list[str], list[str]]:
    sizes = column_sizes(store)
    columns = list(sizes) if len(sizes) > 1 and not column else [choose_column(column, sizes)]
    if LOSS not in store.schema:
        return columns, columns
    check_mask_of(store)
    return columns, [*columns, LOSS]


def opened(store: Store | Path | str) -> Store:
    """Return the store; a folder must hold one that is complete."""
    if isinstance(store, Store):
        return store
    if not isinstance(store, Path | str):
        raise UsageError(
            f"one store is read, not {'several' if isinstance(store, Sequence) else repr(store)}",
            hint="torch.utils.data.ConcatDataset joins the datasets of several; "
            "`tokmill build select A B -o C` makes one store of them",
        )
    hint = "finish it with the same `tokmill build`; tokmill.Store(FOLDER) reads what is there"
    return Store(store).whole(hint)
