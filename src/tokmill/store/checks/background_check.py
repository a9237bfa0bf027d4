"""Checks of the stores that a training, or another reader, uses.

Damaged ids can still be in range, and damaged offsets can still rise; no reader would notice. So
each shard is hashed once, in a thread, while it is used. Shards that are in use come first.
"""

import hashlib
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Self

from tokmill.base.errors import TokmillError
from tokmill.base.files import reading
from tokmill.store.checks.probe import Probe, compare, read_probe
from tokmill.store.store import Store, shard_path

BLOCK = 1 << 20
"""Bytes that are hashed between two checks whether to stop."""


class ShardCheck:
    """Hashes the shards of stores and of their overlays, in a thread, inside a `with` block.

    `shards`: the numbers of the shards to check in each store; None: all. A damaged shard is raised
    by `tell`, and at the end of the block, which waits until all shards used in it are hashed.
    """

    def __init__(self, stores: Iterable[Store], shards: Collection[int] | None = None) -> None:
        # What was fetched has been compared with its digest.
        given = [store for store in stores if store.remote is None]
        self.shards = shards
        self.stores = [*given, *(laid for store in given for laid in store.overlays.values())]
        self.error: TokmillError | None = None
        self._ended, self._last = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="tokmill-check", daemon=True)

    def tell(self) -> None:
        """Raise `TokmillError` if a damaged shard was found, or one that was cut since."""
        if self.error is not None:
            raise self.error
        for store in self.stores:
            store.check_sizes()

    def finish(self) -> None:
        """Wait until all shards that were used are hashed, then do as `tell`."""
        self._last = True
        self._thread.join()
        self.tell()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._last = True
        if error is not None:
            self._ended.set()
        self._thread.join()
        if error is None:
            self.tell()

    def _work(self) -> None:
        try:
            for number, shard in self._next():
                self._check(self.stores[number], shard)
        except TokmillError as error:
            self.error = error

    def _next(self) -> Iterator[tuple[int, int]]:
        """Yield (store, shard): a shard in use as soon as possible, otherwise one of the others."""
        every = {
            (n, i): None
            for n, store in enumerate(self.stores)
            for i in range(len(store.shards))
            if self.shards is None or i in self.shards
        }
        rest, seen = iter(every), set[tuple[int, int]]()
        while not self._ended.is_set() and len(seen) < len(every):
            # Read before `touched`: shards that are used after the end need no check.
            last = self._last
            touched = ((n, i) for n, store in enumerate(self.stores) for i in store.touched())
            chosen = next((key for key in touched if key in every and key not in seen), None)
            if chosen is None and last:
                return
            if chosen is None:
                chosen = next(key for key in rest if key not in seen)
            seen.add(chosen)
            yield chosen

    def _check(self, store: Store, number: int) -> None:
        entry = store.shards[number]
        path = shard_path(store.path, entry.name).absolute()
        digest = hashlib.sha256()
        with reading(path) as handle:
            while block := handle.read(BLOCK):
                if self._ended.is_set():
                    return
                digest.update(block)
        if digest.hexdigest() != entry.sha256:
            raise TokmillError(
                "the shard is damaged: its bytes have changed since it was built (sha256 differs)",
                where=str(path),
                hint="remove it: the same `tokmill build` makes it again from its input; repeat "
                "what was learned or measured from it",
            )


def same_engine(stores: Sequence[Store]) -> None:
    """Refuse stores with the same vocabulary whose engines gave the probe's texts different ids.

    Ids that a build puts before and after each text may differ. Stores without a probe (imported
    ones) are not checked.
    """
    first: dict[str, tuple[Store, Probe]] = {}
    for store in stores:
        vocabulary = store.vocabularies.get("token")
        if vocabulary is None or not isinstance(store.manifest.probe, str):
            continue
        probe = read_probe(store.path)
        other, first_probe = first.setdefault(vocabulary.sha256, (store, probe))
        if first_probe.texts() == probe.texts():
            compare(
                first_probe.bare(),
                probe.bare(),
                where=str(store.path),
                who=f"its engine gave other ids than that of {other.path}",
                hint="build one of the two again (--fresh) with the packages of the other",
            )
