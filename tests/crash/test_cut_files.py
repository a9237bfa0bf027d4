"""A mapped file is cut while it is read: the process ends with one line that names it."""

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from making import rec, write_store
from tokmill.base.bounds import bounded
from tokmill.base.errors import MachineError, TokmillError
from tokmill.builds.processes import in_processes
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.schema import Column
from tokmill.store.store import Store
from toy import cycles, make_store

READ = """
import sys
import threading
import numpy as np
from tokmill.base.bounds import bounded
from tokmill.base.bounds import explain_crashes
from tokmill.store.store import Store
explain_crashes()
def thread_of(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


store = Store(sys.argv[1])
shard = store.shard(0)
values = shard["token"]
print("mapped", flush=True)
sys.stdin.readline()
total = {how}
print("read", total)
"""
HOWS = {
    "a copy": "values.astype(np.int64).sum()",
    "a slice": "len(bytes(values[len(values) // 2:]))",
    "without the lock of Python": "__import__('hashlib').sha256(values).hexdigest()",
    "another thread": "thread_of(values.copy)",
}


def large(path: Path) -> tuple[Path, Path]:
    """Return a store with a shard of 2 MB, and the shard."""
    rows = [rec(range(50_000)) for _ in range(20)]
    store = write_store(path, {"token": Column("u2")}, [rows])
    (shard,) = (store.path / "shards").glob("*.safetensors")
    return store.path, shard


@pytest.mark.parametrize("how", HOWS)
def test_a_shard_is_cut_while_it_is_read(how: str, tmp_path: Path) -> None:
    store, shard = large(tmp_path / "store\n1")
    command = [sys.executable, "-c", READ.replace("{how}", HOWS[how]), str(store)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "mapped\n"
        os.truncate(shard, 100_000)
        out, err = process.communicate("go on\n", timeout=60)
    assert (process.returncode, out) == (5, "")
    first, hint, *more = err.splitlines()
    assert first.startswith("error: ") and shard.name in first and "100,000 bytes now" in first
    assert hint.startswith("hint: ") and not more


def test_a_part_of_a_page_that_reads_as_zeros_is_noticed(tmp_path: Path) -> None:
    """The kernel sends no signal for the rest of the last page."""
    path, shard = large(tmp_path / "store")
    left = shard.stat().st_size // mmap.PAGESIZE * mmap.PAGESIZE + 1
    store = Store(path)
    last = store.record(19)["token"]
    assert last[-1] == 49_999
    with (
        pytest.raises(MachineError, match="was cut while it was read"),
        ShardCheck([store]) as check,
    ):
        check.finish()
        os.truncate(shard, left)
        assert last[-1] != 49_999
    with pytest.raises(MachineError, match="was cut while it was read") as caught:
        store.record(0)
    assert caught.value.where == str(shard)
    for _ in range(2):
        batches = Store(path).batches()
        with pytest.raises(TokmillError, match="damaged"):
            next(batches)


def test_a_cut_in_the_last_batch_is_noticed(tmp_path: Path) -> None:
    path, shard = large(tmp_path / "store")
    batches = Store(path).batches()
    next(batches)
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(MachineError, match="was cut while it was read"):
        next(batches)


@pytest.mark.long
@pytest.mark.parametrize("left", [0.0, 0.5, 0.9999])
def test_a_shard_is_cut_while_a_model_learns_from_it(left: float, tmp_path: Path) -> None:
    """A whole page that is gone is a signal, a part of one a comparison of sizes."""
    store = make_store(tmp_path / "store", cycles(20_000))
    (shard,) = (store / "shards").glob("*.safetensors")
    sets = ["model.dim=16", "model.layers=1", "model.heads=2", "task.length=16", "data.batch=8",
            "run.steps=10000000", "run.eval_every=0", "run.log_every=1"]  # fmt: skip
    words = [word for one in sets for word in ("--set", one)]
    command = [sys.executable, "-m", "tokmill", "train", str(store), "-o", str(tmp_path / "run")]
    metrics = tmp_path / "run/metrics.jsonl"
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                pass
            os.truncate(shard, int(shard.stat().st_size * left))
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 5, err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and shard.name in errors[0] and "was cut while it was read" in errors[0]
    assert "Traceback" not in err


def cut_itself(path: str) -> int:
    """Map a file, cut it and read it, in a worker."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        os.truncate(path, 0)
        return len(bytes(view))


def crash(path: str) -> None:
    with bounded(path):
        os.abort()


@pytest.mark.parametrize("work", [cut_itself, crash])
def test_a_worker_says_which_file_ended_it(
    work: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "input.txt"
    path.write_bytes(bytes(1 << 16))
    with pytest.raises(MachineError, match="a worker process was killed") as caught:
        list(in_processes(work, [str(path)], 1, hint="memory ran out"))
    assert caught.value.hint == "the line above says why"
    why = "the library that reads it has crashed" if work is crash else "the file was cut while"
    assert f"error: {path}: {why}" in capfd.readouterr().err


CRASH = """
import ctypes, os, signal, sys, threading
from tokmill.base.bounds import bounded
from tokmill.base.bounds import explain_crashes
explain_crashes()
with bounded("before.parquet"):
    pass
with bounded(sys.argv[1]) if sys.argv[1] else open(os.devnull):
    thread = threading.Thread(target=lambda: {how})
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("os.abort()", "SIGABRT"),
        ("ctypes.CDLL(None).abort()", "SIGABRT"),
        ("ctypes.string_at(8)", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGFPE)", "SIGFPE"),
    ],
)
def test_a_decoder_that_crashes_ends_with_the_file_it_reads(how: str, name: str) -> None:
    for path, code in (("a\nb.parquet", 1), ("", -signal.Signals[name].value)):
        ran = subprocess.run(
            [sys.executable, "-c", CRASH.format(how=how), path],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == code, ran.stderr
        said = f"has crashed ({name})\nhint: the file may be damaged"
        assert (said in ran.stderr) == bool(path)
        assert ("a\\nb.parquet: " in ran.stderr) == bool(path)
        assert "before.parquet" not in ran.stderr
