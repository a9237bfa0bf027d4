"""Checkpoints at an address: on real servers, through a proxy that breaks what it passes."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tokmill
from object_servers import Fault, Proxy, set_up
from tokmill.base import remote
from tokmill.base.errors import Interrupted, MachineError, TokmillError, UsageError
from tokmill.training.runs import pushed_run
from tokmill.training.runs.checkpoint import check_checkpoint, checkpoints
from tokmill.training.session import Session
from toy import cycles, losses, make_store

WEIGHTS = "model/model.safetensors"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(100))


def recipe(store: Path, address: str = "", **run: Any) -> dict[str, Any]:
    """A model with dropout, so that random states matter, and a validation."""
    return {
        "data": {"train": str(store), "val": str(store), "batch": 2},
        "model": {"dim": 16, "layers": 1, "dropout": 0.1},
        "task": {"length": 16},
        "run": {"steps": 12, "checkpoint_every": 2, "eval_every": 4, "log_every": 1, "eval_rows": 4}
        | {"push": address} | run,
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    tokmill.train(recipe(store), out, quiet=True)
    return out


def names(address: str) -> list[str]:
    return [one.address.removeprefix(f"{address}/") for one in remote.listed(address)]


def steps(address: str) -> list[int]:
    """The checkpoints that are whole at an address."""
    found = (re.fullmatch(r"checkpoints/step-(\d+)/state\.json", name) for name in names(address))
    return [int(match[1]) for match in found if match]


def same(run: Path, whole: Path) -> None:
    """Say that a run ended as the one that was never interrupted, to the bit."""
    assert (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert (run / "best/model.safetensors").read_bytes() == (
        whole / "best/model.safetensors"
    ).read_bytes()
    assert losses(run, "loss") == losses(whole, "loss")
    assert check_checkpoint(run / "checkpoints/step-00000012").step == 12


def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each checkpoint sent before the next step."""
    seen = Session.save

    def save(session: Session) -> None:
        seen(session)
        while session.pusher.held():
            time.sleep(0.02)

    monkeypatch.setattr(Session, "save", save)


@pytest.mark.parametrize("kind", ["plain", "ignoring"])
def test_a_lost_machine_goes_on_from_the_address(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: Path,
    whole: Path,
) -> None:
    server = request.getfixturevalue(kind)
    proxy = set_up(server[0], tmp_path, monkeypatch)
    slowly(monkeypatch)
    address = f"s3://{server[1]}/runs/ü #1+%20"
    lost = tmp_path / "lost"
    with monkeypatch.context() as patched:
        seen = Session.step

        def until(session: Session, total: int) -> None:
            seen(session, total)
            if session.state.step == 7:
                session.stop.signal = "a test"

        patched.setattr(Session, "step", until)
        where = f"{address}/a"
        with pytest.raises(Interrupted):
            tokmill.train(recipe(store, where), lost, quiet=True)
    assert steps(where) == [6, 7]
    puts = [path for method, path, _ in proxy.requests if method == "PUT"]
    assert puts[-1].endswith("step-00000007/state.json")
    new = tmp_path / "new"
    done = tokmill.train(recipe(store, where), new, quiet=True)
    same(new, whole)
    assert done.trace(3)[0].record == tokmill.Run(whole).trace(3)[0].record
    assert (new / "run-id").read_bytes() == (lost / "run-id").read_bytes()
    assert [path.name[-2:] for path in sorted((new / "checkpoints").iterdir())] == ["10", "12"]
    assert steps(where) == [10, 12]
    # What lies there is a run folder: with the same names and bytes.
    for name in names(where):
        assert remote.read_whole(f"{where}/{name}") == (new / name).read_bytes()
    # Nothing is sent again, and the first machine comes back.
    proxy.requests.clear()
    for folder in (new, lost):
        tokmill.train(recipe(store, where), folder, quiet=True)
        same(folder, whole)
    sent = {path.rpartition("/")[2] for method, path, _ in proxy.requests if method == "PUT"}
    assert sent == {"owner.json"}
    proxy.close()


