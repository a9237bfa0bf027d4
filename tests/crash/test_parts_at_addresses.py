"""Parts of one build that machines without a shared disk send to one address."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from crash_stores import write_inputs
from object_servers import Fault, Proxy, set_up
from tokmill.base import remote
from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.builds.build import build
from tokmill.builds.plan import Amount, How
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store

PARTS = 3
SHARDS = 7


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder, SHARDS)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that one machine builds."""
    out = tmp_path_factory.mktemp("whole") / "store"
    how = How(quiet=True, amount=Amount(workers=0))
    return build("jsonl", inputs, out, tokenizer=tokenizer, how=how).path


def there(address: str) -> dict[str, bytes]:
    found = [one.address for one in remote.listed(address)]
    return {one.removeprefix(f"{address}/"): remote.read_whole(one) for one in found}


def here(store: Path) -> dict[str, bytes]:
    """What a push sends of a store."""
    paths = [path for path in store.rglob("*") if path.is_file()]
    named = {path.relative_to(store).as_posix(): path for path in paths}
    kept = {n: p for n, p in named.items() if not n.startswith(("cache/", ".lock", "events"))}
    return {name: path.read_bytes() for name, path in kept.items()}


Machine = Callable[..., Store]


@pytest.fixture
def machine(inputs: Path, tokenizer: Path, tmp_path: Path, address: str) -> Machine:
    """Build a part in the folder of a machine."""

    def run(part: int, folder: str = "", where: str = address, **options: Any) -> Store:
        how = How(quiet=True, amount=Amount(workers=0), part=(part, PARTS), push=where)
        out = tmp_path / (folder or f"machine{part}")
        return build("jsonl", inputs, out, tokenizer=tokenizer, how=how, **options)

    return run


@pytest.mark.parametrize("order", [*itertools.permutations((1, 2, 3))][:6:5])
def test_three_machines_make_the_store_of_one(
    proxy: Proxy, address: str, machine: Machine, whole: Path, order: tuple[int, ...]
) -> None:
    for part in order[:-1]:
        assert machine(part).partial
        assert "manifest.json" not in there(address)
        with pytest.raises(TokmillError, match="no store at the address"):
            Store(address)
    proxy.requests.clear()
    store = machine(order[-1])
    assert store.place == address and not store.partial
    puts = [path for method, path, _ in proxy.requests if method == "PUT"]
    assert puts[-1].endswith("/manifest.json")
    assert there(address) == here(whole)
    assert validate(Store(address)).ok
    # Repeated by anybody, on an empty disk too: nothing is built and nothing sent.
    proxy.requests.clear()
    for part in order:
        assert not machine(part).partial
        assert not machine(part, f"again{part}").partial
    assert not [path for method, path, _ in proxy.requests if method == "PUT" and "shards" in path]
    assert there(address) == here(whole)


def test_where_conditions_are_ignored(
    ignoring: tuple[int, str],
    machine: Machine,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = set_up(ignoring[0], tmp_path, monkeypatch)
    where = f"s3://{ignoring[1]}/parts/a store"
    for part in (2, 1, 3, 2):
        machine(part, where=where)
    assert there(where) == here(whole)
    proxy.close()


CHILD = """
import json, sys
from tokmill.builds.build import build
from tokmill.builds.plan import Amount
from tokmill.builds.plan import How
inputs, out, tokenizer, part, address = json.loads(sys.argv[1])
how = How(quiet=True, amount=Amount(workers=0), part=(part, 3), push=address)
build("jsonl", inputs, out, tokenizer=tokenizer, how=how)
"""


def begin(*arguments: object) -> subprocess.Popen[bytes]:
    given = json.dumps([one if isinstance(one, int) else str(one) for one in arguments])
    return subprocess.Popen([sys.executable, "-c", CHILD, given], env={**os.environ})


@pytest.mark.parametrize(
    "after", [5, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3, 4, 6, 7, 8, 9, 10))]
)
def test_a_machine_is_killed_and_repeated(
    proxy: Proxy,
    address: str,
    machine: Machine,
    whole: Path,
    inputs: Path,
    tokenizer: Path,
    tmp_path: Path,
    after: int,
) -> None:
    """SIGKILL at some PUT; the same command goes on, in its folder or in an empty one."""
    machine(1)
    machine(2)
    left, child = [after], list[subprocess.Popen[bytes]]()

    def fault(method: str, path: str) -> Fault:
        left[0] -= method == "PUT"
        if left[0] <= 0:
            child[0].send_signal(signal.SIGKILL)
            return "drop"
        return None

    proxy.fault = fault
    child.append(begin(inputs, tmp_path / "machine3", tokenizer, 3, address))
    code = child[0].wait(60)
    time.sleep(0.1)
    proxy.fault = lambda method, path: None
    if code == -signal.SIGKILL:
        assert "manifest.json" not in there(address)
        # From the seventh on all receipts are there, and whoever comes finishes.
        assert machine(2).partial == (after < 7)
    else:
        # There were fewer requests.
        assert code == 0
    folder = "machine3" if after % 2 else "empty"
    assert not machine(3, folder).partial
    assert there(address) == here(whole)


