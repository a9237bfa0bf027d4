"""Faults that users of other programs reported, built here (docs/log has the list).

Each is compared with an independent reference: hashlib on the bytes of the server, the local store,
or a run that nothing interrupted.
"""

import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import tokmill
from crash_stores import write_inputs
from making import TOKENIZER
from object_servers import Fault, Proxy
from tokmill.base import remote
from tokmill.base.errors import MachineError, TokmillError
from tokmill.builds.build import build
from tokmill.builds.plan import How
from tokmill.store.publish import push
from tokmill.text.tokenizers.tokenizer import Tokenizer
from toy import cycles, make_store

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "store-v2", tmp_path / "local"))


def names(address: str) -> list[str]:
    return [one.address.removeprefix(f"{address}/") for one in remote.listed(address)]


def tokens(place: Path | str) -> str:
    digest = hashlib.sha256()
    for record in tokmill.Store(place):
        digest.update(record["token"].tobytes())
    return digest.hexdigest()


def test_no_index_without_its_shards(proxy: Proxy, address: str, local: Path) -> None:
    """mosaicml/streaming #451: the index was there, a shard that it names was not."""
    shard = sorted((local / "shards").glob("*.safetensors"))[1].name
    for fault in (403, 503):
        proxy.fault = lambda method, path, fault=fault: (  # type: ignore[misc]
            fault if method == "PUT" and shard in path else None
        )
        with pytest.raises(MachineError):
            push(local, address)
        proxy.fault = lambda method, path: None
        assert "manifest.json" not in names(address)


READ = """
import hashlib, sys, tokmill
digest = hashlib.sha256()
for _ in range(3):
    store = tokmill.Store(sys.argv[1])
    for number in list(range(len(store)))[:: int(sys.argv[2])]:
        digest.update(store[number]["token"].tobytes())
print(digest.hexdigest())
"""


