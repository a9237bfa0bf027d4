"""Parts of one build at an address: `--part i/n --push ADDRESS`, without a disk that all see.

Each machine builds its part in a folder of its own and sends its shards, each before its receipt.
Whoever then finds receipts of all planned shards there makes the manifest of them, and writes it
where there is none. All files follow from the plan, so whoever sends the same sends the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from msgspec import UNSET

from tokmill.base import remote
from tokmill.base.errors import TokmillError
from tokmill.base.remote import AT_ONCE, at_once
from tokmill.store import manifest as layout
from tokmill.store.manifest import MANIFEST, PLAN, Manifest, Plan, PlannedItem, Receipt
from tokmill.store.publish import Pushed, Sending, small_files
from tokmill.store.remote_store import below, read_manifest
from tokmill.store.shards.shard import SUFFIX


class Parts:
    """What an address has of a build; `TokmillError` if it has another store, or its parts."""

    def __init__(self, address: str, out: Path, plan: Plan, planned: Sequence[PlannedItem]) -> None:
        self.address, self.out = address, out
        self.shards = {item.shard for item in planned}
        self._to = Sending(address, below(address), Pushed(address=address), lambda size: None)
        if MANIFEST in self._to.there and read_manifest(address)[1].plan_id != plan.plan_id:
            hint = "--push another address, or remove what is there first"
            raise TokmillError("another store is at the address", where=address, hint=hint)
        self._to.send([(out / PLAN, PLAN, "")])
        self._send_small()

    def _send_small(self) -> None:
        names = [path.relative_to(self.out).as_posix() for path in small_files(self.out)]
        self._to.send([(self.out / name, name, "") for name in names if name != PLAN])

    def send(self, receipts: Iterable[Receipt]) -> None:
        whole = [receipt for receipt in receipts if receipt.cut is UNSET]
        for end, many in ((SUFFIX, AT_ONCE), (".json", remote.MANY)):
            digests = {f"shards/{one.name}{end}": one.sha256 * (end == SUFFIX) for one in whole}
            self._to.send([(self.out / name, name, one) for name, one in digests.items()], many)

    def receipts(self, shards: Collection[str]) -> list[Receipt]:
        """Return the receipts of some shards that are there in full size."""
        there = self._to.there
        names = [name for name in there if name[7:31] in shards and name.endswith(".json")]

        def fetch(name: str) -> Receipt:
            where = f"{self.address}/{name}"
            receipt: Receipt = layout.decode(remote.read_whole(where), where, Receipt)
            return receipt

        sizes = {name: one.size for name, one in there.items()}
        each = at_once(fetch, names)
        return [one for one in each if sizes.get(f"shards/{one.name}{SUFFIX}") == one.bytes]

    def all(self, made_here: list[Receipt]) -> list[Receipt]:
        """Return the receipts of all shards if they are there, else those of this folder."""
        self._to.there.update(below(self.address))
        if not all(f"shards/{shard}.json" in self._to.there for shard in self.shards):
            return made_here
        return made_here + self.receipts(self.shards - {receipt.shard for receipt in made_here})

    def finish(self, manifest: Manifest) -> None:
        self._send_small()
        data = layout.with_checksum(manifest)
        digest = hashlib.sha256(data).hexdigest()
        remote.put(f"{self.address}/{MANIFEST}", data, digest)
        self._to.check(MANIFEST, digest, len(data))
