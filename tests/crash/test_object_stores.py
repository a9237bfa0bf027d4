"""Stores and inputs at addresses, on real servers, through a proxy that breaks what it passes."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokmill
from object_servers import Credentials, Proxy, set_up
from tokmill.base import remote
from tokmill.base.errors import MachineError, MissingExtraError, TokmillError, UsageError
from tokmill.base.files import sha256_file
from tokmill.builds.build import build
from tokmill.store.checks.validate import validate
from tokmill.store.publish import pull, push
from tokmill.store.remote_store import check_space

GOLDEN = Path(__file__).parents[1] / "golden"
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "some",
    "words",
]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "store-v2", tmp_path / "local"))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON Lines of 200 KB, compressed too."""
    folder, draw = tmp_path_factory.mktemp("lines"), random.Random(3)
    for name in "ab":
        texts = (" ".join(draw.choices(WORDS, k=draw.randint(2, 50))) for _ in range(600))
        data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        (folder / f"{name}.jsonl").write_bytes(data)
    zstandard = pytest.importorskip("zstandard")
    data = (folder / "b.jsonl").read_bytes()
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(data))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def put(address: str, path: Path) -> None:
    assert remote.put(address, path, "")


def replace(address: str, data: bytes) -> None:
    """Put another object in the place of one."""
    _, client, key = remote._client(address)
    client.put(key, data)


def same_batches(a: tokmill.Store, b: tokmill.Store) -> None:
    feeds = [tokmill.Feed(tokmill.Windows(store, 16, shards=2), 4) for store in (a, b)]
    for step in range(20):
        first, second = (feed.batch(step) for feed in feeds)
        for name, value in first.columns.items():
            assert value.tobytes() == second.columns[name].tobytes()
        assert first.document.tobytes() == second.document.tobytes()


@pytest.mark.parametrize("kind", ["plain", "ignoring"])
def test_a_store_goes_to_an_address_and_back(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    local: Path,
) -> None:
    server = request.getfixturevalue(kind)
    proxy = set_up(server[0], tmp_path, monkeypatch)
    address = f"s3://{server[1]}/stores/ü #1+%20"
    first = push(local, address)
    assert (first.sent, first.there) == (20, 0)
    puts = [path for method, path, _ in proxy.requests if method == "PUT"]
    assert puts[-1].endswith("/manifest.json") and "overlays" not in puts[-1]
    assert first.conditional == (server[1] == "bucket")
    again = push(local, address)
    assert (again.sent, again.there) == (0, 20)
    pulled = pull(address, tmp_path / "pulled")
    assert files(pulled.path) == files(local)
    pull(address, tmp_path / "pulled")
    opened = tokmill.Store(address, ["pairs"])
    assert opened.fingerprint == pulled.fingerprint and opened.place == address
    for mine, theirs in zip(tokmill.Store(local, ["pairs"]), opened, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    same_batches(tokmill.Store(local), tokmill.Store(address))
    assert validate(tokmill.Store(address)).ok
    if kind == "plain":
        # Read by anybody, without lists: all but the overlays.
        public = f"http://127.0.0.1:{proxy.port}/{address.removeprefix('s3://')}"
        public = public.replace(" #", "-")
        push(local, f"s3://bucket/{public.rpartition('bucket/')[2]}")
        who = "Credential=user/20261126/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        proxy.headers["Authorization"] = f"AWS4-HMAC-SHA256 {who}"
        same_batches(tokmill.Store(local), tokmill.Store(public))
        found = files(pull(public, tmp_path / "public").path)
        assert found.items() <= files(local).items() and len(found) == 11
    proxy.close()


def test_another_store_is_not_replaced(
    proxy: Proxy, address: str, local: Path, lines: Path, tmp_path: Path
) -> None:
    push(local, address)
    tokenizer = local / "vocab/tokenizer.json"
    other = build("jsonl", lines / "a.jsonl", tmp_path / "other", tokenizer=tokenizer).path
    before = remote.read_whole(f"{address}/manifest.json")
    with pytest.raises(TokmillError, match="another file is at"):
        push(other, address)
    assert remote.read_whole(f"{address}/manifest.json") == before
    with pytest.raises(TokmillError, match="something else"):
        pull(address, other)
    (local / "shards").joinpath("0b71db1a236691d89b9f0eb8.safetensors").write_bytes(b"damaged")
    with pytest.raises(TokmillError, match="the shard is damaged"):
        push(local, f"{address}2")
    with pytest.raises(TokmillError, match="no store at the address"):
        tokmill.Store(f"{address}2")


def test_a_shard_that_the_server_holds_in_part_is_no_shard(
    proxy: Proxy, address: str, local: Path
) -> None:
    """Its stored digest says what was sent."""
    shard = sorted((local / "shards").glob("*.safetensors"))[0]
    where = f"{address}/shards/{shard.name}"
    _, client, key = remote._client(where)
    client.put(key, shard.read_bytes()[:-8], attributes={"sha256": sha256_file(shard)})
    with pytest.raises(TokmillError, match="another file") as caught:
        push(local, address)
    assert caught.value.where == where
    assert f"{address}/manifest.json" not in {one.address for one in remote.listed(address)}


@pytest.mark.parametrize("after", [5, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 19))])
def test_an_interrupted_push_goes_on(
    proxy: Proxy, address: str, local: Path, tmp_path: Path, after: int
) -> None:
    left = [after]

    def fault(method: str, path: str) -> int | None:
        left[0] -= method == "PUT"
        return 403 if method == "PUT" and left[0] < 0 else None

    proxy.fault = fault
    with pytest.raises(MachineError, match="refused"):
        push(local, address)
    with pytest.raises(TokmillError, match="its push has not ended"):
        tokmill.Store(address)
    proxy.fault = lambda method, path: None
    done = push(local, address)
    assert done.sent + done.there == 20 and done.there >= min(after - 1, 1)
    assert files(pull(address, tmp_path / "pulled").path) == files(local)


