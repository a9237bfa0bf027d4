"""The bytes of shards compared with the manifest's digests while somebody reads them.

Ids that are in range and offsets that rise can be wrong all the same, and nobody who uses them
would notice. So each shard is hashed once, in a thread, first those that somebody has touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tokmill.errors import TokmillError
from tokmill.files import machine_errors, write_file
from tokmill.headers import loads_json
from tokmill.store.store import Store, shard_path

BLOCK = 1 << 20
"""Bytes that are hashed between two looks at whether to stop."""
Known = dict[str, tuple[str, int, int, int]]
"""Path of a shard → what it was when its digest was right: sha256, size, ctime in ns, inode."""


class ShardCheck:
    """Hashes the shards of some stores, their overlays too, in a thread of a `with` block.

    `memory` is a file that remembers which shards were right: as long as size, time and inode stay,
    they are not read again; None: nothing is remembered. `shards`: numbers of those that are of
    interest, in each store; None: all. A damaged shard is told by `tell`, and at the end of the
    block, which waits for the shards that were touched in it.
    """

    def __init__(
        self,
        stores: Iterable[Store],
        memory: Path | None = None,
        shards: Collection[int] | None = None,
    ) -> None:
        given = list(stores)
        self.shards = shards
        self.stores = [*given, *(laid for store in given for laid in store.overlays.values())]
        self.memory = memory
        self.known = recall(memory)
        self.new = False
        self.error: TokmillError | None = None
        self._ended, self._last = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="tokmill-check", daemon=True)

    def tell(self) -> None:
        """Raise `TokmillError` where a shard was found that is not what was built."""
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Wait for the shards that were touched, and do as `tell`."""
        self._last = True
        self._thread.join()
        self.tell()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._last = True
        if error is not None:
            self._ended.set()
        self._thread.join()
        if self.memory is not None and self.new:
            # Who only reads a run may not write there, and need not.
            with contextlib.suppress(TokmillError):
                write_file(self.memory, msgspec.json.encode(self.known))
        if error is None:
            self.tell()

    def _work(self) -> None:
        try:
            for number, shard in self._next():
                self._check(self.stores[number], shard)
        except TokmillError as error:
            self.error = error

    def _next(self) -> Iterator[tuple[int, int]]:
        """Yield (store, shard): those that are touched, as soon as they are; then the others."""
        every = {
            (n, i): None
            for n, store in enumerate(self.stores)
            for i in range(len(store.shards))
            if self.shards is None or i in self.shards
        }
        rest, seen = iter(every), set[tuple[int, int]]()
        while not self._ended.is_set() and len(seen) < len(every):
            # Looked at first: what is touched after the end is of no interest.
            last = self._last
            touched = ((n, i) for n, store in enumerate(self.stores) for i in store.touched())
            chosen = next((one for one in touched if one in every and one not in seen), None)
            if chosen is None and last:
                return
            if chosen is None:
                chosen = next(one for one in rest if one not in seen)
            seen.add(chosen)
            yield chosen

    def _check(self, store: Store, number: int) -> None:
        entry = store.shards[number]
        path = (shard_path(store.path, entry.name)).absolute()
        digest = hashlib.sha256()
        with machine_errors("read", path), open(path, "rb") as handle:
            stat = os.fstat(handle.fileno())
            # Not the time of the content, which anyone can set back.
            now = (entry.sha256, stat.st_size, stat.st_ctime_ns, stat.st_ino)
            if self.known.get(str(path)) == now:
                return
            while block := handle.read(BLOCK):
                if self._ended.is_set():
                    return
                digest.update(block)
        if digest.hexdigest() != entry.sha256:
            place = shlex.quote(str(store.path))
            raise TokmillError(
                "the shard is damaged: its bytes have changed since it was built (sha256 differs)",
                where=str(path),
                hint=f"`tokmill store repair {place}` makes it again from its input; what was "
                "learned or measured from it is to be done again",
            )
        self.known[str(path)], self.new = now, True


def recall(memory: Path | None) -> Known:
    """Return what a file remembers; nothing where it is not there, or is none."""
    if memory is None or not memory.is_file():
        return {}
    try:
        known: Known = loads_json(memory.read_bytes(), Known)
        return known
    except (OSError, ValueError):
        return {}
