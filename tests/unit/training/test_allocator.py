"""Memory that is let go is not asked for again; each case in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from tokmill.training.engines.devices.device import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
for step in range(12):
    if step == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(16 << 20, np.uint8) for _ in range(4)]
    del blocks
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> tuple[int, int]:
    """Whether memory is kept, and how often a page had to be asked for in 10 steps of 64 MiB."""
    plain = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        env=plain | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, count = done.stdout.split()
    return int(kept), int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc that is told")
def test_pages_are_asked_for_once() -> None:
    kept, asked = faults("keep")
    assert kept == 1 and asked < 1000
    left, again = faults("leave")
    assert left == 0 and again > 10 * max(asked, 100)


def test_settings_of_the_user_stand() -> None:
    assert faults("keep", MALLOC_ARENA_MAX="2")[0] == 0
