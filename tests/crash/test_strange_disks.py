"""File systems without locks, pipes in the place of files, and commands at the same time."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tokmill
from crash_stores import contents, write_inputs
from making import quick_build
from tokmill.base.errors import TokmillError
from tokmill.builds.plan import How
from tokmill.report.describe.inspect import describe
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store
from tokmill.training.evaluate import evaluate
from toy import cycles, make_store, recipe
from x86_programs import compiler

NO_FLOCK = """
#include <errno.h>
#include <stdlib.h>
int flock(int file, int how) { errno = atoi(getenv("FLOCK_ERRNO")); return -1; }
"""
SECONDS = 20
"""After which what waits for a pipe is ended."""


def run(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokmill", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | more,
    )


@pytest.fixture(scope="module")
def no_flock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library in which flock fails, as on a file system without locks."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "a.c").write_text(NO_FLOCK)
    command = [compiler("gcc"), "-shared", "-fPIC", "-o", str(folder / "a.so"), str(folder / "a.c")]
    subprocess.run(command, check=True)
    return folder / "a.so"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_disk_without_locks(number: int, no_flock: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Who writes ends with the reason and leaves nothing in the way; who reads works."""
    write_inputs(tmp_path / "in", 1)
    fails = {"LD_PRELOAD": str(no_flock), "FLOCK_ERRNO": str(number)}
    build = (
        "build",
        "jsonl",
        tmp_path / "in",
        "-o",
        tmp_path / "s",
        "--tokenizer",
        tokenizer,
        "-q",
    )
    ran = run(*build, **fails)
    assert ran.returncode == 5 and os.strerror(number) in ran.stderr and "hint: " in ran.stderr
    assert ("has no locks" in ran.stderr) == (number != errno.EIO)
    assert not (tmp_path / "s").exists()
    assert run(*build).returncode == 0
    before = contents(tmp_path / "s")
    assert run("inspect", tmp_path / "s", "--json", **fails).returncode == 0
    assert run("store", "validate", tmp_path / "s", **fails).returncode == 0
    assert contents(tmp_path / "s") == before


def test_other_writers_on_a_disk_without_locks(no_flock: Path, tmp_path: Path) -> None:
    """A training, an export and a select end with the reason; `eval` works."""
    write_inputs(tmp_path / "in", 1)
    store = quick_build("jsonl", tmp_path / "in", tmp_path / "s").path
    tokmill.train(recipe(store, 2), tmp_path / "run", quiet=True)
    fails = {"LD_PRELOAD": str(no_flock), "FLOCK_ERRNO": str(errno.ENOLCK)}
    for command in (
        ("train", store, "--steps", 2, "-q", "-o", tmp_path / "new"),
        ("train", "-o", tmp_path / "run", "--steps", 4, "-q"),
        (
            "store",
            "export",
            "npz",
            store,
            "-o",
            tmp_path / "npz",
            "--max-length",
            16,
            "--pad-id",
            0,
        ),
        ("build", "select", store, "--min-length", 3, "-q", "-o", tmp_path / "selected"),
    ):
        ran = run(*command, **fails)
        assert ran.returncode == 5 and "has no locks" in ran.stderr and "hint: " in ran.stderr
    assert not [name for name in ("new", "npz", "selected") if (tmp_path / name).exists()]
    assert run("eval", tmp_path / "run", store, "-q", **fails).returncode == 0


CLOCK = """
#include <time.h>
#include <sys/time.h>
#include <sys/syscall.h>
#include <unistd.h>
static long jump(void) { static long n; return n++ % 3 * 40000000L - 40000000L; }
time_t time(time_t *at) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    now.tv_sec += jump();
    return at ? *at = now.tv_sec : now.tv_sec;
}
int clock_gettime(clockid_t which, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += jump();
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec other;
    clock_gettime(CLOCK_REALTIME, &other);
    now->tv_sec = other.tv_sec, now->tv_usec = other.tv_nsec / 1000;
    return 0;
}
"""


