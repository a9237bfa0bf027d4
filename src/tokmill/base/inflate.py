"""Content of compressed files (.gz, .xz, .bz2, .zst), as a stream and in bounded memory."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors
from tokmill.base.remote import open_input

MAGIC = {
    ".gz": b"\x1f\x8b\x08",
    ".xz": b"\xfd7zXZ\x00",
    ".bz2": b"BZh",
    ".zst": b"\x28\xb5\x2f\xfd",
}
"""Suffix → the bytes that a compressed file begins with."""
BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
"""After `BZh` and a digit: the beginning of a block of .bz2, or its end."""
CAT = {".gz": "zcat", ".xz": "xzcat", ".bz2": "bzcat", ".zst": "zstdcat"}
"""Suffix → the command that writes the content of such a file."""
PIECE = {".gz": 1 << 16, ".xz": 1 << 16, ".bz2": 1 << 16, ".zst": 1 << 13}
OUTPUT = 1 << 20
PADDED = (".gz", ".xz", ".bz2")
"""Formats that may have zero bytes after a member."""
XZ_MEMORY = 1 << 30
"""Most memory of a decoder of .xz; `xz -9` needs 65 MiB."""


def packing(head: bytes) -> str:
    """Return the suffix of the compression that a file's first bytes show, "" for none."""
    compression = next((suffix for suffix, magic in MAGIC.items() if head.startswith(magic)), "")
    # Text may begin with the three letters of .bz2.
    return compression if compression != ".bz2" or head[4:10] in BLOCKS else ""


def inflate(
    path: str, tell: Callable[[int], None] | None = None, kind: str = ""
) -> Iterator[bytes]:
    """Yield the content of all members or frames of a compressed file.

    `tell` is called with the byte of the file up to which the yielded content was compressed.
    `kind` is a key of `MAGIC`; without it the file's suffix decides.

    Raises `TokmillError` if a member is damaged, or does not end with the file.
    """
    kind = kind or next(ending for ending in MAGIC if path.lower().endswith(ending))
    with machine_errors("read", path), open_input(path) as file:
        current: Any = None
        data = b""
        while True:
            # A decoder of .xz or .bz2 may hold content back after it has taken all data.
            if not data and getattr(current, "needs_input", True):
                data = file.read(PIECE[kind])
                if not data:
                    break
            if current is None:
                if kind in PADDED and not (data := data.lstrip(b"\0")):
                    continue
                current = decompressor(kind)
            try:
                if kind == ".gz":
                    out = current.decompress(data, OUTPUT)
                    data = current.unconsumed_tail or (current.unused_data if current.eof else b"")
                else:
                    most = () if kind == ".zst" else (OUTPUT,)
                    out = current.decompress(data, *most)
                    data = current.unused_data if current.eof else b""
            except Exception as error:
                # `bz2` has no error of its own.
                kinds = zlib.error | lzma.LZMAError | OSError
                if not isinstance(error, kinds) and type(error).__name__ != "ZstdError":
                    raise
                raise _broken(path, str(error)) from None
            if current.eof:
                current = None
            if out:
                if tell is not None:
                    tell(file.tell() - len(data))
                yield out
        if current is not None:
            raise _broken(path, "it ends in the middle of a member")


def head_of(path: str, size: int, kind: str = "") -> bytes:
    """Return the first bytes of a file, decompressed; `kind` as in `inflate`."""
    if not (kind or path.lower().endswith(tuple(MAGIC))):
        with open_input(path) as file:
            return file.read(size)
    head = b""
    for chunk in inflate(path, kind=kind):
        head += chunk
        if len(head) >= size:
            break
    return head[:size]


def decompressor(kind: str) -> Any:
    """Return a new decoder of one member or frame."""
    if kind == ".gz":
        return zlib.decompressobj(31)
    if kind == ".xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
    if kind == ".bz2":
        return bz2.BZ2Decompressor()
    zstandard = plugins.require("zstandard")
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def _broken(path: str, what: str) -> TokmillError:
    return TokmillError(
        f"the compressed file is damaged or cut off: {what}",
        where=path,
        hint="test it with gzip -t, xz -t, bzip2 -t or zstd -t, and fetch it again",
    )
