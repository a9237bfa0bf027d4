"""Tensors as safetensors files, written through `files.py` and without a pickle.

Format: 8 bytes little-endian header length, JSON header, data; https://github.com/huggingface/
safetensors. The library reads what is written here, and the reverse.

What is written here is sealed: the metadata hold the sha256 of the file, taken with zeros in the
place of that digest. Whoever reads tensors checks the seal, so a flipped bit is an error wherever
weights are read. Files of others have none.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from tokmill.errors import TokmillError
from tokmill.files import machine_errors, write_file
from tokmill.headers import MAX_HEADER, Entry, loads_json

TYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in TYPES.items()}
MOST_AXES = 32
BLOCK = 1 << 20
"""Bytes that are hashed at a time where nothing else is done with them."""
METADATA, SEAL = "__metadata__", "tokmill.sha256"
OPEN = b"0" * 64
"""What stands in the place of the seal while it is worked out."""


class Header(NamedTuple):
    """The header of a file: `raw` as it stands there; of `entries` the data follow each other."""

    raw: bytes
    metadata: dict[str, str]
    entries: dict[str, Entry]

    @property
    def seal(self) -> str:
        """The digest that the file holds of itself; "": none."""
        return self.metadata.get(SEAL, "")


def write_tensors(
    target: Path | BufferedIOBase,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write named tensors, and return the seal of the file.

    They are sorted, so that equal tensors make equal bytes. A path gets them atomically, an open
    file where it stands.
    """
    header: dict[str, Any] = {METADATA: {**(metadata or {}), SEAL: OPEN.decode()}}
    position = 0
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % 64)
    text = len(text).to_bytes(8, "little") + text

    def data() -> Iterator[memoryview]:
        for name in order:
            if tensors[name].numel():
                flat = tensors[name].detach().cpu().contiguous().reshape(-1)
                bytes_: Any = flat.view(torch.uint8).numpy()
                yield memoryview(bytes_)

    # The seal stands in front of what it is of, so that is looked at twice.
    digest = hashlib.sha256(text)
    for part in data():
        digest.update(part)
    seal = digest.hexdigest()
    place = text.index(f'"{SEAL}":"'.encode() + OPEN) + len(SEAL) + 4
    text = text[:place] + seal.encode() + text[place + len(OPEN) :]

    def chunks() -> Iterator[bytes | memoryview]:
        yield text
        yield from data()

    if isinstance(target, Path):
        write_file(target, chunks())
    else:
        target.writelines(chunks())
    return seal


def read_tensors(source: Path | BufferedIOBase, seal: str = "") -> dict[str, Tensor]:
    """Read all tensors of a file, from its beginning, into memory of their own.

    `seal`: that of the file that is wanted; "": whichever it has.

    Raises `TokmillError` where the file is damaged or its seal another one.
    """
    tensors: dict[str, Tensor] = {}
    with _opened(source) as (handle, path):
        header = _read_header(handle, path)
        _same(header, seal, path)
        digest = _begin_digest(header)
        for name, entry in header.entries.items():
            start, stop = entry.data_offsets
            data = bytearray(stop - start)
            if handle.readinto(data) != len(data):
                raise damaged(path, f"the tensor {name!r} is cut short")
            if header.seal:
                digest.update(data)
            dtype = DTYPES[entry.dtype]
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            try:
                tensors[name] = flat.reshape(entry.shape)
            except (RuntimeError, TypeError, OverflowError) as error:
                raise damaged(path, f"the tensor {name!r} has no possible shape") from error
        _check_digest(header, digest.hexdigest(), path)
    return tensors


def check_tensors(path: Path) -> str:
    """Read a file through without keeping anything, and return its seal; "": it has none.

    Raises `TokmillError` where the file is damaged.
    """
    with _opened(path) as (handle, _):
        header = _read_header(handle, path)
        if header.seal:
            digest = _begin_digest(header)
            while block := handle.read(BLOCK):
                digest.update(block)
            _check_digest(header, digest.hexdigest(), path)
    return header.seal


def read_metadata(source: Path | BufferedIOBase) -> dict[str, str]:
    """Read the strings that a file holds beside its tensors."""
    with _opened(source) as (handle, path):
        header = _read_header(handle, path)
    return {name: text for name, text in header.metadata.items() if name != SEAL}


@contextmanager
def _opened(source: Path | BufferedIOBase) -> Iterator[tuple[BufferedIOBase, Path]]:
    """Open a path, or take a file that is open; with it comes the name for errors."""
    if isinstance(source, Path):
        with machine_errors("read", source), open(source, "rb") as handle:
            yield handle, source
    else:
        yield source, Path(str(getattr(source, "name", "an open file")))


def _read_header(handle: BufferedIOBase, path: Path) -> Header:
    """Return the header of a file, which is left where its data begin.

    What it says fits the file: nothing is allocated for a length that is not there.
    """
    total = handle.seek(0, 2)
    handle.seek(0)
    length = int.from_bytes(handle.read(8), "little")
    if total < 8 or length > min(MAX_HEADER, total - 8):
        raise damaged(path, "its header is longer than the file")
    raw = handle.read(length)
    try:
        parts = loads_json(raw, dict[str, msgspec.Raw])
        metadata = loads_json(parts.pop(METADATA, b"{}"), dict[str, str] | None)
        found: dict[str, Entry] = {name: loads_json(part, Entry) for name, part in parts.items()}
    except ValueError as error:
        raise damaged(path, "its header cannot be read") from error
    entries = dict(sorted(found.items(), key=lambda one: one[1].data_offsets))
    position = 0
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if entry.dtype not in DTYPES:
            raise damaged(path, f"the tensor {name!r} is of the unknown kind {entry.dtype[:20]!r}")
        if len(entry.shape) > MOST_AXES or any(size < 0 for size in entry.shape):
            raise damaged(path, f"the tensor {name!r} has no possible shape")
        wanted = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if start != position or stop - start != wanted:
            raise damaged(path, f"the tensor {name!r} is misplaced")
        position = stop
    if 8 + length + position != total:
        raise damaged(path, f"it has {total} bytes, and its header names {8 + length + position}")
    return Header(raw, metadata or {}, entries)


def _begin_digest(header: Header) -> Any:
    """Return a sha256 that has taken in the header, with zeros in the place of the seal."""
    sealed, open_ = (f'"{SEAL}":"{text}"'.encode() for text in (header.seal, OPEN.decode()))
    raw = header.raw.replace(sealed, open_)
    return hashlib.sha256(len(raw).to_bytes(8, "little") + raw)


def _check_digest(header: Header, found: str, path: Path) -> None:
    if header.seal and header.seal != found:
        raise damaged(
            path, f"its sha256 is {found[:12]}, not {header.seal[:12]} as when it was written"
        )


def _same(header: Header, seal: str, path: Path) -> None:
    if seal and header.seal != seal:
        was = f"its digest is {header.seal[:12]}" if header.seal else "it has no digest"
        raise damaged(path, f"{was}, and {seal[:12]} was written here: it comes from elsewhere")


def damaged(path: Path, what: str) -> TokmillError:
    """Return the error for a file that is not what was written."""
    return TokmillError(
        f"the file is damaged: {what}",
        where=str(path),
        hint="take other weights of the run, as with --at; `tokmill train --resume` goes on from "
        "the newest checkpoint that is whole",
    )