@pytest.mark.long
def test_a_clock_that_jumps(tokenizer: Path, tmp_path: Path) -> None:
    """By a year to and fro between any two calls, and files from other centuries: equal bytes."""
    (tmp_path / "a.c").write_text(CLOCK)
    library = tmp_path / "a.so"
    subprocess.run(
        [compiler("gcc"), "-shared", "-fPIC", "-o", library, tmp_path / "a.c"], check=True
    )
    write_inputs(tmp_path / "in", 3)
    build = ("build", "jsonl", tmp_path / "in", "--tokenizer", tokenizer, "-q", "-o")
    keys = ("model.dim=16", "model.layers=1", "task.length=16", "data.batch=2",
            "checkpoint_every=2", "eval_every=2")  # fmt: skip
    sets = [word for key in keys for word in ("--set", key)]

    def train(name: str, steps: int, **more: str) -> None:
        store, out = tmp_path / f"{name}-s", tmp_path / name
        words = ("train", store, "--val", store, "-q", "--steps", steps, *sets, "-o", out)
        ran = run(*words, "--max-time", "1h", **more)
        assert ran.returncode == 0, ran.stderr

    jumps = {"LD_PRELOAD": str(library)}
    said = subprocess.run(
        [sys.executable, "-c", "import time; print(*(int(time.time()) // 10**7 for _ in 'abc'))"],
        capture_output=True, text=True, check=True, env=os.environ | jumps,
    ).stdout  # fmt: skip
    assert len(set(said.split())) == 3
    assert run(*build, tmp_path / "a-s").returncode == 0
    train("a", 6)
    assert run(*build, tmp_path / "b-s", "--max-time", "1h", **jumps).returncode == 0
    train("b", 3, **jumps)
    for folder, when in ((tmp_path / "b", 4e9), (tmp_path / "b-s", 1e8)):
        for path in folder.rglob("*"):
            os.utime(path, (when, when))
    assert run(*build, tmp_path / "b-s", **jumps).returncode == 0
    train("b", 6, **jumps)
    assert contents(tmp_path / "a-s") == contents(tmp_path / "b-s")
    weights = [tmp_path / name / "model/model.safetensors" for name in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.fixture
def soon() -> Iterator[None]:
    """End a test that waits for a pipe."""
    before = signal.signal(signal.SIGALRM, _waited)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Waited(BaseException):
    """Something waited for a pipe. No `OSError`, which would become a refusal."""


def _waited(*_: object) -> None:
    raise Waited


def each_pipe(folder: Path, out: Path) -> Iterator[tuple[str, Path]]:
    """Yield copies of a folder, in each of which another file has become a pipe."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder, out)
        (out / name).unlink()
        os.mkfifo(out / name)
        yield name, out


def refused(function: Callable[..., object], *arguments: object, **options: object) -> str:
    """Return why a call was refused; "": it was not."""
    try:
        function(*arguments, **options)
    except TokmillError as error:
        assert error.hint
        return str(error)
    return ""


@pytest.mark.usefixtures("soon")
def test_a_pipe_in_a_store_keeps_nobody_waiting(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", 1)
    quick_build("jsonl", tmp_path / "in", tmp_path / "s")
    seen = set()
    for name, store in each_pipe(tmp_path / "s", tmp_path / "pipes"):
        signal.alarm(SECONDS)
        why = [
            refused(read, store),
            refused(lambda path: validate(Store(path)), store),
            refused(describe, store),
            refused(quick_build, "select", store, tmp_path / name.replace("/", "-")),
            refused(quick_build, "jsonl", tmp_path / "in", store, how=How(yes=True, quiet=True)),
        ]
        if any("neither a file nor a folder" in one for one in why):
            seen.add(name.partition("/")[0])
    assert {"manifest.json", "shards"} <= seen


def read(path: Path) -> None:
    """Read all of a store."""
    for _ in Store(path):
        pass


@pytest.mark.long
@pytest.mark.usefixtures("soon")
def test_a_pipe_in_a_run_keeps_nobody_waiting(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", cycles(30))
    tokmill.train(recipe(store, 4), tmp_path / "run", quiet=True)
    seen = set()
    for name, run in each_pipe(tmp_path / "run", tmp_path / "pipes"):
        signal.alarm(SECONDS)
        why = [
            refused(describe, run),
            refused(evaluate, run, store, device="cpu"),
            refused(tokmill.sample, run, "", tokens=1),
            refused(tokmill.train, recipe(store, 6), run, quiet=True),
        ]
        if any("neither a file nor a folder" in one for one in why):
            seen.add(name)
    assert {"recipe.json", "schema.json", "model/model.safetensors"} <= seen
