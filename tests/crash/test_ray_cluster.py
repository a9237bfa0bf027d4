"""Builds on a Ray cluster of several raylets: what is lost with a worker, a node or the build."""

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
from typing import Any

import psutil
import pytest

from crash_stores import (
    contents,
    ending_names,
    is_clean,
    write_inputs,
    write_jsonl,
    write_tokenizer,
)
from making import quick_build
from object_servers import set_up
from ray_clusters import OBJECTS, Cluster, environment, workers
from tokmill.base import remote
from tokmill.store.checks.validate import validate
from tokmill.store.publish import pull
from tokmill.store.store import Store

pytest.importorskip("ray", reason="needs the package ray")
pytestmark = pytest.mark.long
SECONDS = 240
SHARDS = 10
SIZE = 1_000_000


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with environment():
        started = Cluster(2)
        yield started
        started.close()


class Case:
    """A build that takes its time, as the command and as the store that it is to make."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ending_names(SHARDS):
            write_jsonl(folder / "in" / name, SIZE)
        self.tokenizer = write_tokenizer(folder / "tokenizer.json", 1000)
        assert self.run(folder / "pool", "--workers", "2").returncode == 0
        self.expected = contents(folder / "pool")

    def start(self, out: Path, *more: str) -> subprocess.Popen[str]:
        words = ["build", "jsonl", self.folder / "in", "--tokenizer", self.tokenizer]
        words += ["--engine", "tokenizers", "-o", out, *more]
        return subprocess.Popen(
            [sys.executable, "-m", "tokmill", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
        with self.start(out, *more) as process:
            said = process.communicate(timeout=SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, *said)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"))


def wait_for(found: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    until = time.monotonic() + SECONDS
    while not (value := found()):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    return value


def receipts(out: Path) -> int:
    return len(list((out / "shards").glob("*.json"))) if (out / "shards").is_dir() else 0


def on(ray: Any) -> tuple[str, ...]:
    return "--executor", "ray", "--address", ray.address


def test_all_nodes_make_the_bytes_of_one_machine(ray: Any, case: Case, tmp_path: Path) -> None:
    ran = case.run(tmp_path / "s", *on(ray))
    assert (ran.returncode, ran.stderr) == (0, "Ray: 2 nodes with 2 cores\n")
    assert contents(tmp_path / "s") == case.expected
    # A build whose workers share what one of them has found, in a file of the store's folder.
    write_inputs(tmp_path / "in", 3)
    quick_build("jsonl", tmp_path / "in", tmp_path / "small")
    for name, more in (("a", ("--workers", "0")), ("b", on(ray))):
        words = ["build", "select", tmp_path / "small", "--near-unique", "0.7", "--unique"]
        words += ["-o", tmp_path / name, "--max-rejects", "1", "-q", *more]
        subprocess.run([sys.executable, "-m", "tokmill", *map(str, words)], check=True)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


PARTS_ON_NODES = """
import json, os, sys, tempfile
import ray

address, far, tokenizer, parts, variables = json.loads(sys.argv[1])
ray.init(address=address, log_to_driver=False)


@ray.remote(num_cpus=1, max_retries=3, scheduling_strategy="SPREAD")
def part(number):
    import resource
    import tokmill
    from tokmill.builds.plan import Amount
    from tokmill.builds.plan import How

    os.environ.update(variables)
    with tempfile.TemporaryDirectory() as own:
        how = How(part=(number, parts), push=f"{far}/store", amount=Amount(workers=0), quiet=True)
        tokmill.build("jsonl", f"{far}/in", f"{own}/part", tokenizer=tokenizer, how=how)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return ray.get_runtime_context().get_node_id(), used << 10


print(json.dumps(ray.get([part.remote(number + 1) for number in range(parts)])))
"""


def test_parts_on_nodes_meet_in_a_bucket(
    ray: Any,
    case: Case,
    plain: tuple[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No folder is shared, a killed worker begins again on an empty disk, and nothing spills."""
    set_up(plain[0], tmp_path, monkeypatch).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{plain[0]}")
    remote._new_client.cache_clear()
    far = f"s3://{plain[1]}/ray"
    for path in (case.folder / "in").iterdir():
        remote.put(f"{far}/in/{path.name}", path, "")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL")
    variables = {name: os.environ[name] for name in names}
    given = json.dumps([ray.address, far, str(case.tokenizer), 5, variables])
    words = [sys.executable, "-c", PARTS_ON_NODES, given]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as driver:
        wait_for(lambda: len(remote.listed(f"{far}/store/shards")) >= 4, driver)
        wait_for(lambda: workers("ray::part"), driver)[0].send_signal(signal.SIGKILL)
        said = driver.communicate(timeout=SECONDS)[0]
    assert driver.returncode == 0
    nodes, used = zip(*json.loads(said.splitlines()[-1]), strict=True)
    assert len(set(nodes)) == 2 and max(used) < 500 << 20
    quick_build("jsonl", f"{far}/in", tmp_path / "one", tokenizer=case.tokenizer)
    assert contents(pull(f"{far}/store", tmp_path / "s").path) == contents(tmp_path / "one")
    # Texts and shards are never objects of Ray, so they cannot be spilled to a disk.
    folders = Path(os.environ["RAY_TMPDIR"]).rglob("ray_spilled_objects*")
    assert not [path for folder in folders for path in folder.rglob("*") if path.is_file()]


