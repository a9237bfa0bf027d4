"""Ray clusters of several raylets on this machine, which end with the tests that began them.

Run as a script this file is the cluster: it reads a command a line, and answers each with a line.
It is a process of its own, as Ray reads its environment when it is imported.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "plugin-ray"
HEAD = "127.0.0.2"
"""Ray puts another address in the place of 127.0.0.1."""
OBJECTS = 80 << 20


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Install the plug-in, and set what Ray needs to stay on this machine: no reports, a token."""
    with tempfile.TemporaryDirectory(prefix="tokmill-ray-") as folder:
        site = Path(folder, "site")
        information = site / "tokmill_ray-1.dist-info"
        information.mkdir(parents=True)
        head = "Metadata-Version: 2.1\nName: tokmill-ray\nVersion: 1\nSummary: Ray\n"
        (information / "METADATA").write_text(head)
        project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
        points = project["entry-points"]["tokmill.parts"].items()
        lines = ["[tokmill.parts]", *(f"{name} = {target}" for name, target in points), ""]
        (information / "entry_points.txt").write_text("\n".join(lines))
        shutil.copytree(PLUGIN / "tokmill_ray", site / "tokmill_ray")
        token = Path(folder, "token")
        token.write_text(os.urandom(32).hex())
        keys = {
            "PYTHONPATH": os.pathsep.join(
                [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_TMPDIR": folder,
            # Memory of other tests on the machine is no reason to end workers.
            "RAY_memory_monitor_refresh_ms": "0",
        }
        before = {key: os.environ.get(key) for key in (*keys, "RAY_ADDRESS")}
        os.environ.update(keys)
        os.environ.pop("RAY_ADDRESS", None)
        try:
            yield
        finally:
            for key, value in before.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value


class Cluster:
    """A head, which makes no shards, and `nodes` raylets of one core."""

    def __init__(self, nodes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._answer()

    def __call__(self, command: str) -> None:
        """Let the cluster `add ADDRESS` or `kill ADDRESS`: a raylet with all that is below it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        raise RuntimeError("the cluster has ended")

    def close(self) -> None:
        """End all of it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def workers(task: str = "ray::make_on_node") -> list[psutil.Process]:
    """Return the processes below this one that make shards."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] == [task]:
                found.append(process)
    return found


def serve(nodes: int) -> None:
    """Be the cluster until stdin ends."""
    from ray.cluster_utils import Cluster as RayCluster

    common = {"object_store_memory": OBJECTS, "include_dashboard": False}
    head = {"num_cpus": 0, "node_ip_address": HEAD, **common}
    started = RayCluster(initialize_head=True, head_node_args=head)
    added: dict[str, Any] = {}

    def add(address: str) -> None:
        added[address] = started.add_node(num_cpus=1, node_ip_address=address, **common)

    for number in range(nodes):
        add(f"127.0.0.{number + 3}")
    print(f"> {started.address}", flush=True)
    for line in sys.stdin:
        command, address = line.split()
        if command == "add":
            add(address)
        else:
            started.remove_node(added.pop(address), allow_graceful=False)
        print("> done", flush=True)
    started.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