def test_two_finish_at_once(
    proxy: Proxy, address: str, machine: Machine, whole: Path, inputs: Path, tokenizer: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Both have all receipts before either writes the manifest; all three start together."""
    meet = threading.Barrier(2)

    def fault(method: str, path: str) -> Fault:
        if method == "PUT" and path.endswith("manifest.json"):
            meet.wait(30)
        return None

    machine(1)
    machine(2)
    proxy.fault = fault
    given = [(inputs, tmp_path / name, tokenizer, 3, address) for name in ("machine3", "other")]
    assert [child.wait(60) for child in [begin(*one) for one in given]] == [0, 0]
    puts = [path for method, path, _ in proxy.requests if method == "PUT"]
    assert sum(path.endswith("manifest.json") for path in puts) == 2
    assert there(address) == here(whole)
    proxy.fault = lambda method, path: None
    where = f"{address} 2"
    children = [begin(inputs, tmp_path / f"x{n}", tokenizer, n, where) for n in (1, 2, 3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert there(where) == here(whole)


def test_faults(proxy: Proxy, address: str, machine: Machine, whole: Path) -> None:
    draw, lock = random.Random(5), threading.Lock()

    def fault(method: str, path: str) -> Fault:
        with lock:
            return draw.choice(["cut", "drop", 429, 500, 503, 0.1]) if draw.random() < 0.2 else None

    proxy.fault = fault
    for part in (3, 2, 1):
        machine(part)
    proxy.fault = lambda method, path: None
    assert there(address) == here(whole)


def test_what_does_not_fit_is_refused(
    proxy: Proxy, address: str, machine: Machine, inputs: Path, tokenizer: Path, tmp_path: Path
) -> None:
    machine(1)
    before = there(address)
    # Other options, other inputs: another plan.
    with pytest.raises(TokmillError, match="another file is at") as caught:
        machine(2, keep=("id",))
    assert caught.value.where == f"{address}/plan.json"
    # A shard that differs, as of an engine that gives other ids.
    name = next(name for name in before if name.endswith(".safetensors"))
    client = remote._client(f"{address}/{name}")
    obstore.put(client[1], client[2], before[name][:-1] + b"x")
    with pytest.raises(TokmillError, match="another file is at") as caught:
        machine(1)
    assert caught.value.where == f"{address}/{name}"
    obstore.put(client[1], client[2], before[name])
    machine(2)
    proxy.fault = lambda method, path: 403 if method == "PUT" else None
    with pytest.raises(MachineError, match="write was refused"):
        machine(3)
    proxy.fault = lambda method, path: None
    machine(3)
    with pytest.raises(TokmillError, match="another store is at the address"):
        machine(2, "elsewhere", keep=("id",))
    with pytest.raises(UsageError, match="--push is for parts of a store"):
        build("jsonl", inputs, tmp_path / "o", how=How(push=address))
