"""What a source is: configured, pure, columnar, and cut into items."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import msgspec
from msgspec import UNSET, UnsetType

from tokmill import plugins
from tokmill.builds.scan import InputFile
from tokmill.errors import TokmillError
from tokmill.store.manifest import Manifest, OtherFile, Overlay, PlannedItem, Reference
from tokmill.store.probe import Probe
from tokmill.store.schema import Places, Records, Schema
from tokmill.store.vocab import Vocabulary

MAX_ITEM = 64 << 20
"""Input bytes of an item at most; larger inputs are cut into several."""


class Item(msgspec.Struct, frozen=True):
    """One unit of input: a file or the bytes `start` … `stop` of it, or several whole files.

    Records are never cut: an item holds those that begin in its range. Of several files `start` is
    0 and `stop` the sum of their sizes.
    """

    name: str
    path: str
    start: int
    stop: int
    digest: str
    """Sampled digest of the whole file."""
    expands: int = 1
    """How many times larger the content is expected to be (compressed files)."""
    parts_done: int = 0
    """Parts of a stream that are in the store already: read past them, yield nothing."""
    alone: bool = False
    """Nothing else goes into its shard (that of an overlay, beside one of its store)."""
    others: tuple[OtherFile, ...] = ()
    """The further files of an item of several; their names are part of its name."""

    @classmethod
    def again(cls, planned: PlannedItem, parts_done: int = 0) -> Self:
        """Return the item that a plan holds."""
        name, path, start, stop, digest, _, others = msgspec.structs.astuple(planned)
        return cls(name, path, start, stop, digest, parts_done=parts_done, others=others)

    def planned(self, shard: str) -> PlannedItem:
        """Return what a plan holds of the item."""
        return PlannedItem(
            self.name, self.path, self.start, self.stop, self.digest, shard, self.others
        )

    @property
    def size(self) -> int:
        """Input bytes of the item."""
        return self.stop - self.start


class Hash(Protocol):
    """The part of a hashlib object that a source uses."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add content."""
        ...


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """How fast and how large, never what: no field of it may change a byte of the store."""

    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto"
    threads: bool = True
    own_process: bool = False
    """The process does nothing but this build, so what is set for all of it may be set."""
    block_bytes: int = 2 << 20
    scratch: str = ""
    """Folder that all processes of the build share, for what may be lost; empty: none."""


class Frozen(msgspec.Struct, frozen=True):
    """A vocabulary of a store that is being built: its record and its file."""

    vocabulary: Vocabulary
    data: bytes


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a source is asked to read: inputs, and what came with them on the command line."""

    inputs: tuple[str, ...]
    tokenizer: str | None = None
    roles: Mapping[str, str] = {}


class Source(ABC):
    """Raw matter of one kind.

    A source is made three times: to plan (`items`), in every worker (`read`), and to freeze the
    vocabularies before that. `read` is pure: the same item gives the same records.
    """

    Config: ClassVar[type[msgspec.Struct]]
    version: ClassVar[int]
    """Raised when the output for equal input changes."""
    has_tokenizer: ClassVar[bool] = True
    """Whether a tokenizer, or roles of one, may be named."""
    rejects_items: ClassVar[bool] = False
    """Whether whole items are rejected, which then count against items and not against records."""
    stdin_suffix: ClassVar[str] = ""
    """Suffix of the file that a pipe is kept as; "": it cannot be read from a pipe."""
    is_overlay: ClassVar[bool] = False
    """Whether what is built lies in a store, at `folder`."""
    places: ClassVar[Places] = "byte"
    """What `starts` of its records count in an input."""
    hints: ClassVar[Mapping[str, str]] = {}
    """Reason → what helps where most records are left out for it."""
    config: Any
    """The options, with the paths in them absolute, so that repair finds them from anywhere."""
    left_out: Mapping[str, int] = {}
    """Reason → what else is in the folders, once `items` is read."""
    not_text: Sequence[str] = ()
    """Files of folders that are no text, once `items` is read."""
    overlay: Overlay | UnsetType = UNSET
    """What the plan of an overlay says of its store."""
    command: str | UnsetType = UNSET
    """The command that makes an overlay again when its store has changed."""

    @classmethod
    def resolve(cls, config: Any, request: Request) -> Any:
        """Return the options with all that stands in other files, so that the plan holds it."""
        return config

    @classmethod
    @abstractmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the vocabularies of the store to be built."""

    @classmethod
    def folder(cls, config: Any, inputs: Sequence[str]) -> Path:
        """Return the folder of an overlay, which its store and its options decide."""
        raise NotImplementedError

    @classmethod
    def remark(cls, names: Sequence[str], config: Any) -> str:
        """Return what is to be said of files before they are read, "" for nothing.

        Args:
            names: of the inputs.
            config: the options, which may name files too.
        """
        return ""

    @classmethod
    def why_nothing(cls, config: Any, paths: Sequence[str]) -> str:
        """Return what files hold of which (nearly) nothing becomes a record, "" where unknown."""
        return ""

    def __init__(
        self,
        config: Any,
        inputs: Sequence[str],
        vocabularies: Mapping[str, Frozen],
        resources: Resources,
    ) -> None:
        raise NotImplementedError

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The columns of the store."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the options that stand in the plan by another value: files by their digests."""

    def references(self) -> dict[str, Reference]:
        """Return the stores whose records the columns number, by the name in the schema."""
        return {}

    def probe(self, texts: Sequence[str]) -> Probe | None:
        """Return what its engine makes of known texts, where it has one: 64 of its own, or these.

        Whoever builds with another engine is told by it (`tokmill.store.probe`).
        """
        return None

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """Yield the items of the inputs, ordered by name and start."""

    @abstractmethod
    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield an item's records in batches; hand `digest` all the content that is read."""

    def content(self, item: Item, digest: Hash) -> Iterator[None]:
        """Hand `digest` the content of an item as `read` does; yield where a part ends.

        A source that can do it without making records does so.
        """
        for batch in self.read(item, digest):
            if batch.ends_part:
                yield


def places_of(manifest: Manifest) -> Places:
    """Return what the places of a store's records count: bytes of their inputs, or something else.

    A store of format 1 does not say it, so its source is asked, if it can be loaded here.
    """
    if isinstance(manifest.places, str):
        return manifest.places
    if manifest.format == 1:
        with contextlib.suppress(TokmillError):
            found: Places = plugins.load(plugins.SOURCES, manifest.source).places
            return found
    return "byte"


def cut(file: InputFile) -> Iterator[Item]:
    """Yield a file as items of at most 64 MiB."""
    path = str(file.path.absolute())
    for start in range(0, max(file.size, 1), MAX_ITEM):
        yield Item(file.name, path, start, min(start + MAX_ITEM, file.size), file.digest)
