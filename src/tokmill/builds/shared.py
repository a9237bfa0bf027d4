"""Arrays that several processes of a build need: one of them computes, the others read a file."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from tokmill.base.errors import MachineError
from tokmill.base.files import make_folder, remove, write_file
from tokmill.base.locks import locked
from tokmill.store.schema import Array

BLOCK = 1 << 24
"""Bytes that are hashed at a time."""


def shared(
    folder: Path,
    kind: str,
    key: str,
    dtype: DTypeLike,
    shape: tuple[int, ...],
    find: Callable[[], Array],
) -> Array:
    """Return the result of `find`, computed by one of the processes of a build.

    The others map it from a file in `folder`, named by `kind` and `key`. The file begins with a
    digest, as it may be removed or damaged at any time. Files of the same kind with another key are
    removed.
    """
    path = folder / f"{kind}-{key}"
    try:
        make_folder(folder)
        with locked(folder / f".{kind}.lock", "", "", wait=math.inf):
            result = _read(path, np.dtype(dtype), shape)
            if result is None:
                result = find()
                assert result.dtype == dtype and result.shape == shape
                for other in folder.glob(f"{kind}-*"):
                    remove(other)
                write_file(path, _written(result))
            return result
    except MachineError:
        return find()


def _written(found: Array) -> Iterator[bytes | memoryview]:
    data = np.ascontiguousarray(found).reshape(-1).view(np.uint8)
    yield _digest(data)
    for start in range(0, len(data), BLOCK):
        yield data[start : start + BLOCK].data


def _digest(data: Array) -> bytes:
    digest = hashlib.sha256()
    for start in range(0, len(data), BLOCK):
        digest.update(data[start : start + BLOCK].data)
    return digest.digest()


def _read(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array | None:
    size = math.prod(shape) * dtype.itemsize
    with contextlib.suppress(OSError):
        if path.stat().st_size != 32 + size or not size:
            return None
        data = np.memmap(path, np.uint8, "r")
        if _digest(data[32:]) == data[:32].tobytes():
            result: Array = data[32:].view(dtype).reshape(shape)
            return result
    return None
