"""Settings of malloc: freed memory is kept, as every step asks for the same large blocks again."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`; see mallopt(3)."""
KEPT, LARGEST = 1 << 30, 32 << 20
"""Bytes that may stay unused, and the largest block that is taken from them (glibc's maximum)."""


def keep_freed_memory() -> bool:
    """Let the process keep freed memory between steps; return whether it does.

    The kernel clears each page that it hands out, which can take a sixth of a step on the CPU.
    Nothing is changed if the environment has settings for malloc, or if malloc is not glibc's.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST) and mallopt(TRIM_THRESHOLD, KEPT))
