"""Notes of exports: a small hidden file beside the files of an export.

`.NAME.tokmill.json` identifies the export, and holds size and sha256 of each file. It is written
before the first file and again after the last one. So the same export can complete an interrupted
one, and `tokmill store validate` can check a folder of exports. Readers of the formats ignore it. A
file whose name tokmill chooses is replaced only if a note names it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import inside, remove, remove_leftovers, sha256_file, write_file
from tokmill.base.locks import writing
from tokmill.store.manifest import canonical_digest, read_sealed, sealed
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
    claimed: list[str] = []
    """Names of files that it may have begun to write, or that an earlier export wrote."""


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
    """Kinds of the exports."""
    problems: list[Problem]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def note_path(folder: Path, name: str) -> Path:
    """Return the path of the note of an export called `name`."""
    return inside(folder, f".{name}{SUFFIX}")


class Export:
    """Writes the files of one export; files that already equal their note are not written again."""

    def __init__(self, folder: Path, name: str, kind: str, identity: str) -> None:
        self.folder, self.kind, self.identity = folder, kind, identity
        self.path = note_path(folder, name)
        self.written: list[Written] = []
        self.changed = False
        """Whether a file was written."""
        self.before: dict[str, Written] = {}
        self.known: Note | None = None
        self.claimed: list[str] = []
        if self.path.exists():
            try:
                self.known = read_sealed(self.path, Note)
            except TokmillError:
                # With a damaged note, all files are written again.
                self.changed = True
        self.found = self.known
        if self.is_same:
            assert self.known is not None
            self.before = {file.name: file for file in self.known.files}

    @property
    def is_same(self) -> bool:
        """Whether the folder holds the same export, or a part of it."""
        return self.known is not None and self.known.identity == self.identity

    def claim(self, paths: Iterable[Path], named: Path) -> None:
        """Check which files will be written, before any is written.

        An existing file is refused unless a note in the folder names it, or the user named it
        (`named`).
        """
        mine = self.known.files if self.known else []
        # With a damaged note, the files are taken for those of an export.
        is_damaged = self.known is None and self.path.exists()
        claimed = {*(self.known.claimed if self.known else []), *(file.name for file in mine)}
        for path in paths:
            known = path.name in claimed or path == named or is_damaged
            if not known and os.path.lexists(path) and not is_written(path):
                raise UsageError(
                    "the file was not written by an export, and would be replaced",
                    where=str(path),
                    hint="move it, or choose another folder",
                )
            claimed.add(path.name)
        self.claimed = sorted(claimed)

    def refuse_others(self, pattern: str, own: str) -> None:
        """Refuse files that match `pattern` and are not this export's: readers would read them too.

        `own`: the pattern of this export's files.
        """
        found = sorted(path.name for path in self.folder.glob(pattern))
        other = [name for name in found if not (self.is_same and fnmatch.fnmatchcase(name, own))]
        if other:
            what = "of another store or with other options" if self.known else "already"
            raise TokmillError(
                f"the folder holds {pattern} files {what} ({other[0]} …)",
                where=str(self.folder),
                hint="remove them, or choose a new folder",
            )

    def begin(self) -> None:
        """Note that the export has begun, and the files that were written before."""
        remove_leftovers(self.folder, self.path.name)
        self._note(complete=False, files=list(self.before.values()))

    def put(self, path: Path, chunks: bytes | str | Iterable[bytes | memoryview]) -> Path:
        """Write a file atomically, unless it equals its note; then `chunks` are not read."""
        remove_leftovers(path.parent, path.name)
        if not self.stands(path):
            self.changed = True
            if isinstance(chunks, str):
                chunks = chunks.encode()
            if isinstance(chunks, bytes):
                chunks = [chunks]
            digest, size = hashlib.sha256(), 0

            def hashed(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
                nonlocal size
                for part in parts:
                    digest.update(part)
                    size += memoryview(part).nbytes
                    yield part

            write_file(path, hashed(chunks))
            self.before[path.name] = Written(path.name, size, digest.hexdigest())
            self.begin()
        self.written.append(self.before[path.name])
        return path

    def stands(self, path: Path) -> bool:
        """Say whether a file exists and equals its note."""
        known = self.before.get(path.name)
        return known is not None and not problem_of(self.folder, known)

    def end(self) -> None:
        self._note(complete=True, files=self.written)

    def give_up(self) -> None:
        """Restore the old note, as nothing was written."""
        if self.found is None:
            remove(self.path)
        else:
            write_file(self.path, sealed(self.found))

    def _note(self, *, complete: bool, files: list[Written]) -> None:
        note = Note(
            export=self.kind,
            identity=self.identity,
            complete=complete,
            files=files,
            claimed=[] if complete else self.claimed,
        )
        if note != self.known or not self.path.exists():
            write_file(self.path, sealed(note))
            self.known = note


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
        with _begun(export, files, named):
            yield export


def write_noted(folder: Path, name: str, kind: str, files: Mapping[str, bytes | str]) -> list[Path]:
    """Write files whose names tokmill chooses, with a note called `name`.

    Raises `UsageError` if one would replace a file that no note names.
    """
    data = {inside(folder, file): text for file, text in files.items()}
    with writing(inside(folder, name)):
        export = Export(folder, name, kind, canonical_digest([kind, name]))
        with _begun(export, data, folder):
            for path, text in data.items():
                text = text.encode() if isinstance(text, str) else text
                known = export.before.get(path.name)
                if known is not None and known.sha256 != hashlib.sha256(text).hexdigest():
                    del export.before[path.name]
                export.put(path, text)
    return list(data)


@contextmanager
def _begun(export: Export, files: Iterable[Path], named: Path) -> Iterator[None]:
    export.claim(files, named)
    export.begin()
    try:
        yield
    except Exception:
        if not export.before:
            export.give_up()
        raise
    export.end()


def is_written(path: Path) -> bool:
    """Say whether a note beside a file names it."""
    return bool(find_notes(path))


def problem_of(folder: Path, file: Written) -> str:
    """Return the problem of a file, or ""."""
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
        found = read_sealed(note, Note)
        return name in {*(file.name for file in found.files), *found.claimed}
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
            note = read_sealed(place, Note)
            kinds.append(note.export)
            files += note.files
            if not note.complete:
                problems.append(Problem(str(place), "the export has not ended"))
            for file in note.files:
                if what := problem_of(folder, file):
                    problems.append(Problem(str(inside(folder, file.name)), what))
        except TokmillError as error:
            problems.append(Problem(error.where, error.what))
    size = sum(file.bytes for file in files)
    return Checked(str(path), len(files), size, kinds, problems)
