"""Two machines that continue one pushed run: one is refused, or told when it sends again."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_pushed_runs import names, recipe, same, steps

import tokmill
from object_servers import Proxy, set_up
from tokmill.base import remote
from tokmill.base.errors import Interrupted, MachineError, TokmillError
from tokmill.base.stop import Stop
from tokmill.store.manifest import encode
from tokmill.training.runs import pushed_run as owner
from tokmill.training.runs.checkpoint import check_checkpoint, checkpoints
from toy import cycles, make_store

CHILD = """
import json, sys, time, tokmill
from tokmill.base.errors import TokmillError
from tokmill.training.runs import pushed_run as owner
from tokmill.training.session import Session
owner.LEASE, owner.RENEWED, pause = (float(word) for word in sys.argv[3:])
seen = Session.step
def step(session, total):
    time.sleep(pause)
    seen(session, total)
    print(session.state.step, flush=True)
Session.step = step
try:
    tokmill.train(json.loads(sys.argv[1]), sys.argv[2], quiet=True)
except TokmillError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""
TOLD = r"another process trains the run that is pushed here: process \d+ on .*, since 20"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(100))


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    tokmill.train(recipe(store), out, quiet=True)
    return out


@pytest.fixture(params=["plain", "ignoring"])
def far(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An address on a server that obeys conditions, and on one that ignores them."""
    port, bucket = request.getfixturevalue(request.param)
    proxy = set_up(port, tmp_path, monkeypatch)
    yield f"s3://{bucket}/two/{abs(hash(request.node.nodeid)):x}"
    proxy.close()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(store: Path, far: str, tmp_path: Path) -> Iterator[Start]:
    """Start a training in a folder of its own, with so many seconds a step."""
    children = []

    def begin(name: str, pause: float, lease: float = 60, renewed: float = 0.3) -> Any:
        words = [json.dumps(recipe(store, far)), tmp_path / name, lease, renewed, pause]
        command = [sys.executable, "-c", CHILD, *map(str, words)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.communicate()


def until_step(child: subprocess.Popen[str], step: int) -> None:
    assert child.stdout
    assert any(line.strip() == str(step) for line in child.stdout)


def test_the_second_is_refused(
    far: str, start: Start, store: Path, whole: Path, tmp_path: Path
) -> None:
    first = start("a", 0.3)
    until_step(first, 2)
    with pytest.raises(MachineError, match=TOLD) as caught:
        tokmill.train(recipe(store, far), tmp_path / "b", quiet=True)
    assert str(first.pid) in caught.value.what and "only one" in caught.value.hint
    assert caught.value.where == far and not (tmp_path / "b").exists()
    assert first.wait(120) == 0
    same(tmp_path / "a", whole)
    assert "owner.json" not in names(far)
    tokmill.train(recipe(store, far), tmp_path / "b", quiet=True)
    same(tmp_path / "b", whole)


@pytest.mark.long
def test_one_that_was_cut_off_is_told(far: str, start: Start, whole: Path, tmp_path: Path) -> None:
    """It stands still for longer than the lease, another goes on, then it wakes up."""
    first = start("a", 0.2, renewed=0.3)
    until_step(first, 5)
    first.send_signal(signal.SIGSTOP)
    second = start("b", 1.5, lease=3)
    until_step(second, 7)
    first.send_signal(signal.SIGCONT)
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 5 and re.search(TOLD, said) and str(second.pid) in said
    assert "hint: let only one go on" in said
    check_checkpoint(checkpoints(tmp_path / "a")[-1])
    assert second.wait(120) == 0
    same(tmp_path / "b", whole)
    assert steps(far) == [10, 12]


@pytest.mark.long
def test_two_that_start_at_once(far: str, start: Start, whole: Path, tmp_path: Path) -> None:
    children = {name: start(name, 0.3) for name in "abc"}
    said = {name: child.communicate(timeout=180)[0] for name, child in children.items()}
    codes = sorted(child.returncode for child in children.values())
    assert codes == [0, 5, 5]
    for name, child in children.items():
        if child.returncode:
            assert "another" in said[name]
        else:
            same(tmp_path / name, whole)


def lost(far: str) -> owner.Signature:
    """Sign as a machine that is no more."""
    remote.put(f"{far}/run-id", b"0", "", replace=True)
    one = owner.Signature("0" * 32, "node-7", 1, "another machine", "2026-11-27 02:00 UTC")
    remote.put(f"{far}/owner.json", encode(one), "", replace=True)
    return one


def test_a_machine_without_a_sign_is_lost(
    far: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(owner, "LEASE", 2.0)
    lost(far)
    begun = time.monotonic()
    stop = Stop(begun + 100)
    with owner.Owner(far, stop):
        assert time.monotonic() - begun > 2
        assert b"node-7" not in remote.read_whole(f"{far}/owner.json")
        # A process of this machine that has ended is not waited for; this one itself neither.
        assert "waiting up to 2 s for a sign of another training: process 1 on node-7" in (
            capsys.readouterr().err
        )
        monkeypatch.setattr(owner, "LEASE", 60.0)
        with owner.Owner(far, stop):
            pass
    gone = subprocess.Popen(["true"])
    gone.wait()
    one = msgspec.structs.replace(owner.sign_here(), pid=gone.pid)
    remote.put(f"{far}/owner.json", encode(one), "")
    with owner.Owner(far, stop):
        assert "waiting" not in capsys.readouterr().err


def test_a_signal_ends_the_waiting(far: str) -> None:
    lost(far)
    stop = Stop(time.monotonic() + 100)
    threading.Timer(1, lambda: setattr(stop, "signal", "SIGTERM")).start()
    with pytest.raises(Interrupted, match="stopped by SIGTERM before"), owner.Owner(far, stop):
        pass
    assert b"node-7" in remote.read_whole(f"{far}/owner.json")


def test_what_is_no_signature(proxy: Proxy, address: str) -> None:
    remote.put(f"{address}/run-id", b"0", "")
    remote.put(f"{address}/owner.json", b"[", "")
    with pytest.raises(TokmillError, match="cannot be read") as caught:
        owner.Owner(address, Stop(time.monotonic() + 9)).__enter__()
    assert caught.value.where == f"{address}/owner.json" and caught.value.hint


def test_a_server_that_is_away_for_a_while(
    proxy: Proxy, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signs go on when it is back; what was refused because it was repeated is no loss."""
    monkeypatch.setattr(owner, "RENEWED", 0.1)
    one = owner.Owner(address, Stop(time.monotonic() + 100))
    with one:
        proxy.fault = lambda method, path: "cut" if method == "PUT" else None
        time.sleep(1)
        proxy.fault = lambda method, path: 503
        time.sleep(1)
        proxy.fault = lambda method, path: None
        before = one.mine.sign
        while one.mine.sign < before + 2:
            time.sleep(0.1)
        one.check()
    assert names(address) == []
