"""Common parts of all sources that read foreign token files."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.scan import FolderOptions, InputFile, find_files
from tokmill.builds.source import Frozen, Request, Source
from tokmill.store.schema import Array, Column, Schema, id_dtype

IdType = Literal["u1", "u2", "u4"]


class TokenOptions(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of all token files."""

    vocab_size: Annotated[int, Meta(ge=1)] | None = None
    """Number of ids, if no tokenizer is given; ids are checked against it."""


class TokenSource(Source):
    """A source whose input consists of token ids.

    With a tokenizer the store gets the vocabulary `token`, and ids are checked against its size;
    with `vocab_size` they are checked against that number. Both determine the dtype of the store's
    column; with neither, it is the widest dtype of the files.
    """

    Config: ClassVar[type[msgspec.Struct]] = TokenOptions
    version: ClassVar[int] = 1
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the files that are read in folders."""

    @property
    def frozen(self) -> Frozen | None:
        return self.vocabularies.get("token")

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the tokenizer, if one is named, as the vocabulary `token`."""
        if request.tokenizer is None:
            if request.roles:
                raise UsageError(
                    "roles name tokens of a tokenizer, but none was named",
                    hint="--tokenizer tokenizer.json",
                )
            return {}
        tokenizer = plugins.require("tokmill.text.tokenizers.tokenizer").Tokenizer
        vocabulary, data = tokenizer.from_file(request.tokenizer).vocabulary(request.roles)
        if config.vocab_size not in (None, vocabulary.size):
            raise UsageError(
                f"vocab_size = {config.vocab_size}, but the tokenizer has {vocabulary.size} ids",
                where=request.tokenizer,
                hint="leave vocab_size out",
            )
        return {"token": Frozen(vocabulary, data)}

    @property
    def size(self) -> int | None:
        if self.frozen is not None:
            return self.frozen.vocabulary.size
        return self.config.vocab_size

    @cached_property
    def schema(self) -> Schema:
        dtype = self.file_dtype() if self.size is None else id_dtype(self.size)
        return {"token": Column(dtype, vocab="token" if self.frozen else None)}

    def identity(self) -> dict[str, Any]:
        """Return the dtypes of the columns, which follow from the inputs.

        So a store cannot grow by a file with wider ids: it would have two dtypes.
        """
        return {"dtypes": {name: column.dtype for name, column in self.schema.items()}}

    def found(self) -> list[InputFile]:
        listing = find_files(self.inputs, self.suffixes, choice=self.config)
        self.left_out = listing.left_out
        return listing.files

    @abstractmethod
    def file_dtype(self) -> IdType:
        """Return the store's dtype for ids of the files' own width."""

    def checked(self, ids: Array, place: Callable[[int], str]) -> Array:
        """Return ids in the store's dtype; `place` returns the place of the i-th id for errors."""
        target = self.schema["token"].numpy()
        limit = self.size or 1 << (8 * target.itemsize)
        signed = ids.dtype.kind == "i"
        if ids.size and (signed or limit < 1 << (8 * ids.dtype.itemsize)):
            bad = ids >= limit if not signed else (ids >= limit) | (ids < 0)
            if bad.any():
                first = int(bad.argmax())
                swapped = ids.byteswap()
                fits = bool((swapped < limit).all() and (swapped >= 0).all())
                raise TokmillError(
                    f"the id {ids[first]} is none of 0 to {limit - 1}",
                    where=place(first),
                    hint="all ids fit when their bytes are swapped: the file is big-endian"
                    if fits and ids.dtype.itemsize > 1
                    else "the file was made with another tokenizer, or its ids have another width",
                )
        return ids.astype(target, copy=False)


def store_dtype(dtypes: Sequence[np.dtype[Any]]) -> IdType:
    """Return the dtype of a store that is as wide as the widest of the files, at most 32 bits."""
    widest = max((dtype.itemsize for dtype in dtypes), default=2)
    return "u1" if widest == 1 else "u2" if widest == 2 else "u4"


def at_byte(path: Path | str, start: int, size: int) -> Callable[[int], str]:
    """Return a function i → place of the i-th id, for ids of `size` bytes from byte `start` on."""
    return lambda i: f"{path}, byte {start + i * size}"


def read_exactly(file: BinaryIO, start: int, stop: int, path: Path) -> bytes:
    """Return the bytes start … stop - 1 of a file; a file that ends before is an error."""
    file.seek(start)
    data = file.read(stop - start)
    if len(data) != stop - start:
        raise TokmillError(
            f"the file ends at byte {start + len(data)}, {stop} were expected",
            where=str(path),
            hint="it changed while it was read, or its copy was cut off",
        )
    return data