@pytest.mark.parametrize("after", [16, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 9))])
def test_an_interrupted_pull_goes_on(
    proxy: Proxy, address: str, local: Path, tmp_path: Path, after: int
) -> None:
    push(local, address)
    left = [after]

    def fault(method: str, path: str) -> int | None:
        left[0] -= 1
        return 403 if left[0] < 0 else None

    proxy.fault = fault
    with pytest.raises(MachineError, match="refused"):
        pull(address, tmp_path / "pulled")
    try:
        assert tokmill.Store(tmp_path / "pulled").partial
    except TokmillError as error:
        assert "no store" in error.what or "no such store" in error.what
    left[0] = after
    with pytest.raises(MachineError, match="refused"):
        tokmill.Store(address, ["pairs"])[:]
    proxy.fault = lambda method, path: None
    assert files(pull(address, tmp_path / "pulled").path) == files(local)
    same_batches(tokmill.Store(local), tokmill.Store(address))


def test_a_changed_shard_is_fetched_twice_and_named(
    proxy: Proxy, address: str, local: Path, tmp_path: Path
) -> None:
    push(local, address)
    name = "91f742a4dfbd3c3f00399b4c"
    where = f"{address}/shards/{name}.safetensors"
    good = remote.read_whole(where)
    number = [entry.name for entry in tokmill.Store(local).shards].index(name)
    # A damaged copy in the cache is fetched again.
    opened = tokmill.Store(address)
    opened.shard(number)
    copy = opened.path / f"shards/{name}.safetensors"
    copy.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    same_batches(tokmill.Store(local), tokmill.Store(address))
    assert copy.read_bytes() == good
    # A damaged object is named, and no copy of it is kept.
    copy.unlink()
    replace(where, good[:-1] + bytes([good[-1] ^ 1]))
    proxy.requests.clear()
    with pytest.raises(TokmillError, match=f"{name}.*{address}.*fetched twice") as error:
        tokmill.Store(address).shard(number)
    assert error.value.where == where and not copy.exists()
    assert sum(method == "GET" and name in path for method, path, _ in proxy.requests) >= 2
    report = validate(tokmill.Store(address))
    assert {problem.where for problem in report.problems} == {where}
    with pytest.raises(TokmillError, match="fetched twice"):
        pull(address, tmp_path / "pulled")


def test_another_store_at_the_address_is_another_folder(
    proxy: Proxy, address: str, local: Path, lines: Path, tmp_path: Path
) -> None:
    """As in mosaicml/streaming #417: what is cached of the old one is not taken for the new one."""
    push(local, address)
    old = tokmill.Store(address)
    old[:]
    tokenizer = local / "vocab/tokenizer.json"
    other = build("jsonl", lines / "a.jsonl", tmp_path / "other", tokenizer=tokenizer)
    for one in remote.listed(address):
        _, client, key = remote._client(one.address)
        client.delete(key)
    push(other.path, address)
    new = tokmill.Store(address)
    assert new.fingerprint == other.fingerprint != old.fingerprint and new.path != old.path
    same_batches(other, new)


