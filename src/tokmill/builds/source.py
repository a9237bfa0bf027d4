"""Sources: what a build reads, cut into items and turned into records in columns.

`WholeFiles` are sources whose items are hashed first, then read as a stream of records. The first
build of a store's shards writes the probe of its source, all later ones compare with it.
"""

import contextlib
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import make_folder, place_of, reading, remove, write_file
from tokmill.base.locks import locked
from tokmill.builds.scan import InputFile, find_files
from tokmill.store import manifest as layout
from tokmill.store.checks.probe import Probe, compare, probe_digest, probe_path, read_probe
from tokmill.store.manifest import (
    Made,
    Manifest,
    OtherFile,
    Overlay,
    Plan,
    PlannedItem,
    Reference,
    with_checksum,
)
from tokmill.store.schema import Places, Records, Schema
from tokmill.store.vocab import Vocabulary

MAX_ITEM = 64 << 20
"""Input bytes of an item at most; larger inputs are cut into several."""


class Item(msgspec.Struct, frozen=True):
    """One unit of input: a file, the bytes `start` … `stop` of a file, or several whole files.

    Records are never cut: an item has the records that begin in its range. For several files
    `start` is 0 and `stop` the sum of their sizes.
    """

    name: str
    path: str
    start: int
    stop: int
    digest: str
    """Sampled digest of the whole file."""
    expands: int = 1
    """Expected size of the content / size of the input (for compressed files)."""
    parts_done: int = 0
    """Parts of a stream that are in the store already; `read` skips them."""
    alone: bool = False
    """Whether its shard holds no other item (as in overlays)."""
    others: tuple[OtherFile, ...] = ()
    """The other files of an item of several files; their names are part of its name."""

    @classmethod
    def again(cls, planned: PlannedItem, parts_done: int = 0) -> Self:
        name, path, start, stop, digest, _, others = msgspec.structs.astuple(planned)
        return cls(name, path, start, stop, digest, parts_done=parts_done, others=others)

    def planned(self, shard: str) -> PlannedItem:
        return PlannedItem(
            self.name, self.path, self.start, self.stop, self.digest, shard, self.others
        )

    @property
    def size(self) -> int:
        return self.stop - self.start


class Hash(Protocol):
    """The part of a hashlib object that a source uses."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class Frozen(msgspec.Struct, frozen=True):
    """A vocabulary of a store that is being built: its record and its file."""

    vocabulary: Vocabulary
    data: bytes


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Speed and memory of a build; no field may change a byte of the store."""

    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto"
    threads: bool = True
    block_bytes: int = 2 << 20
    scratch: str = ""
    """Folder for files that may be lost, shared by all processes of the build; empty: none."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a build, and the tokenizer and roles that were named with them."""

    inputs: tuple[str, ...]
    tokenizer: str | None = None
    roles: Mapping[str, str] = {}


