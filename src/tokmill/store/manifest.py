"""The JSON files of a store: plan, receipts and manifest."""

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tokmill.base.errors import UsageError, plain
from tokmill.base.files import path_from_text, read_file
from tokmill.base.headers import loads_json, refused
from tokmill.store.schema import Places, Schema
from tokmill.store.vocab import Vocabulary

TAIL = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n\}\n\Z')
LENGTH = len(',\n "digest": ""\n}\n') + 64
END = b"\n}\n"


def with_checksum(value: msgspec.Struct) -> bytes:
    """Return a struct as indented JSON with its digest as the last key."""
    data = msgspec.json.format(msgspec.json.encode(value), indent=1)
    body = data.removesuffix(b"\n}")
    digest = hashlib.sha256(body).hexdigest()
    return body + f',\n "digest": "{digest}"'.encode() + END


def check_checksum(data: bytes) -> None:
    """Raise `ValueError` if the content of a file does not have the stated digest."""
    tail = TAIL.search(data, max(0, len(data) - LENGTH))
    if tail is None:
        raise ValueError("it does not end with its digest")
    if hashlib.sha256(data[: tail.start()]).hexdigest().encode() != tail[1]:
        raise ValueError("its content does not match its digest")


T = TypeVar("T", bound=msgspec.Struct)
FORMAT = 2
"""Format of stores. Until the first release a new one replaces the old one."""

CHOICE = ("suffix", "glob")
"""Options that only decide which files of a folder a plan lists; they are part of no identity."""

Shard = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{24}\Z")]
"""Name of a planned shard: a digest, so it can never be a path."""
ShardFile = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{24}(-[0-9]{5,})?\Z")]
"""Name of a part of a shard, as made by `shard_name`."""
SHARD_FILE = re.compile(r"[0-9a-f]{24}(-[0-9]{5,})?\.(safetensors|json)")
"""File name of a shard or its receipt."""


class Overlay(msgspec.Struct, frozen=True, omit_defaults=True):
    """The key `overlay` in plan and manifest of an overlay."""

    base: str
    """Fingerprint of the store to which the overlay belongs."""
    about: dict[str, Any] = {}
    """What made the columns; for vectors: digest of the model, its step, pooling and width."""


class Reference(msgspec.Struct, frozen=True):
    """A store whose record numbers are the values of a column."""

    fingerprint: str
    path: str
    """Its folder, relative to the folder of the store that refers to it, or absolute. No part of
    any identity, and not trusted: see `store/references.py`."""
    records: int
    recipe_id: str
    """Recipe of that store. It shows whether a changed store has grown or is a different one."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """Source and options of a build."""

    source: str
    options: dict[str, Any]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a build will do, fixed before it begins.

    `recipe` is everything that decides the bytes of the store, except the inputs.
    """

    format: int = FORMAT
    recipe_id: str
    plan_id: str
    recipe: dict[str, Any]
    schema: Schema
    vocabularies: dict[str, Vocabulary]
    items: int
    input_bytes: int
    shards: int
    options: dict[str, Any]
    """The source's options as given; in the recipe, digests stand in place of file names."""
    roots: list[str]
    """The INPUT arguments, absolute, to find the inputs again; no part of any identity."""
    overlay: Overlay | UnsetType = UNSET
    left_out: dict[str, int] | UnsetType = UNSET
    """Reason → number of files and folders below the inputs that were not read; no part of any
    identity."""
    not_text: list[str] | UnsetType = UNSET
    """Files in folders that were not read because they are not text."""
    command: str | UnsetType = UNSET
    """The command that makes an overlay again when its base has changed."""
    references: dict[str, Reference] | UnsetType = UNSET
    """Name (`ref` of columns) → store."""
    tokenizer: str | UnsetType = UNSET
    """The tokenizer's file, absolute; with `roles` it makes a lost vocabulary again."""
    roles: dict[str, str] | UnsetType = UNSET
    """Role → special token, if roles were named."""
    places: Places | UnsetType = UNSET
    """The unit of the column `start`, if it is not bytes."""
    inputs_sha256: str

    def inputs(self) -> list[str]:
        return [path_from_text(root) for root in self.roots]


class OtherFile(msgspec.Struct, frozen=True, array_like=True):
    """A further file of an item, read whole, such as the second one of a pair."""

    path: str
    digest: str
    """Sampled digest of the file."""


class PlannedItem(msgspec.Struct, frozen=True, array_like=True):
    """One line of `inputs.jsonl`: an item, and its shard."""

    name: str
    path: str
    start: int
    stop: int
    digest: str
    shard: Shard
    others: tuple[OtherFile, ...] = ()
    """The further files of an item of several; their names are part of its name."""

    @property
    def size(self) -> int:
        return self.stop - self.start


def item_line(item: PlannedItem) -> Any:
    """Return what a line of `inputs.jsonl` holds; that of an item of one file ends at its shard."""
    return item if item.others else msgspec.structs.astuple(item)[:-1]


def with_paths(item: PlannedItem, change: Callable[[str], str]) -> PlannedItem:
    """Return an item with its paths changed, such as to text that JSON holds."""
    files = tuple(msgspec.structs.replace(other, path=change(other.path)) for other in item.others)
    return msgspec.structs.replace(item, path=change(item.path), others=files)


def item_identity(item: Any) -> bytes:
    """Return the bytes that an item (planned or not) adds to identities; its path is not used."""
    digests = "".join(f"\0{other.digest}" for other in item.others)
    return f"\0{item.name}\0{item.start}\0{item.stop}\0{item.digest}{digests}".encode()


def plan_digest(recipe_id: str, items: Iterable[Any]) -> str:
    digest = hashlib.sha256(recipe_id.encode())
    for item in items:
        digest.update(item_identity(item))
    return digest.hexdigest()