def test_a_killed_worker_costs_its_shard(ray: Any, case: Case, tmp_path: Path) -> None:
    with case.start(tmp_path / "s", *on(ray)) as process:
        wait_for(lambda: receipts(tmp_path / "s") >= 2, process)
        wait_for(workers, process)[0].send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "Ray: a worker was lost; its shard " in err and "Traceback" not in err
    assert contents(tmp_path / "s") == case.expected
    assert validate(Store(tmp_path / "s")).ok


def test_a_killed_node_costs_its_shards(ray: Any, case: Case, tmp_path: Path) -> None:
    ray("add 127.0.0.9")
    with case.start(tmp_path / "s", *on(ray)) as process:
        wait_for(lambda: receipts(tmp_path / "s") >= 3, process)
        ray("kill 127.0.0.9")
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert err.startswith("Ray: 3 nodes with 3 cores\n")
    assert "Ray: a worker was lost" in err or "is gone, 2 nodes" in err
    assert "Traceback" not in err
    assert contents(tmp_path / "s") == case.expected


def test_a_shard_that_kills_every_worker_ends_the_build(
    ray: Any, case: Case, tmp_path: Path
) -> None:
    with case.start(tmp_path / "s", *on(ray), "--workers", "1") as process:
        killed = set()
        until = time.monotonic() + SECONDS
        while process.poll() is None and time.monotonic() < until:
            for worker in workers():
                with contextlib.suppress(psutil.Error):
                    worker.kill()
                    killed.add(worker.pid)
            time.sleep(0.02)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 5 and len(killed) >= 3
    assert "3 workers were lost while they made the shard" in err and "memory" in err
    assert is_clean(err)
    assert case.run(tmp_path / "s", *on(ray)).returncode == 0
    assert contents(tmp_path / "s") == case.expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_stopped_goes_on(
    ray: Any, case: Case, tmp_path: Path, number: signal.Signals
) -> None:
    with case.start(tmp_path / "s", *on(ray)) as process:
        wait_for(lambda: receipts(tmp_path / "s") >= 2, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=SECONDS)
    if number != signal.SIGKILL:
        assert process.returncode == 3 and is_clean(err), err
        assert not workers()
    until = time.monotonic() + 30
    while workers():
        assert time.monotonic() < until
        time.sleep(0.1)
    before = receipts(tmp_path / "s")
    assert 2 <= before < SHARDS
    assert case.run(tmp_path / "s", "--workers", "2").returncode == 0
    assert contents(tmp_path / "s") == case.expected


def test_a_time_limit_ends_all_nodes(ray: Any, case: Case, tmp_path: Path) -> None:
    ran = case.run(tmp_path / "s", *on(ray), "--max-time", "4s")
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    assert "(partial)" in ran.stdout, ran.stdout
    assert validate(Store(tmp_path / "s")).ok
    assert case.run(tmp_path / "s", *on(ray)).returncode == 0
    assert contents(tmp_path / "s") == case.expected


def test_errors_of_the_input_are_those_of_the_pool(ray: Any, case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.folder / "in", tmp_path / "in")
    with next((tmp_path / "in").iterdir()).open("a") as handle:
        handle.write("no JSON\n" * 2000)
    errors = []
    for name, more in (("pool", ("--workers", "2")), ("ray", on(ray))):
        broken = Case.__new__(Case)
        broken.folder, broken.tokenizer = tmp_path, case.tokenizer
        ran = broken.run(tmp_path / name, "--max-rejects", "0", *more)
        assert ran.returncode == 1, ran.stderr
        said = [line for line in ran.stderr.splitlines() if not line.startswith("Ray: ")]
        errors.append("\n".join(said).replace(str(tmp_path / name), "STORE"))
    assert errors[0] == errors[1] and is_clean(errors[0])


def test_a_node_that_does_not_see_the_folder(ray: Any, case: Case, tmp_path: Path) -> None:
    """A raylet with a file system of its own over the store's folder."""
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("root may write anywhere")
    folder = tmp_path / "work"
    folder.mkdir()
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    start = f'mount -t tmpfs none {folder} && exec "$@"'
    words = ["start", "--address", ray.address, "--num-cpus", "1", "--block"]
    words += ["--node-ip-address", "127.0.0.8", "--object-store-memory", str(OBJECTS)]
    with subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", start, "sh", *ray_command, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as other:
        try:
            ran = None
            until = time.monotonic() + 60
            while time.monotonic() < until:
                shutil.rmtree(folder / "s", ignore_errors=True)
                ran = case.run(folder / "s", *on(ray))
                if ran.returncode:
                    break
            assert ran is not None and ran.returncode == 5 and is_clean(ran.stderr)
            assert f"the node 127.0.0.8 does not see the folder {folder}/s" in ran.stderr
            assert "shared file system" in ran.stderr
        finally:
            other.terminate()
    assert not receipts(folder / "s")