def test_a_shard_that_another_process_still_reads(
    proxy: Proxy, address: str, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """litData #846, #452: whoever was fast removed a chunk that a slow worker needed."""
    push(local, address)
    sizes = sorted(one.bytes for one in tokmill.Store(local).shards)
    monkeypatch.setenv("TOKMILL_CACHE_LIMIT", str(sizes[-1]))
    proxy.fault = lambda method, path: 0.02
    for direction in ("1", "-1"):
        places = (address, address, address, str(local))
        children = [
            subprocess.Popen([sys.executable, "-c", READ, one, direction], stdout=subprocess.PIPE)
            for one in places
        ]
        assert len({child.communicate(timeout=90)[0] for child in children}) == 1
        assert not any(child.returncode for child in children)


def test_a_shard_that_another_process_removes_at_any_time(
    proxy: Proxy, address: str, local: Path, tmp_path: Path
) -> None:
    push(local, address)
    ended = threading.Event()

    def remove() -> None:
        while not ended.wait(random.expovariate(2000)):
            for path in (tmp_path / "cache").rglob("*.safetensors"):
                path.unlink(missing_ok=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        read = {tokens(address) for _ in range(20)}
    finally:
        ended.set()
        thread.join()
    assert read == {tokens(local)}


def test_the_cache_keeps_its_limit_at_the_end(
    proxy: Proxy, address: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """litData #533: the last chunk of each worker was never removed."""
    push(local, address)
    sizes = sorted(one.bytes for one in tokmill.Store(local).shards)
    monkeypatch.setenv("TOKMILL_CACHE_LIMIT", str(sizes[-1]))
    for _ in range(3):
        assert tokens(address) == tokens(local)
        there = (tmp_path / "cache").rglob("*.safetensors*")
        assert sum(path.stat().st_size for path in there) <= sizes[-1]


def test_what_a_killed_run_left_in_the_cache(proxy: Proxy, address: str, local: Path) -> None:
    """litData #398: files and locks of a run before let the next one wait for ever."""
    push(local, address)
    proxy.fault = lambda method, path: 0.3 if path.endswith(".safetensors") else None
    for seconds in (1.2, 1.6, 2.0):
        child = subprocess.Popen([sys.executable, "-c", READ, address, "1"])
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        child.wait()
    proxy.fault = lambda method, path: None
    begun = time.monotonic()
    assert tokens(address) == tokens(local)
    assert time.monotonic() - begun < 20


def test_a_file_that_shrinks_while_it_is_sent(
    proxy: Proxy, address: str, tmp_path: Path, local: Path
) -> None:
    """PyFilesystem/s3fs #95: what was written until an error became a valid, short object."""
    shard = sorted((local / "shards").glob("*.safetensors"))[0]
    data = shard.read_bytes()

    def fault(method: str, path: str) -> Fault:
        if method == "PUT" and path.endswith(".safetensors") and shard.exists():
            os.truncate(shard, len(data) // 2)
        return None

    proxy.fault = fault
    # A short object may be there; no manifest calls it a shard.
    try:
        push(local, address)
    except TokmillError:
        assert "manifest.json" not in names(address)
    else:
        assert remote.read_whole(f"{address}/shards/{shard.name}") == data
    proxy.fault = lambda method, path: None


def test_names_that_only_begin_alike(proxy: Proxy, address: str, tmp_path: Path) -> None:
    """ray-project/ray #64247: `data/*.jsonl` read `dataextra/…` too. apache/datafusion #7393: names
    with % were encoded twice."""
    here = tmp_path / "here"
    for folder, word in (("data", "fox"), ("dataextra", "dog")):
        for name in ("a b+c%2Ad.jsonl", "ü#1.jsonl", "plain.jsonl"):
            path = here / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"text": f"the quick {word} {name}"}) + "\n")
            remote.put(f"{address}/{folder}/{name}", path, "")
    tokenizer = GOLDEN / "tokenizer.json"
    wanted = build("jsonl", here / "data", tmp_path / "local", tokenizer=tokenizer)
    for number, given in enumerate((f"{address}/data", f"{address}/data/*.jsonl")):
        found = build("jsonl", given, tmp_path / f"{number}", tokenizer=tokenizer)
        assert found.records == 3 and found.fingerprint == wanted.fingerprint
    one = build("jsonl", f"{address}/data/a b+c%2Ad.jsonl", tmp_path / "one", tokenizer=tokenizer)
    assert one.records == 1 and "%2Ad" in one.text(0)


def test_an_upload_in_parts_whose_end_says_no(proxy: Proxy, address: str, tmp_path: Path) -> None:
    """piskvorky/smart_open #381: the end of an upload in parts is answered by 200, with an error in
    its body, and the object is not there."""
    large = tmp_path / "large"
    large.write_bytes(os.urandom(20 << 20))
    proxy.answer = lambda method, path: (
        b"<Error><Code>InternalError</Code><Message>no</Message></Error>"
        if method == "POST" and "uploadId" in path
        else None
    )
    with pytest.raises(MachineError):
        remote.put(address, large, "")
    proxy.answer = lambda method, path: None
    remote.put(address, large, "")
    assert remote.read_whole(address) == large.read_bytes()


def test_parts_are_not_counted_twice(proxy: Proxy, address: str, tmp_path: Path) -> None:
    """Lightning-AI/litData #865: what was there stood in the index once for each node."""
    write_inputs(tmp_path / "in", 5)
    given: Any = ("jsonl", tmp_path / "in")
    tokenizer = GOLDEN / "tokenizer.json"
    wanted = build(*given, tmp_path / "one", tokenizer=tokenizer)
    for machine in range(2):
        for part in (1, 2):
            how = How(quiet=True, part=(part, 2), push=address)
            build(*given, tmp_path / f"{machine}-{part}", tokenizer=tokenizer, how=how)
    found = tokmill.Store(address)
    names = [one.name for one in found.shards]
    assert len(names) == len({*names}) and found.records == wanted.records
    assert tokens(address) == tokens(wanted.path)


def test_feeds_that_are_dropped_close_their_stores(tmp_path: Path) -> None:
    """As in mosaicml/streaming #457: hundreds are opened, and handles end with them, without gc."""
    store = make_store(tmp_path / "s", cycles(30))
    gc.disable()
    try:
        counts = []
        for _ in range(30):
            feed = tokmill.Feed(tokmill.Windows(tokmill.Store(store), 8), 2, seed=1)
            feed.batch(0)
            del feed
            counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert counts[-1] == counts[2]


def test_tokenizers_that_are_dropped_leave_no_words() -> None:
    """As in huggingface/tokenizers #1495: its cache outlives the tokenizer that filled it."""
    process, words = psutil.Process(), [f"words {n} of {n * n:x}" for n in range(500)]
    used = []
    for _ in range(40):
        tokenizer = Tokenizer.from_file(TOKENIZER)
        for text in words:
            tokenizer.encode(text)
        used.append(process.memory_full_info().uss)
    assert used[-1] - used[9] < 2 << 20