class Source(ABC):
    """A kind of input, and how it becomes records.

    A build uses the class to make the vocabularies (`freeze`), one instance to plan (`items`), and
    one in every worker (`read`). `read` is pure: the same item always gives the same records.
    """

    Config: ClassVar[type[msgspec.Struct]]
    version: ClassVar[int]
    """Increase it when the output for equal input changes."""
    has_tokenizer: ClassVar[bool] = True
    """Whether a tokenizer and roles may be named."""
    rejects_items: ClassVar[bool] = False
    """Whether whole items are rejected; --max-rejects is then a share of the items."""
    is_overlay: ClassVar[bool] = False
    """Whether it builds an overlay, in `folder`."""
    is_bounded: bool = True
    """Whether memory is limited by the size of an item (`bounds`). Not where stores are read, and
    not where it is bounded otherwise: libraries in Rust and C++ end the process at such a limit."""
    reads_addresses: ClassVar[bool] = False
    """Whether it reads ranges of its inputs, so that these may be addresses."""
    places: ClassVar[Places] = "byte"
    """Unit of `starts` of its records."""
    hints: ClassVar[Mapping[str, str]] = {}
    """Reason → hint if most records were left out for this reason."""
    explained: ClassVar[Collection[str]] = ("missing", "type", "json", "too long")
    """Reasons for which `why_nothing` reads the files again."""
    config: Any
    """The options, with absolute paths, so that a worker in another folder finds the files."""
    left_out: Mapping[str, int] = {}
    """Reason → number of files and folders that are not read; known after `items`."""
    not_text: Sequence[str] = ()
    """Files in folders that are not text; known after `items`."""
    overlay: Overlay | UnsetType = UNSET
    """For overlays: the key `overlay` of the plan."""
    command: str | UnsetType = UNSET
    """The command that makes an overlay again when its store has changed."""

    @classmethod
    def resolve(cls, config: Any, request: Request) -> Any:
        """Return the options with the content of other files in place of names, for the plan."""
        return config

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the vocabularies of the store; by default none."""
        if request.tokenizer is not None or request.roles:
            raise UsageError(
                "these records have no tokenizer", hint="leave --tokenizer and --role out"
            )
        return {}

    @classmethod
    def to_predict(cls, made: Made, path: str, lines: int) -> Made:
        """Return source and options that read a file without labels as a store was built (`made`).

        `lines`: texts in a line, if each line is a record; 0: it is a file of this kind.
        """
        if lines:
            raise UsageError(
                f"a run on a store of {made.source} reads no lines of text",
                hint=f"give it a store, or what `tokmill build {made.source}` reads",
            )
        return made

    @classmethod
    def folder(cls, config: Any, inputs: Sequence[str]) -> Path:
        raise NotImplementedError

    @classmethod
    def remark(cls, names: Sequence[str], config: Any) -> str:
        """Return a remark on files before they are read, or "".

        Args:
            names: names of the inputs.
            config: the options, which may name files too.
        """
        return ""

    @classmethod
    def outcome(cls, config: Any, inputs: Sequence[str], manifest: Manifest) -> str:
        """Return a remark on a whole store that was made of `inputs`, or ""."""
        return ""

    @classmethod
    def why_nothing(cls, config: Any, paths: Sequence[str]) -> str:
        """Return a hint if (nearly) no record was made of some files: what they hold; or ""."""
        return ""

    def __init__(
        self,
        config: Any,
        inputs: Sequence[str],
        vocabularies: Mapping[str, Frozen],
        resources: Resources,
    ) -> None:
        self.config, self.inputs, self.resources = config, list(inputs), resources
        self.vocabularies = vocabularies
        self.prepare()

    def prepare(self) -> None:  # noqa: B027
        """Check the options, open what is read; called at the end of the constructor."""

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The columns of the store."""

    def identity(self) -> dict[str, Any]:
        """Return the options whose values in the recipe differ: digests in place of file names."""
        return {}

    def references(self) -> dict[str, Reference]:
        """Return `ref` of columns → the store to which they refer."""
        return {}

    def probe(self, texts: Sequence[str]) -> Probe | None:
        """Return the ids that its engine gives known texts: its own 64, or `texts`.

        With it a change of the engine is noticed (`store.checks.probe`). None without an engine.
        """
        return None

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """Yield the items of the inputs, ordered by name and start."""

    @abstractmethod
    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield an item's records in batches; update `digest` with all content that is read."""

    def content(self, item: Item, digest: Hash) -> Iterator[None]:
        """Update `digest` with the content of an item, as `read` does; yield where a part ends.

        Sources override this if they can do it without making records.
        """
        for batch in self.read(item, digest):
            if batch.ends_part:
                yield


def cut(file: InputFile) -> Iterator[Item]:
    """Yield a file as items of at most 64 MiB."""
    path = place_of(file.path)
    for start in range(0, max(file.size, 1), MAX_ITEM):
        yield Item(file.name, path, start, min(start + MAX_ITEM, file.size), file.digest)