def test_errors_name_the_address(
    proxy: Proxy, address: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKMILL_PATIENCE", "2")

    def fails(kind: type[TokmillError], what: str, store: str = address) -> None:
        begun = time.monotonic()
        with pytest.raises(kind, match=what) as error:
            tokmill.Store(store)
        assert error.value.where.startswith(remote.address_of(store)) and error.value.hint
        assert time.monotonic() - begun < 5

    fails(TokmillError, "no store at the address")
    fails(TokmillError, "no store", "s3://no-such-bucket/x")
    fails(UsageError, "names no object", "s3://bucket/a//b")
    fails(UsageError, "anybody could change", "http://example.org/store")
    fails(UsageError, r"\? or #", "https://example.org/store?token=1")
    fails(UsageError, "Account must be specified", "az://container")
    for status, what in ((401, "401"), (403, "refused .403"), (500, "answered 500")):
        proxy.fault = lambda method, path, status=status: status  # type: ignore[misc]
        fails(MachineError, what)
    proxy.fault = lambda method, path: 60.0
    fails(MachineError, "failed")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    remote._new_client.cache_clear()
    fails(MachineError, "failed")
    with pytest.raises(UsageError, match="written to a disk"):
        build("text", local / "plan.json", address, tokenizer=local / "vocab/tokenizer.json")
    with pytest.raises(UsageError, match="is pushed to a name in a bucket"):
        push(local, "https://example.org/x")
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingExtraError, match="obstore") as error:
        tokmill.Store("s3://another/x")
    assert "tokmill[remote]" in error.value.hint


@pytest.mark.long
def test_a_training_on_an_address(
    proxy: Proxy, address: str, local: Path, tokmill: Callable[..., Any], tmp_path: Path
) -> None:
    """Weights are equal to the bit; a cache that is too small is said before the first step."""
    push(local, address)
    keys = ["model.layers=1", "model.dim=32", "task.length=16", "data.batch=2", "steps=6"]
    sets = [word for key in keys for word in ("--set", key)]
    small = {"TOKMILL_CACHE_LIMIT": "5KB"}
    told = tokmill("train", address, "-o", "none", *sets, env=small, code=2).stderr
    assert re.search(r"take [\d.]+ KB of the cache, and TOKMILL_CACHE_LIMIT is 5.0 KB", told)
    more = [*sets, "--set", "data.shards=1"]
    tokmill("train", address, "-o", "a", *more, env=small)
    tokmill("train", local, "-o", "b", *more)
    a, b = (tmp_path / run / "model/model.safetensors" for run in "ab")
    assert a.read_bytes() == b.read_bytes()
    assert sum(p.stat().st_size for p in (tmp_path / "cache").rglob("*.safetensors")) <= 5000


