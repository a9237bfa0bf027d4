"""Stores at addresses: small files in a cache folder, shards fetched when they are used.

A store is opened in a folder of the cache that is named by its address and manifest, so another
store at the same address has another folder. The processes of a machine share it. The note
`remote.json` is written last: a folder without it is fetched anew. Shards are compared with the
manifest when they are fetched, and when a process uses them first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from tokmill.base import remote
from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.base.files import (
    address_of,
    inside,
    make_folder,
    open_file,
    read_file,
    reading,
    remove,
    remove_leftovers,
    sha256_file,
    stamp,
    write_file,
)
from tokmill.base.headers import refused, tensor_header
from tokmill.base.locks import locked
from tokmill.base.progress import human_bytes, parse_bytes
from tokmill.base.remote import Absent, Changed, Facts, at_once, chunks, head, listed
from tokmill.store import manifest as layout
from tokmill.store.checks.probe import probe_digest, probe_path
from tokmill.store.manifest import Manifest, Plan, Receipt, ShardEntry
from tokmill.store.schema import Array
from tokmill.store.shards.shard import Shard

FOLDER, LIMIT = "TOKMILL_CACHE", "TOKMILL_CACHE_LIMIT"
"""Environment variables: the folder of the cache, and the bytes that its shards may take."""
FILES = re.compile(
    r"(?P<overlay>overlays/[A-Za-z0-9][A-Za-z0-9._-]*/)?"
    r"((?P<index>plan\.json|inputs\.jsonl|projection\.json|vocab/[^/.][^/]*|"
    r"shards/[0-9a-f]{24}(-[0-9]{5,})?\.json)|manifest\.json|"
    r"shards/[0-9a-f]{24}(-[0-9]{5,})?\.safetensors)"
)
"""Names of the files that make a store; `index`: all but manifest and shards."""
WAIT = 600
"""Seconds to wait for another process that fetches the same."""
SPARE = 64 << 20
"""Bytes of a disk that stay free."""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the store of a folder of the cache lies."""

    address: str


def cache_folder() -> Path:
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tokmill")
    return Path(os.environ.get(FOLDER) or os.path.expanduser(default)).absolute()


def cache_limit() -> int:
    """Return the bytes that the shards of the cache may take; 0: no limit."""
    return parse_bytes(os.environ.get(LIMIT) or "0")


def files_at(address: str, manifest: Manifest) -> dict[str, Facts]:
    """Return name → object of the files that make the store at an address.

    https:// lists nothing: there they are those that the manifest names, without overlays.
    """
    if not address.startswith("http"):
        return below(address)
    names = [layout.PLAN, "inputs.jsonl", layout.MANIFEST]
    names += [f"vocab/{one.file}" for one in manifest.vocabularies.values()]
    names += ["vocab/probe.json"] * isinstance(manifest.probe, str)
    for end in ("json", "safetensors"):
        names += [f"shards/{one.name}.{end}" for one in manifest.shards]
    return {name: Facts(f"{address}/{name}", 0) for name in names if FILES.fullmatch(name)}


def below(address: str) -> dict[str, Facts]:
    """Return name → object of the files of stores below an address, by a list."""
    files = {one.address.removeprefix(f"{address}/"): one for one in listed(address)}
    return {name: one for name, one in files.items() if FILES.fullmatch(name)}


def read_manifest(address: str) -> tuple[bytes, Manifest]:
    """Return the manifest at an address; raises `TokmillError` if there is none, or a bad one."""
    where = f"{address}/{layout.MANIFEST}"
    try:
        data = remote.read_whole(where)
    except Absent as error:
        what = "there is no store at the address, or its push has not ended"
        hint = f"`tokmill store push STORE {address}` publishes one; {error.hint}"
        raise TokmillError(what, where=address, hint=hint) from None
    manifest: Manifest = layout.decode(data, where, Manifest)
    if manifest.format != layout.FORMAT:
        what = f"the store has format {manifest.format}, not {layout.FORMAT}"
        raise TokmillError(what, where=address, hint="read it with the tokmill that made it")
    return data, manifest


def fetch_index(address: str, folder: Path, manifest: Manifest) -> None:
    """Fetch all files of a store but shards and manifest, and check them."""
    make_folder(folder / "shards")
    for part in (folder, folder / "shards", folder / "vocab"):
        remove_leftovers(part)

    def fetch(name: str) -> None:
        path = inside(folder, name, deep=True)
        make_folder(path.parent)
        try:
            write_file(path, remote.stream(f"{address}/{name}"), sync=False)
        except Absent:
            if name not in (layout.PLAN, "inputs.jsonl"):
                raise

    names = []
    for name in files_at(address, manifest):
        match = FILES.fullmatch(name)
        if match and match["index"] and not match["overlay"]:
            names.append(name)
    for _ in at_once(fetch, names):
        pass
    check_index(address, folder, manifest)