class WholeFiles(Source):
    """A source that makes the records of an item of all bytes of its files.

    A shard is cut after `part_bytes` of tokens (or of phrases), so that memory is bounded.
    """

    part_bytes: ClassVar[int] = 64 << 20

    @abstractmethod
    def batches(self, item: Item) -> Iterator[Records]:
        """Yield the records of an item; which of them end a part is decided here."""

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
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


class Gathered(Protocol):
    """Records that are gathered from the front of a file."""

    def positions(self) -> Iterator[int]:
        """Gather entry after entry; yield the byte up to which the file is read after each."""
        ...

    def is_full(self, size: int) -> bool: ...

    def records(self) -> Records: ...


class GatheredFiles(Source):
    """A source of files that can only be read from the front, as pickles, in parts of 64 MiB."""

    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of the files that are read in folders."""

    @abstractmethod
    def gather(self, path: Path) -> Gathered:
        """Begin to read a file."""

    def items(self) -> Iterator[Item]:
        listing = find_files(self.inputs, self.suffixes, choice=self.config)
        self.left_out = listing.left_out
        for file in listing.files:
            yield Item(file.name, str(file.path.absolute()), 0, file.size, file.digest)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        gathered, part = self.gather(Path(item.path)), 0
        with reading(item.path) as raw:
            for position in chain(gathered.positions(), [item.stop]):
                ended = position == item.stop
                ends_part = not ended and position >= (part + 1) * MAX_ITEM
                if not (ended or ends_part or gathered.is_full(position - raw.tell())):
                    continue
                records = gathered.records()
                records.ends_part, records.done = ends_part, position / max(1, item.stop)
                if part >= item.parts_done:
                    while data := raw.read(min(1 << 20, position - raw.tell())):
                        digest.update(data)
                    yield records
                else:
                    raw.seek(position)
                part += ends_part


PROBE_LOCK = "vocab/.probe.lock"
HINT = (
    "use the packages or the --engine with which the store was begun; or build a new store, or "
    "this one anew with --fresh"
)


def settle_probe(source: Source, store: Path) -> None:
    """Compare the ids of known texts with those of the store's probe; write a missing probe.

    Raises `TokmillError` if the engine gives other ids.
    """
    now = source.probe(())
    if now is None:
        return
    path = probe_path(store)
    if not path.exists():
        make_folder(path.parent)
        lock = store / PROBE_LOCK
        with locked(lock, "", "", wait=math.inf):
            if not path.exists():
                write_file(path, with_checksum(now))
            remove(lock)
    stored = read_probe(store)
    if stored.texts() != now.texts():
        now = source.probe(stored.texts()) or now
    compare(
        stored.answers,
        now.answers,
        where=str(path),
        who="the engine gives other ids than when the store was begun",
        hint=HINT,
    )


def restore_probe(store: Path, plan: Plan, make: Callable[[], Source]) -> bool:
    """Write the probe of a store again if it is damaged or lost; say whether it was written.

    `make` makes the source, if it is needed.

    Raises `TokmillError` if the new probe has another digest than the manifest states.
    """
    kind = plugins.load(plugins.SOURCES, plan.recipe["source"])
    if kind.probe is Source.probe:
        return False
    wanted = None
    with contextlib.suppress(TokmillError):
        wanted = layout.read_checked(store / "manifest.json", Manifest).probe
    if probe_path(store).exists() and (not wanted or wanted == probe_digest(store)):
        with contextlib.suppress(TokmillError):
            read_probe(store)
            return False
    probe = make().probe(())
    if probe is None:
        return False
    data = with_checksum(probe)
    if wanted and wanted != hashlib.sha256(data).hexdigest():
        raise TokmillError(
            "the probe was damaged, and the engine gives other ids than when the store was built",
            where=str(probe_path(store)),
            hint=HINT,
        )
    make_folder(store / "vocab")
    write_file(probe_path(store), data)
    return True
