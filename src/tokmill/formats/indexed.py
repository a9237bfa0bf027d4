"""Token files with an index of their documents: the common parts of Megatron and datatrove."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import inside, machine_errors, reading, sampled_digest
from tokmill.builds.scan import InputFile, find_files
from tokmill.builds.source import MAX_ITEM, Hash, Item
from tokmill.formats.tokens import IdType, TokenSource, at_byte, read_exactly, store_dtype
from tokmill.store.schema import Array, Records

DOCUMENTS = 1 << 16


class Index(ABC):
    """The beginnings of the documents of a token file; read on demand, never all at once."""

    dtype: np.dtype[Any]
    documents: int
    tokens: int

    @abstractmethod
    def starts(self, first: int, last: int) -> Array:
        """Return the tokens at which documents first … last begin (int64, last - first + 1).

        Document `documents`, one past the last, begins where the file ends.
        """

    def start(self, document: int) -> int:
        """Return the token at which a document begins."""
        return int(self.starts(document, document)[0])

    @abstractmethod
    def check(self) -> None:
        """Refuse an index that contradicts itself; reads all of it."""


class IndexedSource(TokenSource):
    """A source of pairs: a file of ids, and an index with the beginnings of documents.

    A record is a document. Files are cut at documents into items of at most 64 MiB (or one longer
    document), so all workers can share a file. An item's digest covers the index too; its `path` is
    the folder, as a pair has two files.
    """

    token_suffix: ClassVar[str]
    companions: ClassVar[tuple[str, ...]]
    """Suffixes of the files that belong to one of `token_suffix`."""

    @abstractmethod
    def index_path(self, path: Path) -> Path:
        """Return the index that belongs to a file of ids."""

    @abstractmethod
    def index(self, path: Path) -> Index:
        """Open the index of a file of ids and compare it with the file's size."""

    def files(self) -> Iterator[InputFile]:
        """Yield the files of ids; an input may name the pair by its prefix or its index."""
        for file in self.found():
            index = self.index_path(file.path)
            if not index.is_file():
                raise TokmillError(
                    f"its index {index.name} is missing",
                    where=str(file.path),
                    hint="without an index: `tokmill build bin --dtype u2 --separator-id ID`",
                )
            yield InputFile(file.name, file.path, file.size, self._digest(file.path))

    def found(self) -> list[InputFile]:
        """Return the files of ids; their indexes are not counted as left out."""
        inputs = dict.fromkeys(self._named(argument) for argument in self.inputs)
        found = find_files(list(inputs), [self.token_suffix], choice=self.config)
        self.left_out = {w: n for w, n in found.left_out.items() if w not in self.companions}
        return found.files

    def _named(self, argument: str) -> str:
        path = Path(argument)
        if path.is_dir():
            return argument
        for suffix in (*self.companions, self.token_suffix):
            if path.name.endswith(suffix):
                return str(path.with_name(path.name.removesuffix(suffix) + self.token_suffix))
        return str(path.with_name(path.name + self.token_suffix))

    def _digest(self, path: Path) -> str:
        digest = hashlib.sha256()
        for part in (path, self.index_path(path)):
            with machine_errors("read", part):
                digest.update(sampled_digest(part, part.stat().st_size).encode())
        return digest.hexdigest()[:32]

    def file_dtype(self) -> IdType:
        """Return the widest dtype of the files."""
        return store_dtype([self.index(file.path).dtype for file in self.files()])

    def items(self) -> Iterator[Item]:
        """Yield runs of whole documents of at most 64 MiB (or one that is longer)."""
        for file in self.files():
            index = self.index(file.path)
            index.check()
            size = index.dtype.itemsize
            for start, stop in _runs(index, MAX_ITEM // size):
                folder = str(file.path.parent.absolute())
                yield Item(file.name, folder, start * size, stop * size, file.digest)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield the documents that begin in the item."""
        path = inside(item.path, PurePosixPath(item.name).name)
        self._check_unchanged(path, item)
        index = self.index(path)
        size = index.dtype.itemsize
        every = range(index.documents + 1)
        first = bisect_left(every, item.start // size, key=index.start)
        last = index.documents
        if item.stop // size < index.tokens:
            last = bisect_left(every, item.stop // size, key=index.start)
        # All lengths first: mixed with the ids, the digest would depend on the blocks.
        for at in range(first, last, DOCUMENTS):
            lengths = np.diff(index.starts(at, min(last, at + DOCUMENTS)))
            digest.update(np.ascontiguousarray(lengths, "<i8").tobytes())
        with reading(path) as file:
            for starts in _batches(index, first, last, self.resources.block_bytes // size):
                byte, stop = int(starts[0]) * size, int(starts[-1]) * size
                data = read_exactly(file, byte, stop, path)
                digest.update(data)
                ids = np.frombuffer(data, index.dtype)
                token = self.checked(ids, at_byte(path, byte, size))
                done = min(1.0, (stop - item.start) / max(1, item.size))
                yield Records(starts - starts[0], {"token": token}, starts[:-1] * size, done=done)
        self._check_unchanged(path, item)

    def _check_unchanged(self, path: Path, item: Item) -> None:
        if self._digest(path) != item.digest:
            raise TokmillError(
                "the file or its index has changed since the build was planned",
                where=str(path),
                hint="run the same command again: it plans anew and makes the changed shards again",
            )


def _runs(index: Index, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, last token + 1) of runs of documents of at most `most` tokens."""
    documents, document, begin = range(index.documents + 1), 0, 0
    while index.tokens - begin > most:
        after = bisect_right(documents, begin + most, lo=document, key=index.start) - 1
        if index.start(after) == begin:
            after = bisect_right(documents, begin, lo=document, key=index.start)
        document, stop = after, index.start(after)
        yield begin, stop
        begin = stop
        if begin == index.tokens:
            return
    yield begin, index.tokens


def _batches(index: Index, first: int, last: int, tokens: int) -> Iterator[Array]:
    """Yield the starts of documents first … last - 1, and the end, about `tokens` at a time."""
    for at in range(first, last, DOCUMENTS):
        starts = index.starts(at, min(last, at + DOCUMENTS))
        begin, end = 0, len(starts) - 1
        while begin < end:
            stop = int(np.searchsorted(starts, starts[begin] + tokens, side="right")) - 1
            stop = min(max(begin + 1, stop), end)
            yield starts[begin : stop + 1]
            begin = stop
