"""Tensors as safetensors files, written through `files.py` and without a pickle.

Format: 8 bytes little-endian header length, JSON header, data; https://github.com/huggingface/
safetensors. The library reads what is written here, and the reverse.

Files written here have a checksum: the metadata hold the sha256 of the file, computed with zeros
in its place. Every reader checks it, so a flipped bit is always found. Files of other programs
have none.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.base.files import reading, write_file
from tokmill.base.headers import Entry, tensor_header, tensor_header_bytes
from tokmill.tasks.task import Task

TYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in TYPES.items()}
MOST_AXES = 32
BLOCK = 1 << 20
"""Bytes that are read at a time to compute a digest."""
CHECKSUM = "tokmill.sha256"
OPEN = b"0" * 64
"""Stands in the place of the checksum while it is computed."""


class Header(NamedTuple):
    """The header of a file: its bytes `raw`, and `entries` in the order of their data."""

    raw: bytes
    metadata: dict[str, str]
    entries: dict[str, Entry]

    @property
    def checksum(self) -> str:
        """The digest of the file in its metadata; "": none."""
        return self.metadata.get(CHECKSUM, "")


def write_tensors(
    target: Path | BufferedIOBase,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write named tensors, and return the checksum of the file.

    Tensors are sorted, so that equal tensors make equal bytes. A path is written atomically, an
    open file at its current position.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    named = [(name, TYPES[tensors[name].dtype], tensors[name].shape) for name in order]
    text = tensor_header_bytes(named, {**(metadata or {}), CHECKSUM: OPEN.decode()})

    def data() -> Iterator[memoryview]:
        for name in order:
            if tensors[name].numel():
                flat = tensors[name].detach().cpu().contiguous().reshape(-1)
                bytes_: Any = flat.view(torch.uint8).numpy()
                yield memoryview(bytes_)

    # The checksum comes before the data, so the data are read twice.
    digest = hashlib.sha256(text)
    for part in data():
        digest.update(part)
    checksum = digest.hexdigest()
    place = text.index(f'"{CHECKSUM}":"'.encode() + OPEN) + len(CHECKSUM) + 4
    text = text[:place] + checksum.encode() + text[place + len(OPEN) :]

    def chunks() -> Iterator[bytes | memoryview]:
        yield text
        yield from data()

    if isinstance(target, Path):
        write_file(target, chunks())
    else:
        target.writelines(chunks())
    return checksum


def read_tensors(source: Path | BufferedIOBase, checksum: str = "") -> dict[str, Tensor]:
    """Read all tensors of a file from its beginning into new memory.

    `checksum`: the checksum that the file must have; "": any.

    Raises `TokmillError` if the file is damaged or has another checksum.
    """
    tensors: dict[str, Tensor] = {}
    with _opened(source) as (handle, path):
        header = _read_header(handle, path)
        if checksum and header.checksum != checksum:
            was = f"its digest is {header.checksum[:12]}" if header.checksum else "it has no digest"
            why = f"{was}, and {checksum[:12]} was written here: it comes from elsewhere"
            raise damaged(path, why)
        digest = _begin_digest(header)
        for name, entry in header.entries.items():
            start, stop = entry.data_offsets
            data = bytearray(stop - start)
            if handle.readinto(data) != len(data):
                raise damaged(path, f"the tensor {name!r} is cut short")
            if header.checksum:
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
    """Read a file without keeping anything, and return its checksum; "": it has none.

    Raises `TokmillError` if the file is damaged.
    """
    with _opened(path) as (handle, _):
        header = _read_header(handle, path)
        if header.checksum:
            digest = _begin_digest(header)
            while block := handle.read(BLOCK):
                digest.update(block)
            _check_digest(header, digest.hexdigest(), path)
    return header.checksum


def read_metadata(source: Path | BufferedIOBase) -> dict[str, str]:
    with _opened(source) as (handle, path):
        header = _read_header(handle, path)
    return {name: text for name, text in header.metadata.items() if name != CHECKSUM}


@contextmanager
def _opened(source: Path | BufferedIOBase) -> Iterator[tuple[BufferedIOBase, Path]]:
    if isinstance(source, Path):
        with reading(source) as handle:
            yield handle, source
    else:
        yield source, Path(str(getattr(source, "name", "an open file")))


def _read_header(handle: BufferedIOBase, path: Path) -> Header:
    """Return the header of a file, whose position is then at the data.

    The lengths in the header are checked against the file, so no memory is allocated for data that
    are not there.
    """
    total = handle.seek(0, 2)
    handle.seek(0)
    try:
        header = tensor_header(handle, total)
    except ValueError as error:
        raise damaged(path, str(error)) from error
    entries = dict(sorted(header.tensors.items(), key=lambda one: one[1].data_offsets))
    position = 0
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise TokmillError(
                f"the tensor {name!r} has the type {entry.dtype}, which is not read: the model is "
                "quantized",
                where=str(path),
                hint=f"weights are read as {', '.join(DTYPES)}: fetch a copy that is not quantized",
            )
        if len(entry.shape) > MOST_AXES:
            raise damaged(path, f"the tensor {name!r} has no possible shape")
        if entry.data_offsets[0] != position:
            raise damaged(path, f"the tensor {name!r} is misplaced")
        position = entry.data_offsets[1]
    if (size := 8 + header.length + position) != total:
        raise damaged(path, f"it has {total} bytes, and its header names {size}")
    handle.seek(8)
    return Header(handle.read(header.length), header.metadata, entries)


def _begin_digest(header: Header) -> Any:
    """Return a sha256 of the header, with zeros in the place of the checksum."""
    stored, open_ = (f'"{CHECKSUM}":"{text}"'.encode() for text in (header.checksum, OPEN.decode()))
    raw = header.raw.replace(stored, open_)
    return hashlib.sha256(len(raw).to_bytes(8, "little") + raw)


def _check_digest(header: Header, digest: str, path: Path) -> None:
    if header.checksum and header.checksum != digest:
        raise damaged(
            path, f"its sha256 is {digest[:12]}, not {header.checksum[:12]} as when it was written"
        )


def damaged(path: Path, what: str) -> TokmillError:
    return TokmillError(
        f"the file is damaged: {what}",
        where=str(path),
        hint="use other weights of the run, as with --at; `tokmill train -o RUN` continues from "
        "the newest checkpoint that is not damaged",
    )


MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def shapes_of(task: Task) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in task.state_dict().items()}


def load_weights(task: Task, path: Path, checksum: str = "") -> None:
    """Read weights into a task; names and shapes must be equal. `checksum`: see `read_tensors`."""
    task.load_state_dict(read_weights(path, shapes_of(task), checksum))


def read_weights(path: Path, shapes: Mapping[str, torch.Size], checksum: str) -> dict[str, Tensor]:
    tensors = read_tensors(path, checksum)
    for name in shapes.keys() | tensors.keys():
        if name not in shapes or name not in tensors or shapes[name] != tensors[name].shape:
            raise unfit(path, name)
    return tensors


def unfit(path: Path, name: str) -> TokmillError:
    return TokmillError(
        f"the tensor {name!r} does not fit the model of the recipe",
        where=str(path),
        hint="the file belongs to another recipe, or another version of tokmill made it",
    )
