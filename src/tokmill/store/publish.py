"""`store push` and `store pull`: copy a store to an address and back, whole or not at all.

Whoever reads a store begins with its manifest. So that is written last, and only where there is
none (`If-None-Match: *`). Both ways are repeated after an interruption: what is there already, with
the same size and digest, stays.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokmill.base import remote
from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.base.files import (
    address_of,
    inside,
    make_folder,
    read_file,
    remove,
    sha256_file,
    write_file,
)
from tokmill.base.locks import locked
from tokmill.base.progress import human_bytes
from tokmill.base.remote import Facts, at_once
from tokmill.store import manifest as layout
from tokmill.store.manifest import MANIFEST, PLAN, ShardEntry
from tokmill.store.marks import LOCK
from tokmill.store.overlay import FOLDER, overlay_names
from tokmill.store.remote_store import (
    FILES,
    NOTE,
    SPARE,
    Note,
    fetch_index,
    fetch_shard,
    files_at,
    read_manifest,
)
from tokmill.store.store import Store

Advance = Callable[[int], None]


class Pushed(msgspec.Struct, kw_only=True):
    """What a push has done."""

    address: str
    sent: int = 0
    """Files that were written."""
    there: int = 0
    """Files that were there already, with the same content."""
    bytes: int = 0
    """Bytes that were written."""
    conditional: bool = True
    """Whether the server refuses to replace an object when it is asked to."""


def push(store: Path | str, address: str, advance: Advance = lambda size: None) -> Pushed:
    """Publish a finished store, with its finished overlays, at an address.

    Raises:
        UsageError: this is no address that can be written.
        TokmillError: another store, or another file, stands there; or the store is not finished.
        MachineError: the server does not answer, or refuses.
    """
    address = _writable(address)
    opened = Store(store)
    if opened.remote is not None or opened.partial:
        what = "lies at an address already" if opened.remote else "is not complete"
        raise TokmillError(f"the store {what}", where=str(store),
                           hint="finish it with the same `tokmill build`")  # fmt: skip
    result = Pushed(address=address)
    to = _Sending(address, files_at(address, opened.manifest), result, advance)
    plan = opened.path / PLAN
    if plan.exists():
        # First, so that another store at the address is noticed before anything is sent.
        to.send([(plan, PLAN, sha256_file(plan))])
        result.conditional = not remote.put(f"{address}/{PLAN}", plan, sha256_file(plan))
    if MANIFEST in to.there:
        to.check(to.there[MANIFEST], sha256_file(opened.path / MANIFEST))
    for name in overlay_names(opened.path):
        overlay = Store(opened.path / FOLDER / name)
        if not overlay.partial:
            _push_files(overlay, f"{FOLDER}/{name}/", to)
    _push_files(opened, "", to)
    return result


def _writable(address: str) -> str:
    result = address_of(address)
    if not result or result.startswith("http"):
        raise UsageError(
            "a store is pushed to a bucket", where=str(address),
            hint="s3://BUCKET/NAME, gs://BUCKET/NAME or az://CONTAINER/NAME",
        )  # fmt: skip
    if "/" not in result.partition("://")[2]:
        raise UsageError("the address names a bucket alone", where=result,
                         hint=f"{result}/NAME")  # fmt: skip
    return result


class _Sending(NamedTuple):
    """What is sent to an address: `there` is what it has already."""

    address: str
    there: dict[str, Facts]
    result: Pushed
    advance: Advance

    def send(self, files: Iterable[tuple[Path, str, str]]) -> None:
        """Send files (path, name, sha256), many at a time; what is there already stays."""
        for sent, size in at_once(self._send, files):
            self.result.sent += sent
            self.result.there += not sent
            self.result.bytes += sent * size
            self.advance(size)

    def _send(self, file: tuple[Path, str, str]) -> tuple[bool, int]:
        path, name, sha256 = file
        where, size = f"{self.address}/{name}", path.stat().st_size
        if name not in self.there and remote.put(where, path, sha256):
            return True, size
        self.check(remote.head(where), sha256)
        return False, size

    def check(self, facts: Facts, sha256: str) -> None:
        """Refuse an object with another content."""
        known = facts if facts.mark else remote.head(facts.address)
        if remote.digest(known) != sha256:
            raise _other(facts.address)


def _push_files(store: Store, prefix: str, to: _Sending) -> None:
    """Send shards, then what describes them, then the manifest."""

    def checked(entry: ShardEntry) -> tuple[Path, str, str]:
        path = inside(store.path / "shards", f"{entry.name}.safetensors")
        if sha256_file(path) != entry.sha256:
            hint = "`tokmill store validate STORE` says what helps"
            raise TokmillError("the shard is damaged", where=str(path), hint=hint)
        return path, f"{prefix}shards/{path.name}", entry.sha256

    def named(path: Path) -> tuple[Path, str, str]:
        return path, f"{prefix}{path.relative_to(store.path).as_posix()}", sha256_file(path)

    to.send(map(checked, store.shards))
    receipts = [store.path / "shards" / f"{entry.name}.json" for entry in store.shards]
    rest = [*sorted(store.path.glob("*.json*")), *sorted(store.path.glob("vocab/*"))]
    for path in rest:
        match = FILES.fullmatch(path.relative_to(store.path).as_posix())
        if match and match["index"] and f"{prefix}{path.name}" != PLAN:
            receipts.append(path)
    to.send(map(named, receipts))
    manifest = store.path / MANIFEST
    to.send([named(manifest)])
    # A server that replaces what is there may have let another push win.
    where = f"{to.address}/{prefix}{MANIFEST}"
    if remote.read_whole(where) != read_file(manifest):
        raise _other(where)


def _other(where: str) -> TokmillError:
    return TokmillError(
        "another file stands at this address, and is not replaced", where=where,
        hint="push to another address, or remove what is there first",
    )  # fmt: skip


def pull(address: str, out: Path, advance: Advance = lambda size: None) -> Store:
    """Copy the store at an address, with its overlays, into a folder, and return it.

    Raises:
        UsageError: this is no address.
        TokmillError: there is no store; the folder holds something else; a file is not what the
            store says of it.
        MachineError: the server does not answer, or the disk has no room.
    """
    source = address_of(address)
    if not source:
        raise UsageError("this is no address", where=str(address), hint="such as s3://BUCKET/NAME")
    data, manifest = read_manifest(source)
    _check_folder(out, source, data)
    files = files_at(source, manifest)
    make_folder(out)
    with locked(out / LOCK, "another process writes to this folder", "wait for it"):
        size = sum(one.size for one in files.values()) or manifest.bytes
        size -= sum(path.stat().st_size for path in out.rglob("*.safetensors"))
        free = shutil.disk_usage(out).free
        if size + SPARE > free:
            raise MachineError(
                f"the store takes {human_bytes(size)} more, and {human_bytes(free)} are free",
                where=str(out), hint="choose a larger disk, or open the store by its address",
            )  # fmt: skip
        write_file(out / PULLED, layout.encode(Note(source)))
        for name in sorted(files):
            match = FILES.fullmatch(name)
            if match and match["overlay"] and name.endswith(f"/{MANIFEST}"):
                part = match["overlay"].rstrip("/")
                _pull_files(f"{source}/{part}", out / part, advance)
        _pull_files(source, out, advance)
        remove(out / PULLED)
        remove(out / LOCK)
    return Store(out)


PULLED = "pull.json"
"""Note in a folder whose pull has not ended."""


def _check_folder(out: Path, source: str, data: bytes) -> None:
    """Refuse a folder that holds something other than this store, or a part of it."""
    if out.exists() and not out.is_dir():
        raise TokmillError("is a file, not a folder", where=str(out), hint="choose another place")
    names = {path.name for path in out.iterdir()} - {LOCK} if out.is_dir() else set()
    with contextlib.suppress(TokmillError):
        if (out / PULLED).is_file() and layout.read_json(out / PULLED, Note) == Note(source):
            return
    if names and (NOTE in names or MANIFEST not in names or (out / MANIFEST).read_bytes() != data):
        raise TokmillError(
            "the folder holds something else than this store", where=str(out),
            hint="choose another folder",
        )  # fmt: skip


def _pull_files(source: str, out: Path, advance: Advance) -> None:
    data, manifest = read_manifest(source)
    fetch_index(source, out, manifest)

    def fetch(entry: ShardEntry) -> None:
        path = inside(out / "shards", f"{entry.name}.safetensors")
        whole = path.is_file() and path.stat().st_size == entry.bytes
        if not whole or sha256_file(path) != entry.sha256:
            fetch_shard(source, path, entry)
        advance(entry.bytes)

    for entry in manifest.shards:
        fetch(entry)
    write_file(out / MANIFEST, data)
