"""When an engine whose cache only grows is to be made anew, by the memory that was measured.

gigatoken keeps every word that it has met (its releases up to 0.10 have no bound). Of source code
the cache is worth its memory: words come again, and after 400 MB it holds some 80 MiB. Of text
whose words never come again it grows by 10 bytes a byte, and slows the engine down.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

START = 20 << 20
"""Bytes that an engine may grow by, whatever it has read."""
YOUNG = 4 << 20
"""Bytes of text after which it is known how an engine grows; before, it is looked at often, as
tables that double take three times their size meanwhile."""
OFTEN = 512 << 10
SELDOM = 4 << 20
EACH = 1.0
"""Further bytes of growth a byte of text: source code stays below, random words take ten."""
MOST = 128 << 20
"""Bytes of growth at which any cache is given up."""


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb", 0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def give_back_memory() -> None:
    """Hand memory that was freed back to the system, where the C library can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Growth:
    """Follows the memory of the process while one engine encodes.

    What else grows meanwhile counts as well. That makes an engine anew too early at worst, which
    costs some milliseconds and a cold cache.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self.resident = resident
        self.start_again()

    def start_again(self) -> None:
        """Forget the past: the engine is new."""
        self._base: int | None = None
        self._bytes = 0

    @property
    def step(self) -> int:
        """Bytes of text to encode before the next look, about."""
        return OFTEN if self._bytes < YOUNG else SELDOM

    def too_large(self, encoded: int) -> bool:
        """Say whether the engine is to be made anew, after so many more bytes of text."""
        now = self.resident()
        self._bytes += encoded
        if self._base is None:
            # What an engine sets up for its first text is no growth.
            self._base = now
            return False
        self._base = min(self._base, now)
        return now - self._base > min(START + EACH * self._bytes, MOST)
