"""Inputs ten times as large as the room of a hard limit (a cgroup): build, train, validate, export.

The limit is what the same command takes with a small input (Python, torch, the libraries), and
`ROOM`. A worker holds one shard, of 64 MiB of text, so the room cannot be much smaller.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from source_cases import CASES

pytestmark = pytest.mark.long
ROOM = 128 << 20
SIZE, FILE = 10 * ROOM, 8 << 20
ROOT = Path("/sys/fs/cgroup")
SETS = "model.dim=16 model.layers=1 task.length=64 data.batch=2 steps=3 eval_every=3 eval_rows=8"


class Group:
    """A cgroup of version 1 or 2, in which commands run."""

    def __init__(self, name: str) -> None:
        self.old = (ROOT / "memory/memory.limit_in_bytes").exists()
        self.path = (ROOT / "memory" if self.old else ROOT) / name
        self.path.mkdir()
        assert (self.path / self.key).exists()

    @property
    def key(self) -> str:
        return "memory.limit_in_bytes" if self.old else "memory.max"

    def anonymous(self) -> int:
        lines = (self.path / "memory.stat").read_text().split("\n")
        return int(next(x for x in lines if x.startswith(("total_rss ", "anon "))).split()[1])

    def __call__(self, limit: int, *words: object) -> tuple[int, str, int]:
        """Run a command; return its exit code, what it said, and its peak besides mapped files."""
        (self.path / self.key).write_text(str(limit) if limit else "-1" if self.old else "max")
        enter = f'echo $$ > {self.path}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-m", "tokmill", *map(str, words)]
        peak = 0
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as child:
            while child.poll() is None:
                peak = max(peak, self.anonymous())
                time.sleep(0.02)
            assert child.stdout
            said = child.stdout.read()
        return child.returncode, said, peak


@pytest.fixture
def group() -> Iterator[Group]:
    try:
        made = Group(f"tokmill-{os.getpid()}")
    except (OSError, AssertionError):
        pytest.skip("cgroups of memory cannot be made here")
    yield made
    made.path.rmdir()


def repeated(between: bytes = b"") -> Callable[[Path, Path], None]:
    """Return what writes a file several times behind itself."""

    def grow(small: Path, out: Path) -> None:
        data = small.read_bytes() + between
        out.write_bytes(data * (FILE // len(data)))

    return grow


def rows(small: Path, out: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = parquet.read_table(small)
    many = pyarrow.concat_tables([table] * (FILE // 4 // table.nbytes)).combine_chunks()
    parquet.write_table(many, out, 1000, compression="none", use_dictionary=False)


def ids(small: Path, out: Path) -> None:
    drawn = np.random.default_rng(0).integers(0, 250, FILE // 2, np.uint16)
    drawn[-1] = 0
    drawn.tofile(out)


GROW: dict[str, Callable[[Path, Path], None]] = {
    "jsonl": repeated(),
    "text": repeated(b"\n<|endoftext|>\n"),
    "parquet": rows,
    "bin": ids,
}
"""Source → how a file of it is made large (small file, large file). What the others take:
docs/log/2026-11-27-memory.md."""
TRAINED = ("jsonl", "bin")
"""Their stores are trained and exported: neither knows of which source a store is. Those of JSON
Lines have millions of small documents."""


@pytest.mark.parametrize("kind", sorted(GROW))
def test_under_a_limit(kind: str, group: Group, tmp_path: Path) -> None:
    case = CASES[kind]
    small = tmp_path / "small"
    small.mkdir()
    first = case.write(small, 0)
    large = tmp_path / "large"
    large.mkdir()
    file = large / f"0{first.suffix}"
    GROW[kind](first, file)
    for number in range(1, SIZE // file.stat().st_size + 1):
        # The same content under another name: links cost no disk.
        if number % 1000 == 0:
            shutil.copy(file, file := large / f"{number}{file.suffix}")
        else:
            os.link(file, large / f"{number}{file.suffix}")

    def commands(source: Path, name: str) -> Iterator[tuple[object, ...]]:
        options = tmp_path / "options"
        options.mkdir(exist_ok=True)
        store = tmp_path / name
        yield ("build", kind, source, "-o", store, "--workers", 0, "-q", *case.options(options))
        yield ("store", "validate", store)
        if kind in TRAINED:
            sets = [word for one in SETS.split() for word in ("--set", one)]
            run = ("-q", "--over-memory", "-o", tmp_path / f"{name}-run")
            yield ("train", store, "--val", store, *run, *sets)
            yield ("store", "export", "bin", store, "-o", tmp_path / f"{name}.bin")

    for little, much in zip(commands(first, "s"), commands(large, "l"), strict=True):
        code, said, floor = group(0, *little)
        assert code == 0, said
        code, said, peak = group(floor + ROOM, *much)
        print(kind, *much[:2], f"floor {floor >> 20} MiB, peak {peak >> 20} MiB", flush=True)
        assert code == 0, said
