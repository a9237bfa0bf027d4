"""A training over two nodes, each in a network of its own, as docs/training/processes.md starts it.

docs/log/2026-11-26-nodes-and-clusters.md has what was seen.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tokmill
from tokmill.base.errors import Interrupted
from tokmill.training.session import Session
from toy import cycles, losses, make_store

pytestmark = pytest.mark.long

SETS = ["model.dim=16", "model.layers=1", "task.length=16", "data.batch=8", "run.log_every=1",
        "run.checkpoint_every=20"]  # fmt: skip
FIRST, SECOND = "10.77.31.1", "10.77.31.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them; their names."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    names = [f"tok{os.getpid() % 10_000}{end}" for end in "ab"]
    ends = [f"v{name}" for name in names]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
        for name, end, address in zip(names, ends, (FIRST, SECOND), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


class Nodes:
    """Starts a node's command in its namespace, in a process group of its own."""

    def __init__(self, names: list[str], out: Path, store: Path, steps: int) -> None:
        self.names, self.out, self.store, self.steps = names, out, store, steps
        self.started: list[subprocess.Popen[str]] = []

    def start(self, rank: int) -> subprocess.Popen[str]:
        sets = [word for key in SETS for word in ("--set", key)]
        where = ["--nodes", "2", "--node-rank", str(rank), "--master", f"{FIRST}:29511"]
        command = [sys.executable, "-m", "tokmill", "train", str(self.store), "-o", str(self.out)]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[rank], *command, "--steps", str(self.steps), *where,
             *sets],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.started.append(process)
        return process

    def checkpoint(self) -> int:
        names = [path.name for path in (self.out / "checkpoints").glob("step-*")]
        return max((int(name[5:]) for name in names), default=0)

    def wait_for(self, what: Callable[[], object], seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, "it did not come about in time"
            time.sleep(0.05)

    def lose(self, rank: int) -> None:
        """Kill all processes of a node: its launcher alone would be noticed by the others."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.names[rank]], check=True, capture_output=True, text=True
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def end(self) -> None:
        for rank in (0, 1):
            self.lose(rank)
        for process in self.started:
            process.communicate(timeout=20)


def test_two_nodes_one_of_which_is_lost(networks: list[str], tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", cycles(200))
    nodes = Nodes(networks, tmp_path / "run", store, 3000)
    try:
        both = [nodes.start(rank) for rank in (0, 1)]
        nodes.wait_for(lambda: nodes.checkpoint() >= 40)
        nodes.lose(1)
        said = both[0].communicate(timeout=120)[1]
        assert both[0].returncode == 5, said
        assert "Traceback" not in said and "the same command continues" in said
        reached = nodes.checkpoint()
        assert reached < 3000
        # The node is back; the first one may be started before it.
        again = [nodes.start(0)]
        time.sleep(3)
        again.append(nodes.start(1))
        nodes.wait_for(lambda: nodes.checkpoint() > reached)
        for process in again:
            process.send_signal(signal.SIGTERM)
        told = [process.communicate(timeout=120)[1] for process in again]
        assert again[0].returncode == 3, told
        assert f"step {reached}: resumes from its checkpoint" in told[0]
        sessions = (tmp_path / "run/sessions.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in sessions] == [
            {"step": 0, "processes": 2}, {"step": reached, "processes": 2},
        ]  # fmt: skip
        steps = nodes.checkpoint()
    finally:
        nodes.end()
    one = losses_of_one_process(store, tmp_path / "one", steps)
    found = losses(tmp_path / "run")
    assert found.keys() == one.keys() == {*range(1, steps + 1)}
    worst = max(abs(found[step] / one[step] - 1) for step in found)
    print(f"{steps} steps, largest difference of a loss {worst:.1e}")
    assert worst < 2e-5


def losses_of_one_process(store: Path, out: Path, steps: int) -> dict[int, float]:
    """The losses of a training of 3,000 steps that ends after some of them."""
    seen = Session.step

    def until(session: Session, total: int) -> None:
        seen(session, total)
        if session.state.step >= steps:
            session.stop.signal = "a test"

    recipe = {
        "data": {"train": str(store), "batch": 8}, "model": {"dim": 16, "layers": 1},
        "task": {"length": 16}, "run": {"steps": 3000, "log_every": 1},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "step", until)
        with pytest.raises(Interrupted):
            tokmill.train(recipe, out, quiet=True)
    return losses(out)
