"""What a source is: configured, pure, columnar, and cut into items."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from tokmill.errors import TokmillError, UsageError
from tokmill.files import machine_error, machine_errors, sampled_digest
from tokmill.store.schema import Records, Schema
from tokmill.store.vocab import Vocabulary

MAX_ITEM = 64 << 20
"""Input bytes of an item at most; larger inputs are cut into several."""


class Item(msgspec.Struct, frozen=True):
    """One unit of input: a file or the bytes `start` … `stop` of it.

    Records are never cut: an item holds those that begin in its range.
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


class Source(Protocol):
    """Raw matter of one kind.

    A source is made three times: to plan (`items`), in every worker (`read`), and to freeze the
    vocabularies before that. `read` is pure: the same item gives the same records.
    """

    Config: ClassVar[type[msgspec.Struct]]
    version: ClassVar[int]
    """Raised when the output for equal input changes."""
    schema: Schema
    config: Any
    """The options, with the paths in them absolute, so that repair finds them from anywhere."""

    @classmethod
    def freeze(cls, config: msgspec.Struct, request: Request) -> dict[str, Frozen]:
        """Return the vocabularies of the store to be built."""
        ...

    def __init__(
        self,
        config: msgspec.Struct,
        inputs: Sequence[str],
        vocabularies: Mapping[str, Frozen],
        resources: Resources,
    ) -> None: ...

    def identity(self) -> dict[str, Any]:
        """Return the options that stand in the plan by another value: files by their digests."""
        ...

    def items(self) -> Iterator[Item]:
        """Yield the items of the inputs, ordered by name and start."""
        ...

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield an item's records in batches; hand `digest` all the content that is read."""
        ...


class InputFile(msgspec.Struct, frozen=True):
    """A file below one of the INPUT arguments."""

    name: str
    path: Path
    size: int
    digest: str


def find_files(
    inputs: Sequence[str],
    suffixes: Sequence[str],
    takes: Callable[[Path], bool] | None = None,
) -> list[InputFile]:
    """Return the files of the INPUT arguments, ordered by name.

    A file is taken whatever its suffix; of a folder those with one of `suffixes` are, at any depth
    (hidden ones are not), if `takes` says so. The name is the path below the argument. Raises
    `TokmillError` when an input is missing, a folder holds nothing fitting, or two files have one
    name.
    """
    if not inputs:
        raise UsageError("no input was named", hint="give files or folders")
    found: dict[str, Path] = {}
    for argument in inputs:
        root = Path(argument)
        with machine_errors("read", root):
            there, is_folder, is_file = root.exists(), root.is_dir(), root.is_file()
        if not there:
            raise TokmillError(
                "there is no such file or folder", where=argument, hint="check the path"
            )
        if is_folder:
            pairs = [
                (path.relative_to(root).as_posix(), path) for path in files_below(root, suffixes)
            ]
            if not pairs:
                raise TokmillError(
                    f"the folder holds no {' or '.join(suffixes)} file".replace("  ", " "),
                    where=argument,
                    hint="name the files themselves if their suffix is another",
                )
            if takes is not None:
                pairs = [(name, path) for name, path in pairs if takes(path)]
        elif not is_file:
            raise TokmillError(
                "is neither a file nor a folder (a pipe or a device?)",
                where=argument,
                hint="write it to a file first: inputs are read more than once",
            )
        else:
            pairs = [(root.name, root)]
        for name, path in pairs:
            if name in found:
                raise TokmillError(
                    f"two inputs are called {name!r}: {found[name]} and {path}",
                    hint="give their common parent folder, so that the names differ",
                )
            found[name] = path
    files = []
    for name in sorted(found):
        path = found[name]
        with machine_errors("read", path):
            size = path.stat().st_size
        files.append(InputFile(name, path, size, sampled_digest(path, size)))
    return files


OURS = {".lock", "plan.json", "metrics.jsonl"}
"""A folder below an input with one of these is a store or a run, whose logs are no input."""


def files_below(root: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a folder at any depth, hidden ones, stores and runs left out.

    A folder that may not be read is an error: its files would be missing without a word.
    """

    def refuse(error: OSError) -> None:
        raise machine_error("list", error.filename or root, error)

    found: list[Path] = []
    with machine_errors("list", root):
        for folder, folders, names in os.walk(root, onerror=refuse):
            if OURS & set(names) and Path(folder) != root:
                folders[:] = []
                continue
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths = [Path(folder, name) for name in names if not name.startswith(".")]
            found += [p for p in paths if p.name.endswith(tuple(suffixes)) and p.is_file()]
    return found


def cut(file: InputFile) -> Iterator[Item]:
    """Yield a file as items of at most 64 MiB."""
    path = str(file.path.absolute())
    for start in range(0, max(file.size, 1), MAX_ITEM):
        yield Item(file.name, path, start, min(start + MAX_ITEM, file.size), file.digest)
