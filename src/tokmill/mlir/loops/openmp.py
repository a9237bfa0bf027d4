"""The library that runs parallel loops on several threads: LLVM's OpenMP, found on the machine."""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from pathlib import Path

from tokmill.errors import MachineError

NAMES = ("omp", "iomp5")
"""libomp of LLVM, and Intel's of the same interface; libgomp has another one."""
PLACES = ("/usr/lib/*/libomp.so.5", "/usr/lib/llvm-*/lib/libomp.so*")


@cache
def library() -> str:
    """Return the library, loaded so that compiled kernels find its functions.

    Raises `MachineError` if there is none.
    """
    found = [name for name in map(ctypes.util.find_library, NAMES) if name]
    found += [str(path) for place in PLACES for path in sorted(Path("/").glob(place[1:]))]
    for name in found:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    raise MachineError(
        "no libomp is there, which runs loops on several threads",
        hint="apt-get install libomp5, or leave --threads out",
    )


def use(threads: int) -> str:
    """Set how many threads parallel loops have, and return the library."""
    name = library()
    ctypes.CDLL(name).omp_set_num_threads(threads)
    return name
