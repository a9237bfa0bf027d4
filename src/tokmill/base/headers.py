"""Checked readers of JSON, TOML, and the headers of safetensors and .npy files.

Each returns checked values or raises `ValueError` with a reason, whatever the bytes are. A length
in a file is never trusted beyond the file's size. `refused` adds the file's name and a hint.
"""

import contextlib
import io
import json
import math
import re
import tokenize
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.base.files import reading

MAX_HEADER, MAX_ARRAY_HEADER = 100 << 20, 10_000
"""Most bytes of the header of a safetensors file, and of an .npy file (numpy's own limit)."""
ZIP_ERRORS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, NotImplementedError,
    RuntimeError, ValueError, KeyError,
)  # fmt: skip
"""Errors of `zipfile` for archives that are damaged, encrypted or of an unknown kind."""
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
LONG_KEY = re.compile(
    rf"(?:^[ \t]*\[*|[{{,])[ \t]*{_PART}(?:[ \t]*\.[ \t]*{_PART}){{100}}", re.MULTILINE
)
"""Matches a dotted TOML key of more than 100 parts: on a line, in a table or an inline table."""
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Dtype of safetensors → bytes of a value."""
METADATA = "__metadata__"


class Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorHeader(NamedTuple):
    """The header of a safetensors file."""

    length: int
    """Bytes of the JSON header; data begins at 8 + length."""
    tensors: dict[str, Entry]
    metadata: dict[str, str]


@contextlib.contextmanager
def refused(what: str, where: Path | str, *, hint: str) -> Iterator[None]:
    """Turn a `ValueError` into a `TokmillError`: `what` is wrong, and the reason."""
    try:
        yield
    except ValueError as error:
        raise TokmillError(f"{what}: {error}", where=str(where), hint=hint) from error


def loads_json(raw: bytes | str, kind: Any = Any) -> Any:
    """Return a JSON value, of the type `kind`.

    Raises `ValueError`, also for endless nesting, for surrogates and for bytes that are not UTF-8.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def loads_toml(text: str) -> dict[str, Any]:
    """Return TOML as a dict; raises `ValueError`, also for endless nesting.

    Dotted keys of very many parts are refused too: `tomllib` needs memory and time that grow with
    the square of their number.
    """
    if LONG_KEY.search(text):
        raise ValueError("a key has more than 100 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def tensor_header_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the beginning of a safetensors file: its length, its header, and spaces up to 64.

    `tensors`: (name, dtype, shape), in the order of their data.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    start = 0
    for name, dtype, shape in tensors:
        stop = start + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def tensor_header(handle: IO[bytes] | io.BufferedIOBase, size: int) -> TensorHeader:
    """Read the header of a safetensors file of `size` bytes.

    Checks that shapes, types and offsets of tensors fit each other. The caller must check that the
    last tensor ends where the file ends. Raises `ValueError`.
    Format: https://github.com/huggingface/safetensors
    """
    length = int.from_bytes(handle.read(8), "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        raise ValueError("its header is longer than the file")
    value = loads_json(handle.read(length))
    if not isinstance(value, dict):
        raise ValueError("its header is not a JSON object")
    metadata = msgspec.convert(value.pop(METADATA, None) or {}, dict[str, str])
    tensors = msgspec.convert(value, dict[str, Entry])
    for name, entry in tensors.items():
        start, stop = entry.data_offsets
        if entry.dtype not in SIZES:
            raise ValueError(f"the type {entry.dtype!r} of {name!r} is not known")
        if min(entry.shape, default=0) < 0 or not 0 <= start <= stop:
            raise ValueError(f"the offsets of {name!r} are impossible")
        if math.prod(entry.shape) * SIZES[entry.dtype] != stop - start:
            raise ValueError(f"the size of {name!r} does not fit its shape")
    return TensorHeader(length, tensors, metadata)


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return (bytes of the header, tensor → `dtype`, `shape`, `data_offsets`) of safetensors."""
    with reading(path) as handle:
        size = handle.seek(0, 2)
        handle.seek(0)
        header = tensor_header(handle, size)
    return header.length, {
        name: msgspec.structs.asdict(entry) for name, entry in header.tensors.items()
    }


class ArrayHeader(NamedTuple):
    """The header of an .npy file."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: Any
    """A dtype of numpy, which is not loaded here before an array is read."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def array_header(handle: IO[bytes]) -> ArrayHeader:
    """Read the header of an .npy file; the array begins after it. Raises `ValueError`.

    Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    import numpy as np

    first = np.lib.format.read_magic(handle) == (1, 0)
    size = handle.read(2 if first else 4)
    # numpy reads the whole header before it compares its length with a limit.
    if (length := int.from_bytes(size, "little")) > MAX_ARRAY_HEADER:
        raise ValueError(f"its header of {length:,} bytes is longer than any")
    header = io.BytesIO(size + handle.read(length))
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(header)
    except (ValueError, EOFError):
        raise
    except (TypeError, KeyError, SyntaxError, RecursionError, MemoryError, OverflowError,
            IndexError, AttributeError, tokenize.TokenError, UnicodeError) as error:  # fmt: skip
        # numpy parses the header as Python, with a fallback for old files that may raise these.
        raise ValueError(f"its header cannot be read: {type(error).__name__}") from None
    if min(shape, default=0) < 0 or math.prod(shape) * max(1, dtype.itemsize) >= 1 << 63:
        raise ValueError(f"no array has the shape {shape}")
    return ArrayHeader(tuple(int(n) for n in shape), bool(fortran), dtype)


def arrow_errors(arrow: Any) -> tuple[type[Exception], ...]:
    """Return the errors that pyarrow (the module) raises for damaged files, names and values."""
    return (arrow.ArrowException, OSError, UnicodeDecodeError, SystemError, OverflowError)
