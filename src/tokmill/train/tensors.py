"""Tensors as safetensors files, written through `files.py` and without a pickle.

Format: 8 bytes little-endian header length, JSON header, data; https://github.com/huggingface/
safetensors. The library reads what is written here, and the reverse.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokmill.errors import TokmillError
from tokmill.files import machine_errors, write_file

TYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in TYPES.items()}
MAX_HEADER = 100 << 20


def write_tensors(
    target: Path | BufferedIOBase,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors; sorted, so that equal tensors make equal bytes.

    A path gets them atomically, an open file where it stands.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
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

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in order:
            if tensors[name].numel():
                flat = tensors[name].detach().cpu().contiguous().reshape(-1)
                bytes_: Any = flat.view(torch.uint8).numpy()
                yield memoryview(bytes_)

    if isinstance(target, Path):
        write_file(target, chunks())
    else:
        target.writelines(chunks())


def read_tensors(source: Path | BufferedIOBase) -> dict[str, Tensor]:
    """Read all tensors of a file, from its beginning, into memory of their own."""
    tensors: dict[str, Tensor] = {}
    with _opened(source) as (handle, path):
        header, data_start = _read_header(handle, path)
        header.pop("__metadata__", None)
        try:
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                dtype = DTYPES[entry["dtype"]]
                data = bytearray(stop - start)
                handle.seek(data_start + start)
                if handle.readinto(data) != stop - start:
                    raise damaged(path, f"the tensor {name!r} is cut short")
                flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
                tensors[name] = flat.reshape(entry["shape"])
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise damaged(path, "its header cannot be read") from error
    return tensors


def read_metadata(source: Path | BufferedIOBase) -> dict[str, str]:
    """Read the strings that a file holds beside its tensors."""
    with _opened(source) as (handle, path):
        header, _ = _read_header(handle, path)
    return dict(header.get("__metadata__") or {})


@contextmanager
def _opened(source: Path | BufferedIOBase) -> Iterator[tuple[BufferedIOBase, Path]]:
    """Open a path, or take a file that is open; with it comes the name for errors."""
    if isinstance(source, Path):
        with machine_errors("read", source), open(source, "rb") as handle:
            yield handle, source
    else:
        yield source, Path(str(getattr(source, "name", "an open file")))


def _read_header(handle: BufferedIOBase, path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and where its data begins."""
    total = handle.seek(0, 2)
    handle.seek(0)
    length = int.from_bytes(handle.read(8), "little")
    if total < 8 or length > min(MAX_HEADER, total - 8):
        raise damaged(path, "its header is longer than the file")
    try:
        header = json.loads(handle.read(length))
    except ValueError as error:
        raise damaged(path, "its header cannot be read") from error
    if not isinstance(header, dict):
        raise damaged(path, "its header cannot be read")
    return header, 8 + length


def damaged(path: Path, what: str) -> TokmillError:
    """Return the error for a file that is not what was written."""
    return TokmillError(
        f"the file is damaged: {what}",
        where=str(path),
        hint=f"remove {path.parent}: a run then continues from the checkpoint before it",
    )
