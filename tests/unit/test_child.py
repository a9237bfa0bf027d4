"""A child that may die: whatever it does is a value or a clean error, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import mishaps
from tokmill.base.children.child import Limits, run
from tokmill.base.children.child_calls import Child, ChildDied, ChildError, call
from tokmill.base.errors import UsageError

TARGET = "mishaps:mishap"
LIMITS = Limits(seconds=30, memory=400 << 20, output=1 << 20)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_and_what_it_printed() -> None:
    ended = run(python("import sys; print('out'); print('said', file=sys.stderr)"), LIMITS)
    assert ended == (0, "", b"out\n", "said\n")
    ended = run(python("raise SystemExit('why')"), LIMITS)
    assert (ended.code, ended.why()) == (1, "ended with exit code 1: why")
    # A command that reads what it is given ends at once where that is nothing.
    assert run(["cat"], LIMITS, lifeline=False) == (0, "", b"", "")
    with pytest.raises(FileNotFoundError):
        run(["/no/such/command"], LIMITS)


@pytest.mark.parametrize(
    ("kind", "limits", "why"),
    [
        ("segfault", LIMITS, "was killed by SIGSEGV"),
        ("kill", LIMITS, "was killed by SIGKILL"),
        ("exit", LIMITS, "ended with exit code 7"),
        ("panic", LIMITS, "ended with exit code 1: BaseException: a panic of another language"),
        ("loop", LIMITS._replace(seconds=0.3), "took more than 0.3 seconds"),
        ("hold", LIMITS._replace(seconds=0.3), "took more than 0.3 seconds"),
        ("allocate", LIMITS, "took more than 400 MiB"),
        ("reserve", LIMITS, "took more than 400 MiB"),
        ("print", LIMITS, "took more than 1 MiB of output"),
        ("complain", LIMITS, "took more than 1 MiB of output"),
        ("scribble", LIMITS, "gave an answer that cannot be read"),
        ("garble", LIMITS, "gave an answer that cannot be read"),
    ],
)
def test_a_function_that_does_what_it_must_not(kind: str, limits: Limits, why: str) -> None:
    before = set(psutil.Process().children())
    with Child(TARGET, limits) as child:
        assert child("fine") == "fine"
        with pytest.raises(ChildDied) as caught:
            child(kind)
        assert caught.value.what == f"the process that calls {TARGET} {why}"
        assert caught.value.exit_code == 5 and caught.value.hint
        assert caught.value.ended is not None and len(caught.value.ended.stderr) <= 64 << 10
        # The next call starts another child.
        assert child("fine") == "fine"
    assert set(psutil.Process().children()) == before


@pytest.mark.parametrize("kind", ["kill", "panic", "loop", "close"])
def test_temporary_files_go_with_the_child_that_made_them(kind: str) -> None:
    with Child(TARGET, LIMITS._replace(seconds=5)) as child:
        left = Path(child("litter"))
        assert left.exists()
        if kind == "close":
            child.close()
        else:
            child.limits = LIMITS._replace(seconds=0.3)
            with pytest.raises(ChildDied):
                child(kind)
        assert not left.exists() and not left.parent.exists()
        assert Path(child("litter")).exists()


@pytest.mark.parametrize("ends", ["os._exit(0)", "os.kill(os.getpid(), 9)", "child('loop')"])
def test_temporary_files_go_with_a_process_that_closes_nothing(ends: str) -> None:
    """Commands end by `os._exit`, workers of a build by a signal."""
    code = (
        f"import os, sys; sys.path[:] = {sys.path!r}\n"
        "from tokmill.base.children.child import Limits\n"
        "from tokmill.base.children.child_calls import Child\n"
        "child = Child('mishaps:mishap', Limits(seconds=100))\n"
        f"print(child('litter'), flush=True)\n{ends}"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        left = Path(parent.stdout.readline().strip())
        assert left.name
        parent.kill() if "loop" in ends else parent.wait(30)
    deadline = time.monotonic() + 10
    while left.parent.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_child_serves_many_calls_until_it_is_closed() -> None:
    with Child("mishaps:count", LIMITS) as child:
        answers = [child(i, "text", b"bytes", [1.5, None, {"a": True}]) for i in range(3)]
        assert [answer[0] for answer in answers] == [1, 2, 3]
        assert answers[2][2] == [2, "text", b"bytes", [1.5, None, {"a": True}]]
        assert answers[0][1] == answers[2][1] != os.getpid()
        child.close()
        assert not psutil.pid_exists(answers[0][1])
        assert child()[0] == 1
    assert mishaps.calls == 0


def test_large_arguments_and_answers_go_through() -> None:
    data = os.urandom(1 << 20) * 48
    begun = time.process_time()
    assert call(TARGET, "echo", data, limits=Limits(seconds=60)) == [data]
    assert time.process_time() - begun < 20


def test_errors_of_the_function_leave_the_child_alive() -> None:
    with Child(TARGET, LIMITS) as child:
        assert child("fine") == "fine"
        before = set(psutil.Process().children())
        with pytest.raises(ChildError, match="KeyError: 'no such key'"):
            child("raise")
        with pytest.raises(UsageError) as caught:
            child("refuse")
        assert str(caught.value) == "recipe.toml: key: not so\nhint: thus"
        with pytest.raises(UsageError) as caught:
            child("refuse by a class of its own")
        assert str(caught.value) == "this kind\nhint: another one"
        with pytest.raises(ChildError, match="TypeError: Encoding objects of type object"):
            child("object")
        assert set(psutil.Process().children()) == before


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(ChildDied, match="ended with exit code 1: ModuleNotFoundError: No module"):
        call("no_such_module:f", limits=LIMITS)
    with pytest.raises(ChildDied, match="has no attribute 'nothing'"):
        call("mishaps:nothing", limits=LIMITS)


def test_lines_are_told_as_they_come_and_may_end_it() -> None:
    seen: list[str] = []

    def told(line: str) -> bool:
        seen.append(line)
        return line != "line 2"

    with pytest.raises(ChildDied):
        call(TARGET, "lines", limits=LIMITS, line=told)
    assert seen == ["line 0", "line 1", "line 2"]


def test_what_a_child_has_started_ends_with_it() -> None:
    pid = call(TARGET, "child", limits=LIMITS)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["loop", "hold"])
def test_a_child_ends_with_the_process_that_started_it(kind: str, tmp_path: Path) -> None:
    """Also where the child is in foreign code that never lets Python run."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from tokmill.base.children.child import Limits\n"
        "from tokmill.base.children.child_calls import Child\n"
        "child = Child('mishaps:mishap', Limits(seconds=100))\n"
        "child('fine'); print(child._running.process.pid, flush=True)\n"
        f"child({kind!r})"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.3)
        parent.send_signal(signal.SIGKILL)
    child.wait(10)


def test_ctrl_c_ends_the_child(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    script = f"echo $$ > {place}.part; mv {place}.part {place}; exec sleep 1000"
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from tokmill.base.children.child import run, Limits\n"
        f"run(['sh', '-c', {script!r}], Limits())"
    )
    with subprocess.Popen(python(code), stderr=subprocess.PIPE, text=True) as parent:
        until = time.monotonic() + 30
        while not place.exists() and time.monotonic() < until:
            time.sleep(0.01)
        child = psutil.Process(int(place.read_text()))
        parent.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in parent.communicate(timeout=30)[1]
    assert not child.is_running()
