"""Runs the command in processes forked from one that has imported everything, under strace or not.

A forked run takes a tenth of a started one, so that hundreds of faults can be tried. A child calls
`tokmill.cli.main`, as `python -m tokmill` does, and nothing before it. strace attaches before the
command begins: what it counts are the command's own system calls.

Run as a script this file is the server: it reads one JSON request a line and answers in kind.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALL_CALLS = (
    "?write,?fsync,?fdatasync,?rename,?renameat,?renameat2,"
    "?unlink,?unlinkat,?mkdir,?mkdirat,?rmdir,?openat,?open,?ftruncate,?flock"
)


@dataclass(frozen=True)
class Ran:
    """How a command ended: `code` is its exit code, or minus the signal that killed it."""

    code: int
    out: str
    err: str
    log: list[str] = field(default_factory=list)
    """What strace wrote."""


class Forked:
    """The client: `forked("build", "jsonl", …).code`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, *arguments: object, strace: Sequence[str] = (), timeout: float = 60) -> Ran:
        """Run the command; with `strace` (its options) under strace, whose lines come back."""
        return Ran(**self._ask(arguments=list(map(str, arguments)), strace=strace, timeout=timeout))

    def warm(self, *arguments: object) -> None:
        """Run a command and import in the server what it imported."""
        self._ask(arguments=list(map(str, arguments)), strace=[], timeout=60, learn=True)

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def close(self) -> None:
        """End the server."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


def serve() -> None:
    """Answer requests until stdin ends."""
    import tokmill.cli  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _run(**request)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _run(
    arguments: list[str], strace: list[str], timeout: float, learn: bool = False
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gate_out, gate_in = os.pipe()
        child = os.fork()
        if not child:
            os.close(gate_in)
            _command(arguments, folder, gate_out, learn)
        os.close(gate_out)
        tracer = None
        if strace:
            tracer = _attach(child, strace, folder / "log")
        os.write(gate_in, b"g")
        os.close(gate_in)
        code = _wait(child, timeout)
        if tracer is not None:
            _, complaint = tracer.communicate(timeout=timeout)
            if "ptrace" in complaint:
                raise RuntimeError(complaint)
        if learn:
            for module in (folder / "modules").read_text().split():
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
        log = folder / "log"
        return {
            "code": code,
            "out": (folder / "out").read_text(errors="replace"),
            "err": (folder / "err").read_text(errors="replace"),
            "log": log.read_text(errors="replace").splitlines() if log.exists() else [],
        }


def _command(arguments: list[str], folder: Path, gate: int, learn: bool) -> None:
    """Be the child: wait until the gate opens, run the command, exit as Python would."""
    code = 70
    try:
        for number, name in ((1, "out"), (2, "err")):
            target = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(target, number)
            os.close(target)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        _let_strace_attach()
        os.read(gate, 1)
        os.close(gate)
        from tokmill.cli import main

        try:
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        if learn:
            (folder / "modules").write_text("\n".join(sys.modules))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _let_strace_attach() -> None:
    # Where Yama restricts ptrace to descendants, a process may name who may attach: here all.
    import ctypes

    pr_set_ptracer, anybody = 0x59616D61, ctypes.c_ulong(-1)
    ctypes.CDLL(None).prctl(pr_set_ptracer, anybody, 0, 0, 0)


def _attach(child: int, options: list[str], log: Path) -> subprocess.Popen[str]:
    tracer = subprocess.Popen(
        ["strace", "-f", "-y", "-s", "0", "-o", str(log), *options, "-p", str(child)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracer.stderr
    said = tracer.stderr.readline()
    if "attached" not in said:
        os.kill(child, 9)
        os.waitpid(child, 0)
        rest = tracer.communicate(timeout=10)[1]
        raise RuntimeError(f"strace: {said}{rest}".strip())
    return tracer


def _wait(child: int, timeout: float) -> int:
    import threading

    late = threading.Timer(timeout, os.kill, (child, 9))
    late.start()
    try:
        _, status = os.waitpid(child, 0)
    finally:
        late.cancel()
        late.join()
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    serve()