KINDS: list[Fault] = ["cut", "drop", 429, 500, 503, 0.1]


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_faults(
    proxy: Proxy, address: str, store: Path, whole: Path, tmp_path: Path, seed: int
) -> None:
    draw, lock = random.Random(seed), threading.Lock()

    def fault(method: str, path: str) -> Fault:
        with lock:
            return draw.choice(KINDS) if draw.random() < 0.2 else None

    proxy.fault = fault
    out = tmp_path / "run"
    tokmill.train(recipe(store, address, steps=8), out, quiet=True)
    assert steps(address)[-1] == 8
    new = tmp_path / "new"
    tokmill.train(recipe(store, address, steps=8), new, quiet=True)
    for path in sorted((new / "checkpoints/step-00000008").iterdir()):
        assert path.read_bytes() == (out / "checkpoints/step-00000008" / path.name).read_bytes()
    proxy.fault = lambda method, path: None


def test_a_failure_is_told_at_once_and_at_the_end(
    proxy: Proxy,
    address: str,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*what: str) -> None:
        proxy.fault = lambda method, path: (
            403 if method == "PUT" and any(one in path for one in what) else None
        )

    refuse("run-id")
    with pytest.raises(MachineError, match="write was refused"):
        tokmill.train(recipe(store, address), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    refuse("step-00000012/model")
    with pytest.raises(MachineError, match="is in .*, and not at the address") as caught:
        tokmill.train(recipe(store, address), tmp_path / "run", quiet=True)
    assert caught.value.where == address and "same command" in caught.value.hint
    told = capsys.readouterr().err
    assert "warning: step-00000012 was not pushed: s3://" in told and "write was refused" in told
    assert "checkpoints were not pushed" in told
    assert 12 not in steps(address)
    # The model is there and whole; the same command sends what is left.
    assert (tmp_path / "run" / WEIGHTS).exists()
    refuse()
    tokmill.train(recipe(store, address), tmp_path / "run", quiet=True)
    assert steps(address)[-1] == 12


def test_the_steps_do_not_wait(
    proxy: Proxy,
    address: str,
    store: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While one checkpoint is sent the newest waits; those between are not sent, and counted."""
    done = threading.Event()
    proxy.fault = lambda method, path: (
        done.wait(30) and None if "step-00000002/model" in path else None
    )
    seen, held = Session.write, list[Any]()

    def write(session: Session, name: str, loss: float | None = None) -> None:
        seen(session, name, loss)
        if name == "model":
            held.extend(session.pusher.held())
            here = sorted(path.name for path in (session.out / "checkpoints").iterdir())
            # The one that is being sent stays, beside the two of `run.keep`.
            assert here == [f"step-{n:08d}" for n in (2, 10, 12)]
            done.set()

    monkeypatch.setattr(Session, "write", write)
    out = tmp_path / "run"
    tokmill.train(recipe(store, address), out, quiet=True)
    assert [path.name for path in held] == ["step-00000002", "step-00000012"]
    same(out, whole)
    assert steps(address) == [2, 12]
    assert "4 of 6 checkpoints were not pushed; the newest one was" in capsys.readouterr().err
    assert len(list((out / "checkpoints").iterdir())) == 2


def test_another_run_or_something_else_is_refused(
    proxy: Proxy, address: str, store: Path, tmp_path: Path
) -> None:
    tokmill.train(recipe(store, address, steps=2), tmp_path / "a", quiet=True)
    mine = (tmp_path / "a/run-id").read_text()[:12]
    before = names(address)
    # A new folder with another recipe; a run that has begun elsewhere.
    other = recipe(store, address, steps=2)
    other["optim"] = {"lr": 1e-3}
    with pytest.raises(TokmillError, match=f"another run .{mine}. than that of .*/b .*optim.lr"):
        tokmill.train(other, tmp_path / "b", quiet=True)
    assert not (tmp_path / "b").exists()
    tokmill.train(recipe(store, steps=2), tmp_path / "c", quiet=True)
    theirs = (tmp_path / "c/run-id").read_text()[:12]
    with pytest.raises(TokmillError, match=f".{mine}. than that of .*/c .{theirs}. is at"):
        tokmill.train(recipe(store, address, steps=4), tmp_path / "c", quiet=True)
    with pytest.raises(TokmillError, match="something else than a run"):
        tokmill.train(recipe(store, f"{address}/checkpoints"), tmp_path / "d", quiet=True)
    with pytest.raises(UsageError, match="pushed to a name in a bucket"):
        tokmill.train(recipe(store, "https://example.org/x"), tmp_path / "d", quiet=True)
    assert names(address) == before
    # Another store under the same recipe.
    make_store(tmp_path / "moved", cycles(90))
    with pytest.raises(TokmillError, match="not the one that the run began with"):
        tokmill.train(recipe(tmp_path / "moved", address), tmp_path / "e", quiet=True)


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    proxy: Proxy,
    address: str,
    store: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowly(monkeypatch)
    tokmill.train(recipe(store, address), tmp_path / "a", quiet=True)
    where = f"{address}/checkpoints/step-00000012"
    data = bytearray(remote.read_whole(f"{where}/optimizer.safetensors"))
    data[-1] ^= 1
    remote.put(f"{where}/optimizer.safetensors", bytes(data), "", replace=True)
    tokmill.train(recipe(store, address), tmp_path / "b", quiet=True)
    told = capsys.readouterr().err
    assert f"{where} is not used: the file is damaged" in told
    same(tmp_path / "b", whole)
    # It was sent anew, with what describes it.
    proxy.requests.clear()
    tokmill.train(recipe(store, address), tmp_path / "again", quiet=True)
    same(tmp_path / "again", whole)
    assert capsys.readouterr().err.count("not used") == 0
    for step in (10, 12):
        remote.delete(f"{address}/checkpoints/step-{step:08d}/rng-00000.json")
    with pytest.raises(TokmillError, match="no checkpoint there can be used"):
        tokmill.train(recipe(store, address), tmp_path / "c", quiet=True)
    assert not checkpoints(tmp_path / "c")


CHILD = """
import json, sys, tokmill
tokmill.train(json.loads(sys.argv[1]), sys.argv[2], quiet=True)
"""


@pytest.mark.parametrize(
    "after", [12, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 5, 9, 17, 23, 30, 38))]
)
def test_killed_between_files(
    proxy: Proxy, address: str, store: Path, whole: Path, tmp_path: Path, after: int
) -> None:
    """SIGKILL at some request that writes or removes; then the machine is lost, or comes back."""
    child: list[subprocess.Popen[bytes]] = []
    left = [after]

    def fault(method: str, path: str) -> Fault:
        left[0] -= method != "GET" and method != "HEAD"
        if left[0] <= 0:
            child[0].send_signal(signal.SIGKILL)
            return "drop"
        return None

    proxy.fault = fault
    argument = json.dumps(recipe(store, address))
    command = [sys.executable, "-c", CHILD, argument, str(tmp_path / "lost")]
    child.append(subprocess.Popen(command, env={**os.environ}))
    assert child[0].wait(120) == -signal.SIGKILL
    time.sleep(0.2)
    proxy.fault = lambda method, path: None
    found = steps(address)
    tokmill.train(recipe(store, address), tmp_path / "new", quiet=True)
    same(tmp_path / "new", whole)
    assert steps(address)[-1] == 12 and len(steps(address)) <= 2 and len(found) <= 3
    assert not {name.split("/")[1] for name in names(address) if name.startswith("checkp")} - {
        f"step-{step:08d}" for step in steps(address)
    }
    if after == 1:
        # The address knew nothing of the first machine, and belongs to the second one now.
        with pytest.raises(TokmillError, match="another run"):
            tokmill.train(recipe(store, address), tmp_path / "lost", quiet=True)
        return
    tokmill.train(recipe(store, address), tmp_path / "lost", quiet=True)
    same(tmp_path / "lost", whole)


def test_names_of_a_run_at_an_address() -> None:
    assert pushed_run.FILES.fullmatch("vocab/token.json")
    for name in ("vocab/../x", "vocab/a/b", "vocab/.x", "best/x", ".lock", "model/config.json"):
        assert not pushed_run.FILES.fullmatch(name)
