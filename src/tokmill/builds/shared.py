"""Arrays that several processes of a build need: one of them computes, the others read a file."""

import contextlib
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tokmill.base.errors import MachineError
from tokmill.base.files import make_folder, remove, write_file
from tokmill.base.locks import locked
from tokmill.store.manifest import canonical_digest
from tokmill.store.schema import Array


def shared(
    scratch: str,
    kind: str,
    parts: Any,
    dtype: DTypeLike,
    shape: tuple[int, ...],
    find: Callable[[], Array],
) -> Array:
    """Return the result of `find`, computed by one of the processes of a build.

    All map it from a file in the folder `scratch` ("": none), named by `kind` and the digest of
    `parts`. The file begins with a digest, as it may be removed or damaged at any time. Files of
    the same kind of other parts are removed.
    """
    if not scratch:
        return find()
    folder = Path(scratch)
    path = folder / f"{kind}-{canonical_digest(parts)[:24]}"
    try:
        make_folder(folder)
        with locked(folder / f".{kind}.lock", "", "", wait=math.inf):
            result = _read(path, np.dtype(dtype), shape)
            if result is None:
                result = find()
                assert result.dtype == dtype and result.shape == shape
                for other in folder.glob(f"{kind}-*"):
                    remove(other)
                data = np.ascontiguousarray(result).reshape(-1).view(np.uint8).data
                write_file(path, [hashlib.sha256(data).digest(), data])
                mapped = _read(path, np.dtype(dtype), shape)
                result = result if mapped is None else mapped
            return result
    except MachineError:
        return find()


def _read(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array | None:
    size = math.prod(shape) * dtype.itemsize
    with contextlib.suppress(OSError):
        if path.stat().st_size != 32 + size or not size:
            return None
        data = np.memmap(path, np.uint8, "r")
        if hashlib.sha256(data[32:].data).digest() == data[:32].tobytes():
            return data[32:].view(dtype).reshape(shape)
    return None