def test_a_forked_process_is_refused(proxy: Proxy, address: str, local: Path) -> None:
    """obstore would wait for ever: its threads do not live on in the child."""
    push(local, address)
    store = tokmill.Store(address)
    child = os.fork()
    if not child:
        try:
            store[0]
        except MachineError as error:
            os._exit(7 if "forked" in error.what and "spawn" in error.hint else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_cache_has_a_limit(
    proxy: Proxy, address: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(local, address)
    sizes = sorted(entry.bytes for entry in tokmill.Store(local).shards)
    limit = sizes[-1] + sizes[-2] - 1
    monkeypatch.setenv("TOKMILL_CACHE_LIMIT", str(limit))
    own = tmp_path / "cache/stores/mine/shards/0b71db1a236691d89b9f0eb8.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"x" * sizes[-1])
    store = tokmill.Store(address)
    with pytest.raises(UsageError, match="take .* of the cache, and TOKMILL_CACHE_LIMIT is"):
        check_space([(store.remote, store.shards)], 0)  # type: ignore[list-item]
    own.unlink()
    for number in range(len(store)):
        assert np.array_equal(store[number]["token"], tokmill.Store(local)[number]["token"])
        used = sum(p.stat().st_size for p in (tmp_path / "cache").rglob("*.safetensors"))
        assert used <= limit
    # What a process has mapped stays readable, also after another process needed its room.
    held = [store.shard(0)["token"].copy(), store.shard(0)["token"]]
    same_batches(tokmill.Store(local), tokmill.Store(address))
    assert np.array_equal(*held)


def test_the_shards_of_a_step(proxy: Proxy, address: str, local: Path) -> None:
    """What is fetched ahead is what the step reads, and no shard is fetched before the first."""
    push(local, address)
    for shards in (0, 1):
        store = tokmill.Store(address)
        feed = tokmill.Feed(tokmill.Windows(store, 8, shards=shards), 3, seed=shards)
        assert store.bytes_per_token() == tokmill.Store(local).bytes_per_token()
        assert not store.touched() and (shards or not list(store.path.rglob("*.safetensors")))
        for step in range(40):
            store._touched.clear()
            store._mapped.clear()
            feed.batch(step)
            assert sorted(store.touched()) == sorted(number for _, number in feed.shards_of(step))


READ_ALL = """
import hashlib, sys, tokmill
digest = hashlib.sha256()
for record in tokmill.Store(sys.argv[1]):
    digest.update(record["token"].tobytes())
print(digest.hexdigest())
"""


def test_processes_share_the_cache(proxy: Proxy, address: str, local: Path) -> None:
    push(local, address)
    proxy.fault = lambda method, path: 0.02
    proxy.requests.clear()
    children = [
        subprocess.Popen([sys.executable, "-c", READ_ALL, place], stdout=subprocess.PIPE)
        for place in (address, address, str(local))
    ]
    answers = {child.communicate(timeout=60)[0] for child in children}
    assert len(answers) == 1 and len(answers.pop()) == 65
    gets = [p for method, p, _ in proxy.requests if method == "GET" and p.endswith(".safetensors")]
    assert sorted(gets) == sorted(set(gets)) and len(gets) == 3


def test_inputs_at_addresses(proxy: Proxy, address: str, lines: Path, tmp_path: Path) -> None:
    for path in lines.iterdir():
        put(f"{address}/{path.name}", path)
    tokenizer = GOLDEN / "tokenizer.json"
    named = [lines / "a.jsonl", lines / "b.jsonl", lines / "c.jsonl.zst"]
    here = build("jsonl", named, tmp_path / "here", tokenizer=tokenizer)
    for number, inputs in enumerate(([f"{address}/[ab].jsonl", f"{address}/*.zst"], [address])):
        there = build("jsonl", inputs, tmp_path / f"there{number}", tokenizer=tokenizer)
        assert there.fingerprint == here.fingerprint
        assert files(there.path / "shards") == files(here.path / "shards")
    # Nothing is read again; an object that is another one now is.
    build("jsonl", [address], there.path, tokenizer=tokenizer)
    data = (lines / "a.jsonl").read_bytes()
    at = len(data) // 3
    replace(f"{address}/a.jsonl", data[:at] + data[at:].replace(b"quick", b"brisk", 1))
    with pytest.raises(TokmillError, match="changed"):
        build("jsonl", [address], there.path, tokenizer=tokenizer)
    for kind in ("x86", "select", "bin"):
        with pytest.raises(UsageError, match="must be on a disk"):
            build(kind, [address], tmp_path / kind)
    with pytest.raises(TokmillError, match="there is no such|is empty|holds no"):
        build("jsonl", f"{address}/none", tmp_path / "none", tokenizer=tokenizer)


def test_an_input_at_an_address_that_is_no_text(proxy: Proxy, address: str, tmp_path: Path) -> None:
    """Such as one that was sent compressed, with Content-Encoding: it comes as it was stored."""
    replace(f"{address}/latin.jsonl", b'{"text": "caf\xe9"}\n' * 9)
    with pytest.raises(TokmillError, match="no record was found") as error:
        build(
            "jsonl", f"{address}/latin.jsonl", tmp_path / "s", tokenizer=GOLDEN / "tokenizer.json"
        )
    assert "it is not UTF-8: convert it, as with `iconv -f LATIN1" in error.value.hint


def test_parquet_at_an_address(proxy: Proxy, address: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = random.Random(5)
    texts = [" ".join(draw.choices(WORDS, k=40)) for _ in range(20_000)]
    more = [draw.randbytes(200) for _ in texts]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts, "other": more}), path, row_group_size=4000)
    put(f"{address}/a.parquet", path)
    tokenizer = GOLDEN / "tokenizer.json"
    here = build("parquet", path, tmp_path / "here", tokenizer=tokenizer)
    proxy.requests.clear()
    there = build("parquet", f"{address}/a.parquet", tmp_path / "there", tokenizer=tokenizer)
    assert files(there.path / "shards") == files(here.path / "shards")
    assert sum(size for _, _, size in proxy.requests) < 0.8 * path.stat().st_size


