"""Common parts of sources of overlays: one item and one shard for each shard of a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import machine_errors, sampled
from tokmill.builds.source import Item, Source
from tokmill.store.manifest import ShardEntry
from tokmill.store.overlay import overlay_path
from tokmill.store.schema import Array, Records, Schema
from tokmill.store.store import Store

BLOCK = 4096
"""Records in a batch."""


class OverlaySource(Source):
    """Makes columns for the records of one store, which is its input.

    An item is named by the name and digest of its shard in the store. So after the store has grown,
    only the new shards are made.
    """

    version: ClassVar[int] = 1
    places = "record"
    is_overlay: ClassVar[bool] = True
    is_bounded = False
    schema: Schema = {}

    def prepare(self) -> None:
        self.base = open_base(self.inputs)
        self._places = {shard_identity(entry): i for i, entry in enumerate(self.base.shards)}

    @classmethod
    def name_of(cls, config: Any) -> str:
        """Return the name of the overlay that the options ask for."""
        name: str = config.name
        return name

    @classmethod
    def folder(cls, config: Any, inputs: Sequence[str]) -> Path:
        """Return the folder of the overlay: it lies in its store."""
        return overlay_path(open_base(inputs).path, cls.name_of(config))

    def item(self, number: int, more: str = "") -> Item:
        """Return the item of a shard; `more` is added to its name."""
        entry = self.base.shards[number]
        path = self.base.shard_file(number).absolute()
        with machine_errors("read", path):
            digest = sampled(path)[1]
        name = shard_identity(entry) + more
        return Item(name, str(path), 0, entry.bytes, digest, alone=True)

    def place(self, item: Item) -> tuple[int, str]:
        """Return the number of an item's shard, and the part `more` of its name."""
        *identity, more = [*item.name.split("/"), ""][:3]
        place = self._places.get("/".join(identity))
        if place is None:
            raise TokmillError(
                "the store has changed since the build was planned",
                where=str(self.base.path),
                hint="run the same command again: it uses the store as it is now",
            )
        return place, more

    def check_columns(self, hint: str) -> None:
        """Refuse columns that the store has already."""
        for column in self.schema:
            if column in self.base.schema:
                raise UsageError(
                    f"the store has a column {column!r} already",
                    where=str(self.base.path),
                    hint=hint,
                )

    def records(self, number: int, values: Mapping[str, Array]) -> Iterator[Records]:
        """Yield the columns of a shard, flat or (n, width), as records, a block at a time."""
        offsets = self.base.shard(number)["offsets"].astype(np.int64)
        for start in range(0, len(offsets) - 1, BLOCK):
            stop = min(start + BLOCK, len(offsets) - 1)
            tokens = slice(int(offsets[start]), int(offsets[stop]))
            columns: dict[str, Any] = {
                name: value[tokens if self.schema[name].per == "token" else slice(start, stop)]
                for name, value in values.items()
            }
            yield Records(
                offsets[start : stop + 1] - offsets[start],
                columns,
                np.arange(start, stop),
                done=stop / (len(offsets) - 1),
            )


def open_base(inputs: Sequence[str]) -> Store:
    """Open the store for which an overlay is made; it must be finished."""
    if len(inputs) != 1:
        raise UsageError(
            f"an overlay belongs to one store, not to {len(inputs) or 'none'}",
            hint="name the one store that gets the columns",
        )
    store = Store(Path(inputs[0]))
    if store.partial:
        raise TokmillError(
            "the store is not complete",
            where=str(store.path),
            hint="finish it with the same `tokmill build`: columns are added to finished stores",
        )
    if isinstance(store.manifest.overlay, msgspec.Struct):
        raise UsageError(
            "this is an overlay itself",
            where=str(store.path),
            hint=f"name the store to which it belongs: {store.path.parent.parent}",
        )
    return store


def shard_identity(entry: ShardEntry) -> str:
    """Return name and digest of a shard, which change when its content changes."""
    return f"{entry.name}/{entry.sha256[:24]}"
