"""Runs damaged files through a reader in processes that may die.

Run as a script this file is a server: one JSON request a line, one answer. A request forks a child
that makes the reader's good files; that one forks another, which damages and reads. If it dies,
runs too long or takes too much memory, the mutation it was at is a failure and the next one goes
on with the one behind. A child says what it is at before it begins, so nothing is lost.
"""

import functools
import importlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokmill.base import bounds

HERE = Path(__file__).parent
MEMORY = 2 << 30
"""Address space that a reader may take beyond what the process has when it begins."""
SECONDS = 30.0
"""A damaged file of a few kilobytes takes no longer, even on a busy machine."""
MOST_FAILURES = 8


class Server:
    """The client of the server."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, reader: str, count: int, first: int = 0) -> dict[str, Any]:
        """Damage and read `count` times; return counts of outcomes and the failures."""
        assert self.process.stdin and self.process.stdout
        request = {"reader": reader, "count": count, "first": first}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the server."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


def serve() -> None:
    """Answer requests until stdin ends."""
    # What takes a second to import is imported once, and not in each child.
    for name in ("readers", "tokmill.training.session", "tokmill.inference.sample"):
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(_in_child(functools.partial(run, **json.loads(line))) + "\n")
        answers.flush()


def _in_child(work: Callable[[], dict[str, Any]]) -> str:
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        try:
            found = json.dumps(work())
        except BaseException:
            found = json.dumps({"broken": traceback.format_exc()})
        with os.fdopen(into, "w") as pipe:
            pipe.write(found)
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer or json.dumps({"broken": "the child died"})


def run(reader: str, count: int, first: int) -> dict[str, Any]:
    """Make the good files of a reader, and read damaged ones."""
    from readers import READERS

    chosen = READERS[reader]
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{reader}-", dir=base) as name:
        folder = Path(name)
        began = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        work = Damaging(chosen, folder)
        outcomes = {"clean": 0, "right": 0}
        failures: list[str] = []
        seed, last = first, first + count
        while seed < last and len(failures) < MOST_FAILURES:
            seed = _batch(work, seed, last, outcomes, failures)
        tried = seed - first
        spent = time.process_time() - began[0]
        spent += resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began[1]
        return {
            "reader": reader,
            "mutations": tried,
            **outcomes,
            "other": len(failures),
            "failures": failures,
            "seconds": round(spent, 1),
        }


class Damaging:
    """A reader's good files, what they read as, and the damage of a seed."""

    def __init__(self, reader: Any, folder: Path) -> None:
        self.reader, self.folder = reader, folder
        self.kept = folder / "kept"
        self.place = folder / "place"
        self.place.mkdir()
        self.files = [path.relative_to(self.place) for path in reader.make(self.place)]
        assert self.files, "the reader has no file to damage"
        shutil.copytree(self.place, self.kept, symlinks=True)
        self.good = reader.read(self.place)
        assert reader.read(self.place) == self.good, "reading twice gives two results"

    def read(self) -> Any:
        """Read under the limit of memory that the documents promise for every reader."""
        size = sum((self.kept / path).stat().st_size for path in self.files)
        with bounds.bounded(self.place, size):
            return self.reader.read(self.place)

    def outcome(self, seed: int) -> tuple[str, str]:
        """Damage one file, read, put it back; return (clean, right or a failure, what was done)."""
        from mutations import mutate

        from tokmill.base.errors import TokmillError

        path = self.files[seed % len(self.files)]
        name, data = mutate((self.kept / path).read_bytes(), seed)
        done = f"seed {seed}: {name} in {path}"
        target = self.place / path
        target.write_bytes(data)
        try:
            found = self.read()
        except TokmillError as error:
            str(error)
            return "clean", done
        except SystemExit:
            return "clean", done
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)
            place = next(
                (f"{f.filename.split('tokmill/')[-1]}:{f.lineno}" for f in reversed(where)
                 if "tokmill/" in f.filename), "")  # fmt: skip
            return f"{type(error).__name__}: {str(error)[:200]} at {place}", done
        finally:
            if self.reader.restore:
                self.reader.restore(self.place, self.kept)
            else:
                target.write_bytes((self.kept / path).read_bytes())
        if self.reader.digests and found != self.good:
            return "wrong without a word", done
        return "right", done


def _batch(
    work: Damaging, seed: int, last: int, outcomes: dict[str, int], failures: list[str]
) -> int:
    """Read in a child from `seed` on; return the seed to go on with."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        try:
            _work(work, range(seed, last), into)
        except BaseException:
            # Not the reader but the harness: it must not go on as its own parent.
            text = traceback.format_exc().encode("ascii", "backslashreplace")
            os.write(into, b"other harness: " + text.replace(b"\n", b" ")[-2000:] + b"\n")
        os._exit(0)
    os.close(into)
    at, buffer, late = "", b"", False
    with os.fdopen(out, "rb", buffering=0) as pipe:
        while True:
            if not select.select([pipe], [], [], SECONDS)[0]:
                os.kill(child, signal.SIGKILL)
                late = True
                break
            piece = pipe.read(1 << 16)
            if not piece:
                break
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                kind, _, text = line.decode().partition(" ")
                if kind == "at":
                    at = text
                    continue
                at, seed = "", seed + 1
                if kind in outcomes:
                    outcomes[kind] += 1
                else:
                    failures.append(text)
                    if len(failures) >= MOST_FAILURES:
                        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if at and len(failures) < MOST_FAILURES:
        how = f"took more than {SECONDS:.0f} s" if late else f"died with status {status:#x}"
        failures.append(f"{at}: {how}")
        seed += 1
    return seed


def _work(work: Damaging, seeds: range, into: int) -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Panics of other libraries print; thousands of them would bury the answer.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    bounds.own_process = True
    os.write(into, b"at the good files\n")
    assert work.read() == work.good
    for seed in seeds:
        os.write(into, f"at seed {seed} in {work.files[seed % len(work.files)]}\n".encode())
        kind, done = work.outcome(seed)
        if kind in ("clean", "right"):
            os.write(into, f"{kind} \n".encode())
        else:
            text = f"{done}: {kind}".encode("ascii", "backslashreplace").replace(b"\n", b" ")
            os.write(into, b"other " + text + b"\n")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]
    serve()
