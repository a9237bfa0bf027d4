"""Sources whose items are whole files: hashed first, then read as a stream of records."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import BinaryIO, ClassVar

import numpy as np

from tokmill.base.files import reading
from tokmill.builds.source import Hash, Item, Source
from tokmill.store.schema import Records


class WholeFiles(Source):
    """A source that makes the records of an item of all bytes of its files.

    A shard is cut after `part_bytes` of tokens (or of phrases), so that memory is bounded.
    """

    part_bytes: ClassVar[int] = 64 << 20

    @abstractmethod
    def batches(self, item: Item) -> Iterator[Records]:
        """Yield the records of an item; which of them end a part is decided here."""

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield the records of an item, without those of parts that are done."""
        if not item.parts_done:
            self._hash(item, digest)
        part = size = 0
        for batch in self.batches(item):
            size += self._bytes(batch)
            batch.ends_part = size >= self.part_bytes
            if part >= item.parts_done:
                yield batch
            if batch.ends_part:
                part, size = part + 1, 0

    def content(self, item: Item, digest: Hash) -> Iterator[None]:
        """Hash all bytes of an item's files, as one part."""
        self._hash(item, digest)
        yield from ()

    def _hash(self, item: Item, digest: Hash) -> None:
        for path in (item.path, *(other.path for other in item.others)):
            with reading(path) as file:
                while data := file.read(1 << 20):
                    digest.update(data)

    def _bytes(self, batch: Records) -> int:
        if batch.phrases is not None:
            return batch.phrases.ids.nbytes
        tokens = [name for name, column in self.schema.items() if column.per == "token"]
        return sum(np.asarray(batch.columns[name]).nbytes for name in tokens)


def hash_until(stop: int, file: BinaryIO, digest: Hash) -> None:
    """Update `digest` with the bytes of a file from its position up to `stop`."""
    while data := file.read(min(1 << 20, stop - file.tell())):
        digest.update(data)