def check_index(address: str, folder: Path, manifest: Manifest) -> None:
    """Compare the small files of a store that was fetched with the digests that it states."""

    def demand(name: str, good: bool) -> None:
        if not good:
            what = "the file is missing, or not the one that the manifest describes"
            hint = "push the store again, to an empty address"
            raise TokmillError(what, where=f"{address}/{name}", hint=hint)

    for one in manifest.vocabularies.values():
        path = inside(folder / "vocab", one.file)
        demand(f"vocab/{one.file}", path.is_file() and sha256_file(path) == one.sha256)
    demand(f"vocab/{probe_path(folder).name}", probe_digest(folder) == manifest.probe)
    if (folder / layout.PLAN).exists():
        plan: Plan = layout.read_plan(folder)
        demand(layout.PLAN, plan.plan_id == manifest.plan_id)
        lines = folder / "inputs.jsonl"
        demand(lines.name, lines.is_file() and sha256_file(lines) == plan.inputs_sha256)
    for entry in manifest.shards:
        name = f"shards/{entry.name}.json"
        demand(name, (folder / name).is_file())
        receipt = layout.read_checked(folder / name, Receipt)
        stated = (receipt.name, receipt.records, receipt.tokens, receipt.bytes, receipt.sha256)
        demand(name, stated == msgspec.structs.astuple(entry))


def fetch_shard(address: str, path: Path, entry: ShardEntry) -> None:
    """Fetch a shard; one that is not the manifest's is fetched once more, then named."""
    where = f"{address}/shards/{path.name}"

    def content(facts: Facts) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for chunk in chunks(facts):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != entry.sha256:
            raise Changed("other bytes", where=where, hint="")

    for again in (True, False):
        try:
            facts = head(where)
            if facts.size != entry.bytes:
                what = f"{facts.size} bytes instead of {entry.bytes}"
                raise Changed(what, where=where, hint="")
            write_file(path, content(facts), sync=False)
            return
        except (Changed, Absent) as error:
            if again:
                continue
            raise TokmillError(
                f"the shard {entry.name} of the store {address} is missing, damaged or another one "
                f"({error.what}); it was fetched twice",
                where=where,
                hint="remove the object and push the store again: the same push goes on",
            ) from None