def test_an_object_that_changes_while_it_is_read(
    proxy: Proxy, address: str, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (lines / "a.jsonl").read_bytes() * 20
    where = f"{address}/a.jsonl"
    (tmp_path / "a.jsonl").write_bytes(data)
    put(where, tmp_path / "a.jsonl")
    seen = [0]

    def fault(method: str, path: str) -> None:
        seen[0] += method == "GET" and "a.jsonl" in path
        if seen[0] == 9 and method == "GET":
            seen[0] += 1
            replace(where, data.replace(b"lazy", b"idle"))

    proxy.fault = fault
    with pytest.raises(TokmillError, match="changed") as error:
        build("jsonl", where, tmp_path / "out", tokenizer=GOLDEN / "tokenizer.json")
    assert seen[0] > 9 and where in f"{error.value}{error.value.where}"


@pytest.mark.parametrize("seconds", [0.5, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize("status", [403, 400])
def test_credentials_that_end_are_renewed(
    proxy: Proxy,
    address: str,
    local: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    status: int,
) -> None:
    """A push, and reads for three times as long as credentials last."""
    large = tmp_path / "large"
    large.write_bytes(random.Random(1).randbytes(40 << 20))
    credentials = Credentials(tmp_path, monkeypatch, seconds)
    proxy.refuses, proxy.status = credentials.refuses, status
    push(local, address)
    remote.put(f"{address}-large", large, "")
    begun = credentials.number
    proxy.fault = lambda method, path: 0.8 * seconds if "large" in path else None
    facts = remote.head(f"{address}-large")
    assert b"".join(remote.chunks(facts)) == large.read_bytes()
    proxy.fault = lambda method, path: None
    while credentials.number < begun + 4:
        assert validate(tokmill.Store(address)).ok
    assert credentials.handed > 3
    print(credentials.late, "requests were refused")


@pytest.mark.parametrize("status", [403, 400])
def test_credentials_of_the_environment_that_end(
    proxy: Proxy, address: str, local: Path, status: int
) -> None:
    """One clear error, at once, wherever they end: also at HEAD, whose answer has no body."""
    push(local, address)
    store = tokmill.Store(address)
    proxy.refuses, proxy.status = lambda authorization: "ExpiredToken", status
    begun = time.monotonic()
    for action in (
        lambda: store[0],
        lambda: tokmill.Store(address),
        lambda: push(local, address),
        lambda: remote.put(f"{address}/x", b"x", ""),
    ):
        with pytest.raises(MachineError, match="the credentials have ended") as error:
            action()
        assert error.value.where.startswith(address) and "set new ones" in error.value.hint
    assert time.monotonic() - begun < 5


KINDS: list[Callable[[random.Random], str | int | float]] = [
    lambda draw: "cut", lambda draw: "drop", lambda draw: draw.choice([429, 500, 503]),
    lambda draw: draw.uniform(0, 0.3),
]  # fmt: skip


def open_and_compare(local: Path, place: str) -> None:
    same_batches(tokmill.Store(local), tokmill.Store(place))


def build_text(place: str | Path, out: Path) -> tokmill.Store:
    return build("text", place, out, tokenizer=GOLDEN / "tokenizer.json")


def with_faults(proxy: Proxy, address: str, local: Path, folder: Path, faults: int) -> int:
    """Push, pull, open and build until so many faults were met; return the number of errors."""
    draw, met, errors = random.Random(faults), [0], 0
    lock = threading.Lock()

    def fault(method: str, path: str) -> str | int | float | None:
        with lock:
            if draw.random() > 0.2:
                return None
            met[0] += 1
            return draw.choice(KINDS)(draw)

    def until_done(action: Callable[..., object], *arguments: object) -> object:
        nonlocal errors
        for _ in range(20):
            begun = time.monotonic()
            try:
                return action(*arguments)
            except MachineError as error:
                errors += 1
                assert error.where.startswith("s3://") and error.hint
            finally:
                assert time.monotonic() - begun < 60
        raise AssertionError("it never ended")

    number = 0
    text = local / "inputs.jsonl"
    here = build_text(text, folder / "here")
    while met[0] < faults:
        number += 1
        place = f"{address}/{number}"

        proxy.fault = fault
        until_done(push, local, place)
        pulled = folder / f"pulled{number}"
        until_done(pull, place, pulled)
        assert files(pulled) == files(local)
        shutil.rmtree(folder / "cache", ignore_errors=True)
        until_done(open_and_compare, local, place)
        until_done(remote.put, f"{place}-text", text, "")
        there = folder / f"there{number}"
        until_done(build_text, f"{place}-text", there)
        assert tokmill.Store(there).tokens == here.tokens
        proxy.fault = lambda method, path: None
        assert files(pull(place, folder / "once more").path) == files(local)
        for gone in (pulled, there, folder / "once more"):
            shutil.rmtree(gone)
    return errors


def test_faults(proxy: Proxy, address: str, local: Path, tmp_path: Path) -> None:
    with_faults(proxy, address, local, tmp_path, 15)


@pytest.mark.long
def test_a_thousand_faults(proxy: Proxy, address: str, local: Path, tmp_path: Path) -> None:
    print(with_faults(proxy, address, local, tmp_path, 1000), "errors that were told")
