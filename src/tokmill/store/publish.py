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
from tokmill.base.remote import AT_ONCE, MANY, Facts, at_once
from tokmill.store import manifest as layout
from tokmill.store.manifest import MANIFEST, PLAN, Manifest
from tokmill.store.marks import LOCK
from tokmill.store.overlay import FOLDER, facts_of, overlay_names
from tokmill.store.remote_store import (
    FILES,
    SPARE,
    Note,
    fetch_index,
    fetch_shard,
    files_at,
    read_manifest,
)
from tokmill.store.store import Store

Advance = Callable[[int], None]
PULLED = "pull.json"
"""Note in a folder whose pull has not ended."""


class Pushed(msgspec.Struct, kw_only=True):
    """What a push has done: files and bytes that were written, files that were there already."""

    address: str
    sent: int = 0
    there: int = 0
    bytes: int = 0
    left_out: list[str] = []
    """Overlays that are not finished, or of which the store has changed since."""
    conditional: bool = True
    """Whether the server refuses to replace an object when it is asked to."""


def push(store: Path | str, address: str, advance: Advance = lambda size: None) -> Pushed:
    """Publish a finished store, with its finished overlays, at an address."""
    where = remote.target_of(address)
    opened = Store(store)
    if opened.remote is not None or opened.partial:
        what = "is at an address already" if opened.remote else "is not complete"
        hint = "finish it with the same `tokmill build`, or pull it first"
        raise TokmillError(f"the store {what}", where=str(store), hint=hint)
    result = Pushed(address=where)
    to = Sending(where, files_at(where, opened.manifest), result, advance)
    # First, so that another store at the address is noticed before anything is sent.
    to.send([(opened.path / PLAN, PLAN, "")] if (opened.path / PLAN).exists() else [])
    manifest = opened.path / MANIFEST
    if MANIFEST in to.there:
        to.check(MANIFEST, sha256_file(manifest), manifest.stat().st_size)
    for name in overlay_names(opened.path):
        overlay = Store(opened.path / FOLDER / name)
        if overlay.partial or facts_of(overlay).base != opened.fingerprint:
            result.left_out.append(name)
        else:
            _push_files(overlay, f"{FOLDER}/{name}/", to)
    _push_files(opened, "", to)
    result.conditional = not remote.put(f"{where}/{MANIFEST}", manifest, sha256_file(manifest))
    return result


class Sending(NamedTuple):
    """What is sent to an address: `there` is what it has already."""

    address: str
    there: dict[str, Facts]
    result: Pushed
    advance: Advance

    def send(self, files: Iterable[tuple[Path, str, str]], many: int = MANY) -> None:
        """Send files (path, name, sha256 if known), some at a time; what is there stays."""
        for sent, size in at_once(self._send, files, many):
            self.result.sent += sent
            self.result.there += not sent
            self.result.bytes += sent * size
            self.advance(size)

    def _send(self, file: tuple[Path, str, str]) -> tuple[bool, int]:
        path, name, expected = file
        sha256, size = sha256_file(path), path.stat().st_size
        if expected and sha256 != expected:
            hint = "`tokmill store validate STORE` says what helps"
            raise TokmillError("the shard is damaged", where=str(path), hint=hint)
        sent = name not in self.there and remote.put(f"{self.address}/{name}", path, sha256)
        if not sent or size > remote.WHOLE:
            # Of what is sent in parts a server may have lost one.
            self.check(name, sha256, size)
        return sent, size

    def check(self, name: str, sha256: str, size: int) -> None:
        """Refuse an object with another content; its stored digest may be that of what was sent."""
        facts = remote.head(f"{self.address}/{name}")
        if facts.size != size or remote.digest(facts) != sha256:
            raise TokmillError(
                "another file is at this address, and is not replaced",
                where=facts.address,
                hint="push to another address, or remove what is there first",
            )


def small_files(store: Path) -> list[Path]:
    """Return the files of a store besides its shards, their receipts and the manifest."""
    paths = [*sorted(store.glob("*.json*")), *sorted(store.glob("vocab/*"))]
    matches = ((path, FILES.fullmatch(path.relative_to(store).as_posix())) for path in paths)
    return [path for path, match in matches if match and match["index"]]


def _push_files(store: Store, prefix: str, to: Sending) -> None:
    """Send shards, then what describes them, then the manifest, which is read back."""
    shards = [store.shard_file(number) for number in range(len(store.shards))]
    named = zip(shards, store.shards, strict=True)
    to.send([(path, f"{prefix}shards/{path.name}", one.sha256) for path, one in named], AT_ONCE)
    rest = [path.with_suffix(".json") for path in shards]
    rest += [path for path in small_files(store.path) if f"{prefix}{path.name}" != PLAN]
    for paths in (rest, [store.path / MANIFEST]):
        to.send([(p, f"{prefix}{p.relative_to(store.path).as_posix()}", "") for p in paths])
    # A server that replaces what is there may have let another push win.
    manifest = store.path / MANIFEST
    to.check(f"{prefix}{MANIFEST}", sha256_file(manifest), manifest.stat().st_size)


def pull(address: str, out: Path, advance: Advance = lambda size: None) -> Store:
    """Copy the store at an address, with its overlays, into a folder, and return it."""
    source = address_of(address)
    if not source:
        raise UsageError(
            "this is not an address", where=str(address), hint="such as s3://BUCKET/NAME"
        )
    data, manifest = read_manifest(source)
    _check_folder(out, source, data)
    files = files_at(source, manifest)
    make_folder(out)
    with locked(out / LOCK, "another process writes to this folder", "wait for it"):
        size = sum(one.size for one in files.values()) or manifest.bytes
        size -= sum(path.stat().st_size for path in out.rglob("*.safetensors"))
        free = shutil.disk_usage(out).free
        if size + SPARE > free:
            what = f"the store takes {human_bytes(size)} more, and {human_bytes(free)} are free"
            hint = "choose a larger disk, or open the store by its address"
            raise MachineError(what, where=str(out), hint=hint)
        write_file(out / PULLED, layout.encode(Note(source)))
        for name in sorted(files):
            match = FILES.fullmatch(name)
            if match and match["overlay"] and name.endswith(f"/{MANIFEST}"):
                part = match["overlay"].rstrip("/")
                laid = f"{source}/{part}"
                _pull_files(laid, out / part, *read_manifest(laid), advance)
        _pull_files(source, out, data, manifest, advance)
        remove(out / PULLED)
        remove(out / LOCK)
    return Store(out)


def _check_folder(out: Path, source: str, data: bytes) -> None:
    """Refuse a folder that holds something other than this store, or a part of it."""
    names = {path.name for path in out.iterdir()} - {LOCK} if out.is_dir() else set()
    with contextlib.suppress(TokmillError):
        if (out / PULLED).is_file() and layout.read_json(out / PULLED, Note) == Note(source):
            return
    if names and (MANIFEST not in names or read_file(out / MANIFEST) != data):
        what = "the folder holds something else than this store"
        raise TokmillError(what, where=str(out), hint="choose another folder")


def _pull_files(source: str, out: Path, data: bytes, manifest: Manifest, advance: Advance) -> None:
    fetch_index(source, out, manifest)
    for entry in manifest.shards:
        path = inside(out / "shards", f"{entry.name}.safetensors")
        whole = path.is_file() and path.stat().st_size == entry.bytes
        if not whole or sha256_file(path) != entry.sha256:
            fetch_shard(source, path, entry)
        advance(entry.bytes)
    write_file(out / MANIFEST, data)