class Remote:
    """The shards of a store at an address, in a folder of the cache."""

    fresh = False
    """Whether shards that are in the cache are fetched once more, as to validate the store."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self._checked: dict[str, tuple[int, ...]] = {}

    def file(self, entry: ShardEntry) -> Path:
        path = self._path(entry)
        if self._is_good(path, entry):
            return path
        what = f"another process fetches the shard for more than {WAIT} s"
        lock = path.with_name(f".{path.name}.lock")
        with locked(lock, what, "is the server slow? end that process", wait=WAIT):
            try:
                remove_leftovers(path.parent, path.name)
                if not self._is_good(path, entry):
                    evict_shards(entry.bytes)
                    fetch_shard(self.address, path, entry)
                    with contextlib.suppress(FileNotFoundError):
                        self._checked[entry.name] = stamp(path.stat())[:3]
            finally:
                remove(lock)
        return path

    def shard(self, entry: ShardEntry) -> Shard:
        """Return a shard, mapped; see `file`."""
        for _ in range(8):
            path = self.file(entry)
            try:
                return Shard(path)
            except MachineError as error:
                # Another process may have removed it, to make room. Once mapped, it stays readable.
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
        what = "other processes remove the shards of the cache as soon as they are fetched"
        raise MachineError(what, where=str(self.folder), hint=f"raise {LIMIT}")

    def _is_good(self, path: Path, entry: ShardEntry) -> bool:
        try:
            with reading(path) as file:
                now = stamp(os.fstat(file.fileno()))[:3]
                if self._checked.get(entry.name) == now:
                    return True
                if self.fresh or now[0] != entry.bytes:
                    return False
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    return False
                # When it was opened last; the time of its content, by which it is known, stays.
                os.utime(file.fileno(), ns=(time.time_ns(), now[1]))
                self._checked[entry.name] = now
                return True
        except MachineError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise

    def refresh(self) -> None:
        """Fetch everything once more, as to validate the store: small files now, shards on use."""
        data, manifest = read_manifest(self.address)
        if data != read_file(self.folder / layout.MANIFEST):
            what = "another store has taken the place of the one that was opened"
            raise TokmillError(what, where=self.address, hint="run the same command again")
        fetch_index(self.address, self.folder, manifest)
        self.fresh = True

    def arrays(self, entries: Sequence[ShardEntry], name: str, dtype: str) -> Iterator[Array]:
        """Yield offsets or a column of records, read alone: no shard need be fetched for them."""

        def read(entry: ShardEntry) -> Array:
            path = self._path(entry)
            place: Path | str = path
            try:
                opened: BinaryIO = open_file(path)
            except FileNotFoundError:
                place = f"{self.address}/shards/{path.name}"
                opened = remote.open_input(place, ahead=False)
            hint = "`tokmill store validate` finds all damage"
            with opened as file, refused("the shard is damaged", place, hint=hint):
                header = tensor_header(file, entry.bytes)
                start, stop = header.tensors[name].data_offsets
                file.seek(8 + header.length + start)
                result: Array = np.frombuffer(file.read(stop - start), dtype)
                good = len(result) == entry.records + (name == "offsets")
                if good and name == "offsets":
                    ends = (result[0], result[-1]) == (0, entry.tokens)
                    good = ends and bool((result[1:] >= result[:-1]).all())
                if not good:
                    raise ValueError(f"its {name} do not fit the manifest")
            return result

        return at_once(read, entries)

    def _path(self, entry: ShardEntry) -> Path:
        return inside(self.folder / "shards", f"{entry.name}.safetensors")

    def is_here(self, entry: ShardEntry) -> bool:
        """Say whether a shard is in the cache; it may be damaged."""
        return self._path(entry).exists()


def evict_shards(size: int) -> None:
    """Remove the shards of the cache that were opened longest ago, until there is room.

    What a process has mapped stays readable for it. What other processes are fetching may exceed
    the limit. Raises `MachineError` if a shard is above the limit, or the disk has no room.
    """
    limit, cache = cache_limit(), cache_folder()
    used = sorted(_shards_of(cache))
    short = over = size + SPARE - shutil.disk_usage(cache).free
    if limit:
        over = max(over, size + sum(each for _, each, _ in used) - limit)
    here = [(path, each) for _, each, path in used if layout.SHARD_FILE.fullmatch(path.name)]
    if short > sum(each for _, each in here) or 0 < limit < size:
        why = f"{LIMIT} is {human_bytes(limit)}" if 0 < limit < size else "its disk is full"
        raise MachineError(
            f"the cache has no room for {human_bytes(size)}: {why}",
            where=str(cache),
            hint=f"raise {LIMIT}, free some space, or set {FOLDER} to a folder of a larger disk",
        )
    for path, each in here:
        if over > 0:
            remove(path)
            over -= each


def check_space(stores: Iterable[tuple[Remote, Sequence[ShardEntry]]], at_a_time: int) -> None:
    """Refuse a run whose shards have no room; `at_a_time`: of each store, 0 for all.

    One group of shards is read while the next one is fetched, so two of them need room.
    """
    need = here = 0
    for one, entries in stores:
        largest = sorted(entries, key=lambda entry: -entry.bytes)
        chosen = largest[: 2 * at_a_time or None]
        need += sum(entry.bytes for entry in chosen)
        here += sum(entry.bytes for entry in chosen if one.is_here(entry))
    if not need:
        return
    limit, cache = cache_limit(), make_folder(cache_folder())
    free = shutil.disk_usage(cache).free
    if (limit and need > limit) or need - here + SPARE > free:
        why = f"its disk has {human_bytes(free)} free"
        if limit and need > limit:
            why = f"{LIMIT} is {human_bytes(limit)}"
        raise UsageError(
            f"the shards that are read at a time take {human_bytes(need)} of the cache, and {why}",
            where=str(cache),
            hint=f"--set data.shards=4 reads few shards at a time; or raise {LIMIT}, or set "
            f"{FOLDER} to a folder of a larger disk",
        )


def _shards_of(cache: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (time, bytes, path) of the shards in the cache, and of those that are fetched now."""
    for pattern in ("stores/*/", "stores/*/overlays/*/"):
        for path in cache.glob(f"{pattern}shards/*.safetensors*"):
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                if (path.parent.parent / layout.NOTE).is_file():
                    yield facts.st_atime_ns, facts.st_size, path


def remote_at(path: Path | str) -> Remote | None:
    """Open the store at an address, or in a folder of the cache; None for another path."""
    if not (address := address_of(path)):
        folder = Path(path).absolute()
        # Elsewhere a note is not trusted: whoever wrote it would choose what is fetched.
        if cache_folder() not in folder.parents:
            return None
        note: Note = layout.read_json(folder / layout.NOTE, Note)
        return Remote(folder, note.address)
    data, manifest = read_manifest(address)
    key = hashlib.sha256(f"{address}\0".encode() + data).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", address.split("://", 1)[1])[-60:].strip("-.")
    folder = make_folder(cache_folder() / "stores" / f"{name}-{key}")
    what = f"another process fetches {address}"
    with locked(folder / ".fetch.lock", what, "wait, or end that process", wait=WAIT):
        _fetch_store(address, folder, data, manifest)
        for one in [] if address.startswith("http") else listed(f"{address}/overlays"):
            match = FILES.fullmatch(one.address.removeprefix(f"{address}/"))
            if match and match["overlay"] and one.address.endswith(f"/{layout.MANIFEST}"):
                overlay = match["overlay"].rstrip("/")
                whole, described = read_manifest(f"{address}/{overlay}")
                _fetch_store(f"{address}/{overlay}", folder / overlay, whole, described)
    return Remote(folder, address)


def _fetch_store(address: str, folder: Path, data: bytes, manifest: Manifest) -> None:
    path, note = folder / layout.MANIFEST, folder / layout.NOTE
    if not (note.is_file() and path.is_file() and read_file(path) == data):
        remove(note)
        fetch_index(address, folder, manifest)
        write_file(path, data)
        write_file(note, layout.encode(Note(address)))
