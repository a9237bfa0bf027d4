"""Builds of programs that are killed: what goes on gives the bytes of one that was left alone."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crash_stores import contents, copy
from forked import Forked
from tokmill.builds.plan import SHARD_BYTES
from x86_programs import C_SOURCE, compiles

SHARDS = 4


def ending_names(size: int, count: int) -> list[str]:
    """Return names of programs of a size that end their shard."""
    names: list[str] = []
    number = 0
    while len(names) < count:
        digest = hashlib.sha256(f"p{number}\0{0}".encode()).digest()
        if int.from_bytes(digest[:8], "little") / 2**64 < size / SHARD_BYTES:
            names.append(f"p{number}")
        number += 1
    return names


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs for several shards, one of which holds one that cannot be lifted."""
    folder = tmp_path_factory.mktemp("programs")
    data = compiles(folder, "program", C_SOURCE, "-O1").read_bytes()
    inputs = folder / "in"
    inputs.mkdir()
    for name in ending_names(len(data), SHARDS):
        (inputs / name).write_bytes(data + name.encode())
    (inputs / "a-cut").write_bytes(data[:1000])
    return inputs


def command(programs: Path, store: Path, *more: object) -> list[str]:
    """Return the arguments of a build of walks, which are random."""
    words = [
        "build", "x86", programs, "-o", store, "--quiet", "--unit", "walk", "--min-tokens", 20,
        "--walks", 3, *more,
    ]  # fmt: skip
    return list(map(str, words))


@pytest.fixture(scope="module")
def wanted(programs: Path, forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a build that nobody disturbs."""
    store = tmp_path_factory.mktemp("wanted") / "store"
    ran = forked(*command(programs, store, "--workers", 0))
    assert ran.code == 0, ran.err
    assert len(list(store.glob("shards/*.json"))) == SHARDS
    return store


def test_workers_do_not_matter(
    programs: Path, wanted: Path, forked: Forked, fast_path: Path
) -> None:
    store = fast_path / "store"
    assert forked(*command(programs, store, "--workers", 2)).code == 0
    assert contents(store) == contents(wanted)
    assert forked("store", "validate", store, "--deep", 2).code == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_build_goes_on_to_the_same_bytes(
    workers: int, programs: Path, wanted: Path, forked: Forked, fast_path: Path
) -> None:
    store = fast_path / "store"
    words = [sys.executable, "-m", "tokmill", *command(programs, store, "--workers", workers)]
    for _ in range(10):
        copy(None, store)
        with subprocess.Popen(words, start_new_session=True) as build:
            until = time.monotonic() + 60
            while not any(store.glob("shards/*.json")):
                assert time.monotonic() < until
                time.sleep(0.002)
            os.killpg(build.pid, signal.SIGKILL)
        if not (store / "manifest.json").exists():
            break
    else:
        raise AssertionError("the build was always done before it could be killed")
    done = {path.name: path.stat().st_mtime_ns for path in store.glob("shards/*.json")}
    assert 0 < len(done) <= SHARDS
    assert forked(*command(programs, store, "--workers", 0)).code == 0
    assert contents(store) == contents(wanted)
    # What was committed is not made again.
    assert (
        done.items()
        <= {path.name: path.stat().st_mtime_ns for path in store.glob("shards/*.json")}.items()
    )


def test_parts_make_the_store_of_a_plain_build(
    programs: Path, wanted: Path, forked: Forked, fast_path: Path
) -> None:
    store = fast_path / "store"
    for part in ("1/2", "2/2"):
        assert forked(*command(programs, store, "--workers", 0, "--part", part)).code == 0
    assert contents(store) == contents(wanted)
