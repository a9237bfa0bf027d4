"""Which objects below an address are inputs."""

from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest

from object_servers import Proxy
from tokmill.base import remote
from tokmill.base.errors import MachineError
from tokmill.builds.build import build

GOLDEN = Path(__file__).parents[1] / "golden"


def replace(address: str, data: bytes) -> None:
    _, client, key = remote._client(address)
    client.put(key, data)


def make_folder(proxy: Proxy, address: str) -> None:
    """Put an empty object whose key ends with a slash, as a console does."""
    bucket, _, key = address.removeprefix("s3://").partition("/")
    place = f"http://127.0.0.1:{proxy.port}/{bucket}/{quote(key)}/"
    new = urllib.request.Request(place, b"", {"Content-Type": "text/plain"}, method="PUT")
    urllib.request.urlopen(new, timeout=20).close()


def test_folders_that_a_console_makes_are_no_inputs(
    proxy: Proxy, address: str, tmp_path: Path
) -> None:
    """They are empty objects whose keys end with a slash; an empty object without one is a file."""
    texts = {"a.txt": b"one", "sub/b.txt": b"two", "empty": b""}
    for name, data in texts.items():
        replace(f"{address}/{name}", data)
    before = sorted(one.address for one in remote.listed(address))
    for folder in ("", "/sub", "/none"):
        make_folder(proxy, f"{address}{folder}")
    listed = sorted(one.address for one in remote.listed(address))
    # One that is listed as "none" is found to be no object where it would be read.
    assert listed == sorted([*before, f"{address}/none"])
    store = build("text", [address], tmp_path / "s", tokenizer=GOLDEN / "tokenizer.json")
    assert (len(store), store.manifest.left_out) == (2, {"empty file": 1})
    replace(f"{address}/.c.txt", b"three")
    for pattern, count in (("*.txt", 1), (".*.txt", 1), ("*/*.txt", 1), ("*", 1)):
        inputs = [f"{address}/{pattern}"]
        out = tmp_path / hashlib.sha256(pattern.encode()).hexdigest()
        assert len(build("text", inputs, out, tokenizer=GOLDEN / "tokenizer.json")) == count


def test_a_list_asks_for_no_object(proxy: Proxy, address: str, tmp_path: Path) -> None:
    """Nor does a pattern ask for those that it does not name: they may be many, or not readable."""
    for name in ("a.txt", "b.txt", "data/x.txt"):
        replace(f"{address}/{name}", b"text")
    for number in range(20):
        replace(f"{address}/empty{number}.log", b"")
    make_folder(proxy, f"{address}/data")
    proxy.requests.clear()
    assert len(remote.listed(address)) == 23
    assert [method for method, _, _ in proxy.requests] == ["GET"]
    proxy.fault = lambda method, path: 403 if ".log" in path and "list-type" not in path else None
    assert len(remote.listed(address)) == 23
    tokenizer = GOLDEN / "tokenizer.json"
    assert len(build("text", [f"{address}/*.txt"], tmp_path / "s", tokenizer=tokenizer)) == 2
    with pytest.raises(MachineError, match="refused"):
        build("text", [f"{address}/*.log"], tmp_path / "t", tokenizer=tokenizer)
