"""Common parts of all exports of stores, and their notes: a small hidden file beside the files.

`.NAME.tokmill.json` identifies the export, and holds size and sha256 of each file. It is written
before the first file and again after the last one, so `tokmill store validate` can check a folder
of exports. Readers of the formats ignore it. A file whose name tokmill chooses is replaced only if
a note names it.
"""

import fnmatch
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import inside, remove, remove_leftovers, sha256_file, write_file
from tokmill.base.locks import writing
from tokmill.store.manifest import canonical_digest, read_checked, with_checksum
from tokmill.store.schema import Array
from tokmill.store.store import Store

SUFFIX = ".tokmill.json"
FORMAT = 1


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A file of an export."""

    name: str
    bytes: int
    sha256: str


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """The note of an export."""

    format: int = FORMAT
    export: str
    """Its kind: npz, bin, …"""
    identity: str
    """Digest of kind, options and the store's content; exports with the same one are equal."""
    complete: bool
    files: list[Written]
    """Until it is complete, all files that it or an earlier export may have written."""


class Problem(msgspec.Struct, frozen=True):
    """One problem of an export."""

    where: str
    what: str


class Checked(msgspec.Struct, frozen=True):
    """The result of a check."""

    path: str
    files: int
    bytes: int
    exports: list[str]
    problems: list[Problem]

    @property
    def ok(self) -> bool:
        return not self.problems


