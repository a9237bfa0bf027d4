"""Memory of reading a file: limited by its size, in processes that do nothing else."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tokmill.base import bounds
from tokmill.base.errors import MachineError, TokmillError

MIB = 1 << 20
PROGRAM = """
import resource, subprocess, sys
import numpy as np
from tokmill.base import bounds
from tokmill.base.children.child import Limits, run
from tokmill.base.errors import TokmillError

limits = lambda: resource.getrlimit(resource.RLIMIT_DATA)
take = lambda size: len(bytes(size))
bounds.own_process = True
before = limits()
small, large = sys.argv[1:]
with bounds.bounded(small):
    take(200 << 20)
    with bounds.bounded(large):
        pass
    assert limits() != before
    # Children have their own limits.
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA))"
    assert run([sys.executable, "-c", code], Limits()).out.decode().strip() == str(before)
for kind in (bytes, np.zeros):
    try:
        with bounds.bounded(small, 8 << 20):
            kind(900 << 20)[-1]
        raise SystemExit("it was not limited")
    except TokmillError as error:
        print(error.where, "|", error.what)
    assert limits() == before
with bounds.bounded(large):
    take(700 << 20)
with bounds.bounded(small, limit=False):
    take(900 << 20)
with bounds.bounded("/no/such/file"):
    take(MIB := 1 << 20)
"""


def test_memory_is_limited_by_the_size_of_the_file(tmp_path: Path) -> None:
    small, large, holes = (tmp_path / name for name in ("small", "large", "holes"))
    small.write_bytes(b"x")
    large.write_bytes(bytes(range(256)) * (8 * MIB // 256))
    with holes.open("wb") as file:
        file.truncate(1 << 40)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(small), str(large)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # 300 MiB, and 64 bytes for each byte that is read.
    assert done.stdout == f"{small} | reading it takes more than 812 MiB\n" * 2
    assert bounds._size(holes) < MIB


def test_without_a_process_of_its_own_nothing_is_limited(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert not bounds.own_process

    @bounds.bounded_reader
    def read(path: Path, what: type[Exception]) -> None:
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
        raise what

    for what, kind, said in (
        (MemoryError, MachineError, "memory ran out"),
        (RecursionError, TokmillError, "nested too deeply"),
    ):
        with pytest.raises(kind, match=said) as caught:
            read(tmp_path / "a", what)
        assert caught.value.where == str(tmp_path / "a")
