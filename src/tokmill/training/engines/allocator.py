"""What malloc does with memory that is let go: every step asks for the same large blocks again."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`; see mallopt(3)."""
KEPT, LARGEST = 1 << 30, 32 << 20
"""Bytes that may lie idle, and the largest block that comes from them: glibc's most."""


def keep_freed_memory() -> bool:
    """Let the process keep memory between steps instead of giving it back; say whether it does.

    The kernel clears each page that it hands out, which otherwise costs a step on the CPU up to a
    sixth of its time. Nothing is done where the environment has settings for malloc, or where
    malloc is not glibc's.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST) and mallopt(TRIM_THRESHOLD, KEPT))