class Export:
    """Writes the files of one export, and its note."""

    def __init__(self, folder: Path, name: str, kind: str, identity: str) -> None:
        self.folder, self.kind, self.identity = folder, kind, identity
        self.path = inside(folder, f".{name}{SUFFIX}")
        self.written: list[Written] = []
        self.before: Note | None = None
        self.is_damaged = False
        if self.path.exists():
            try:
                self.before = read_checked(self.path, Note)
            except TokmillError:
                # Its files are taken for those of an export.
                self.is_damaged = True

    def refuse_others(self, pattern: str, own: str) -> None:
        """Refuse files that match `pattern` and are not this export's: readers would read them too.

        `own`: the pattern of this export's files.
        """
        is_same = self.before is not None and self.before.identity == self.identity
        names = sorted(path.name for path in self.folder.glob(pattern))
        other = [name for name in names if not (is_same and fnmatch.fnmatchcase(name, own))]
        if other:
            what = "of another store or with other options" if self.before else "already"
            raise TokmillError(
                f"the folder holds {pattern} files {what} ({other[0]} …)",
                where=str(self.folder),
                hint="remove them, or choose a new folder",
            )

    def begin(self, paths: Iterable[Path], named: Path) -> None:
        """Note which files will be written, before any is.

        An existing file is refused unless a note in the folder names it, or the user named it
        (`named`).
        """
        claimed = {file.name for file in self.before.files} if self.before else set()
        for path in paths:
            own = path.name in claimed or path == named or self.is_damaged
            if not own and os.path.lexists(path) and not is_written(path):
                raise UsageError(
                    "the file was not written by an export, and would be replaced",
                    where=str(path),
                    hint="move it, or choose another folder",
                )
            claimed.add(path.name)
        remove_leftovers(self.folder, self.path.name)
        self._note([Written(name, 0, "") for name in sorted(claimed)], complete=False)

    def put(self, path: Path, chunks: bytes | str | Iterable[bytes | memoryview]) -> Path:
        remove_leftovers(path.parent, path.name)
        if isinstance(chunks, str):
            chunks = chunks.encode()
        digest, size = hashlib.sha256(), 0

        def hashed(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
            nonlocal size
            for part in parts:
                digest.update(part)
                size += memoryview(part).nbytes
                yield part

        write_file(path, hashed([chunks] if isinstance(chunks, bytes) else chunks))
        self.written.append(Written(path.name, size, digest.hexdigest()))
        return path

    def end(self) -> None:
        self._note(self.written, complete=True)

    def give_up(self) -> None:
        """Restore the note from before, if nothing was written."""
        if self.before is not None and not self.written:
            write_file(self.path, with_checksum(self.before))
        elif not self.written:
            remove(self.path)

    def _note(self, files: list[Written], *, complete: bool) -> None:
        note = Note(export=self.kind, identity=self.identity, complete=complete, files=files)
        write_file(self.path, with_checksum(note))


@contextmanager
def exporting(
    store: Store,
    kind: str,
    config: msgspec.Struct,
    folder: Path,
    name: str,
    *,
    files: Iterable[Path],
    named: Path,
    others: tuple[str, str] | None = None,
) -> Iterator[Export]:
    """Write an export called `name` into a folder; see `Export`.

    `files`: the files to write. `named`: the path that the user has named.
    `others`: a pattern of the files that a reader would read, and the pattern of this export's.
    Raises `MachineError` if another process writes an export of that name into the folder.
    """
    identity = canonical_digest([kind, msgspec.to_builtins(config), store.content])
    with writing(inside(folder, name)):
        export = Export(folder, name, kind, identity)
        if others is not None:
            export.refuse_others(*others)
        export.begin(files, named)
        try:
            yield export
        except Exception:
            export.give_up()
            raise
        export.end()


def write_noted(folder: Path, name: str, kind: str, files: Mapping[str, bytes | str]) -> list[Path]:
    """Write files whose names tokmill chooses, with a note called `name`."""
    data = {inside(folder, file): text for file, text in files.items()}
    with writing(inside(folder, name)):
        export = Export(folder, name, kind, canonical_digest([kind, name]))
        export.begin(data, folder)
        for path, text in data.items():
            export.put(path, text)
        export.end()
    return list(data)


def is_written(path: Path) -> bool:
    return bool(find_notes(path))


def problem_of(folder: Path, file: Written) -> str:
    path = inside(folder, file.name)
    if not path.is_file():
        return "the file is missing"
    size = path.stat().st_size
    if size != file.bytes:
        return f"{size} bytes instead of {file.bytes}"
    return "" if sha256_file(path) == file.sha256 else "the bytes have changed (sha256 differs)"


def find_notes(path: Path) -> list[Path]:
    """Return the notes of the exports in a folder, or of the one that wrote a file."""
    if path.is_dir():
        return sorted(path.glob(f".*{SUFFIX}"))
    notes = sorted(path.parent.glob(f".*{SUFFIX}")) if path.parent.is_dir() else []
    return [note for note in notes if _names(note, path.name)]


def _names(note: Path, name: str) -> bool:
    try:
        content = read_checked(note, Note)
        return name in {file.name for file in content.files}
    except TokmillError:
        return note.name == f".{name}{SUFFIX}"


def check(path: Path) -> Checked:
    """Compare the exports in a folder, or the one of a file, with their notes."""
    files: list[Written] = []
    kinds: list[str] = []
    problems: list[Problem] = []
    folder = path if path.is_dir() else path.parent
    for place in find_notes(path):
        try:
            note = read_checked(place, Note)
            kinds.append(note.export)
            files += note.files
            if not note.complete:
                problems.append(Problem(str(place), "the export has not ended"))
            for file in note.files if note.complete else ():
                if what := problem_of(folder, file):
                    problems.append(Problem(str(inside(folder, file.name)), what))
        except TokmillError as error:
            problems.append(Problem(error.where, error.what))
    size = sum(file.bytes for file in files)
    return Checked(str(path), len(files), size, kinds, problems)


BLOCK = 1 << 20
"""Tokens that an export holds at a time (one record at least)."""


class ExportOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of all exports."""

    column: str = "token"
    """Column of ids to export."""


def check_column(store: Store, options: ExportOptions) -> None:
    column = store.schema.get(options.column)
    if column is None:
        ids = [n for n in store.token_columns if store.schema[n].dtype in ("u1", "u2", "u4")]
        raise UsageError(
            f"the store has no column {options.column!r}",
            where=str(store.path),
            hint=f"--column chooses one of {', '.join(ids)}" if ids else "it has no column of ids",
        )
    if column.per != "token" or column.width or column.dtype not in ("u1", "u2", "u4"):
        raise UsageError(
            f"the column {options.column!r} does not hold one id per token",
            where=str(store.path),
            hint="--column chooses another",
        )


def id_count(store: Store, name: str) -> int:
    """Return the number of ids of a column: its vocabulary's size, else the largest id + 1."""
    vocabulary = store.vocabularies.get(store.schema[name].vocab or "")
    if vocabulary is not None:
        return vocabulary.size
    return int(store.manifest.ranges.get(name, (0, 3 if name == "border" else -1))[1]) + 1


def lengths(store: Store) -> Iterator[Array]:
    """Yield the token counts of all records (int64), a shard at a time."""
    for number in range(len(store.shards)):
        yield np.diff(store.shard(number)["offsets"].astype(np.int64))
    store.check_sizes()


def blocks(store: Store, name: str, tokens: int = BLOCK) -> Iterator[tuple[Array, int, int, int]]:
    """Yield (ids, shard, first record, last record + 1) of whole records, in order.

    A block holds about `tokens` ids, or one longer record; ids that are not in phrases are a view.
    """
    column = store.schema[name]
    for number in range(len(store.shards)):
        shard = store.shard(number)
        offsets = shard["offsets"].astype(np.int64)
        first, count = 0, len(offsets) - 1
        while first < count:
            last = int(np.searchsorted(offsets, offsets[first] + tokens, side="right")) - 1
            last = min(max(last, first + 1), count)
            if column.phrase:
                phrases = shard.records(first, last, {name: column}).phrases
                assert phrases is not None
                ids = phrases.expanded(name)
            else:
                ids = shard[name][int(offsets[first]) : int(offsets[last])]
            yield ids, number, first, last
            first = last
    store.check_sizes()


def pieces(store: Store, name: str, dtype: np.dtype[Any]) -> Iterator[Array]:
    """Yield all ids of a column in order and in `dtype`, about a million at a time."""
    most = np.iinfo(dtype).max
    for ids, _, _, _ in blocks(store, name):
        for start in range(0, len(ids), BLOCK):
            piece = ids[start : start + BLOCK]
            if np.iinfo(piece.dtype).max > most and int(piece.max()) > most:
                raise TokmillError(
                    f"the id {piece.max()} does not fit into {dtype.name}",
                    where=str(store.path),
                    hint="--dtype u4",
                )
            yield np.ascontiguousarray(piece, dtype)


def raw(arrays: Iterable[Array]) -> Iterator[memoryview]:
    """Yield arrays as bytes for `files.write_file`."""
    for array in arrays:
        if array.size:
            yield array.data.cast("B")


class Sink(io.RawIOBase):
    """A file object without seek that collects the output of another library's writer."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._place = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def write(self, data: Any, /) -> int:
        self._parts.append(bytes(data))
        self._place += len(self._parts[-1])
        return len(self._parts[-1])

    def take(self) -> bytes:
        """Return what was written since the last call."""
        data = b"".join(self._parts)
        self._parts = []
        return data


def output_file(out: Path, suffix: str, name: str = "tokens") -> Path:
    return out if out.name.endswith(suffix) else inside(out, f"{name}{suffix}")


def summary(files: Iterable[Path], tokens: int, **more: Any) -> dict[str, Any]:
    paths = list(files)
    return {
        "files": [str(path) for path in paths],
        "tokens": tokens,
        "bytes": sum(path.stat().st_size for path in paths),
        **more,
    }