class ItemReceipt(msgspec.Struct, frozen=True):
    """The result of one item in one shard."""

    name: str
    start: int
    stop: int
    bytes: int
    """Bytes of content that were read. Differs from the range, as records are not cut."""
    sha256: str
    records: int
    tokens: int
    skipped: int
    rejected: int


class Rejects(msgspec.Struct, frozen=True, array_like=True):
    """A rejected record, or several that were rejected for the same reason."""

    item: int
    """Number of the item in the receipt."""
    first: int
    """Where the first record begins: a byte, a row."""
    last: int
    """Where the last one begins."""
    count: int
    reason: str


class Cut(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the receipt of a cut shard says of its first items alone, which were read to the end."""

    items: int
    """How many these are; a build that continues keeps their records."""
    rejects: int = 0
    """How many of those in `rejects`."""
    rejected: dict[str, int] = {}
    skipped: dict[str, int] = {}
    notes: dict[str, int] = {}


class Receipt(msgspec.Struct, frozen=True):
    """Commits a shard. It holds no time, path or worker, so equal builds have equal receipts."""

    shard: Shard
    part: Annotated[int, msgspec.Meta(ge=0)]
    last: bool
    records: int
    tokens: int
    bytes: int
    sha256: str
    ranges: dict[str, tuple[int | float, int | float]]
    items: list[ItemReceipt]
    rejects: list[Rejects] = []
    """The first 4,096 rejected records."""
    rejected: dict[str, int] = {}
    """Reason → number of rejected records."""
    skipped: dict[str, int] = {}
    """Reason → number of records that were skipped by a rule."""
    notes: dict[str, int] = {}
    """Change → how often it was made, such as ids that were replaced."""
    format: int = FORMAT
    cut: Cut | UnsetType = UNSET
    """Present if a time limit or a signal ended the shard before its last item did."""
    done: float | UnsetType = UNSET
    """Share of the last item that a cut part covers, if the source knows it."""

    @property
    def whole(self) -> list[ItemReceipt]:
        return self.items if self.cut is UNSET else self.items[: self.cut.items]

    @property
    def name(self) -> str:
        """File name of the shard without its suffix."""
        return shard_name(self.shard, self.part)


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """A shard in the manifest."""

    name: ShardFile
    records: int
    tokens: int
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a store; written last, replaced atomically."""

    format: int = FORMAT
    producer: str
    complete: bool
    recipe_id: str
    plan_id: str
    fingerprint: str
    source: str
    schema: Schema
    vocabularies: dict[str, Vocabulary]
    records: int
    tokens: int
    bytes: int
    input_bytes: int
    """Bytes of content that were read."""
    ranges: dict[str, tuple[int | float, int | float]]
    skipped: dict[str, int]
    rejected: dict[str, int]
    notes: dict[str, int] = {}
    left_out: dict[str, int] | UnsetType = UNSET
    """As in the plan."""
    overlay: Overlay | UnsetType = UNSET
    """Only in overlays: the store to which it belongs."""
    references: dict[str, Reference] | UnsetType = UNSET
    """Name (`ref` of columns) → store."""
    places: Places | UnsetType = UNSET
    """The unit of the column `start`, if it is not bytes."""
    probe: str | UnsetType = UNSET
    """sha256 of `vocab/probe.json`: known texts and the ids that the build's engine gave them."""
    shards: list[ShardEntry]

    def counts(self) -> dict[str, Any]:
        """Return how much a store holds, and of what it was built."""
        names = "records tokens shards bytes input_bytes skipped rejected notes"
        return {name: getattr(self, name) for name in names.split()} | {"shards": len(self.shards)}

    @property
    def unit(self) -> Places:
        return self.places if isinstance(self.places, str) else "byte"


def shard_name(shard: str, part: int) -> str:
    return shard if part == 0 else f"{shard}-{part:05d}"


def canonical_digest(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON (sorted keys, no spaces)."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def encode(value: Any, indent: int = 1) -> bytes:
    """Return a value as indented JSON; columns keep their order."""
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"a name is not UTF-8, so JSON cannot hold it: {plain(error.object)}",
            hint="rename that file or folder; only inputs may have such names",
        ) from None
    return msgspec.json.format(encoded, indent=indent) + b"\n"


def read_json(path: Path, kind: Any) -> Any:
    """Read a JSON file of a type; raises `TokmillError` if it is damaged."""
    return _decoded(path, kind, has_checksum=False)


def read_checked(path: Path, kind: type[T]) -> T:
    """Read a file with a digest (plan, manifest, receipt); raises `TokmillError` if it changed."""
    return _decoded(path, kind, has_checksum=True)


PLAN, MANIFEST = "plan.json", "manifest.json"
NOTE = "remote.json"
"""File in a folder of the cache that says at which address its store lies."""
DESCRIPTIONS: dict[str, type[Plan] | type[Manifest]] = {PLAN: Plan, MANIFEST: Manifest}
"""Name → type of the files that describe a whole store, in the order in which they are asked."""


def read_plan(store: Path) -> Plan:
    return read_checked(store / PLAN, Plan)


def _decoded(path: Path, kind: Any, *, has_checksum: bool) -> Any:
    return decode(read_file(path), path, kind, has_checksum=has_checksum)


def decode(data: bytes, where: Path | str, kind: Any, *, has_checksum: bool = True) -> Any:
    """Return the content of a file that was read; raises `TokmillError` if it is damaged."""
    with refused(
        "the file cannot be read",
        where,
        hint="it is damaged, or of another version of tokmill; in a store, the same `tokmill "
        "build` makes it again",
    ):
        if has_checksum:
            check_checksum(data)
        return loads_json(data, kind)
