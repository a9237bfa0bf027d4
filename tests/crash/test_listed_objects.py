"""Which objects below an address are inputs."""

from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path
from urllib.parse import quote

from object_servers import Proxy
from tokmill.base import remote
from tokmill.builds.build import build

GOLDEN = Path(__file__).parents[1] / "golden"


def replace(address: str, data: bytes) -> None:
    _, client, key = remote._client(address)
    client.put(key, data)


def test_folders_that_a_console_makes_are_no_inputs(
    proxy: Proxy, address: str, tmp_path: Path
) -> None:
    """They are empty objects whose keys end with a slash; an empty object without one is a file."""
    texts = {"a.txt": b"one", "sub/b.txt": b"two", "empty": b""}
    for name, data in texts.items():
        replace(f"{address}/{name}", data)
    before = sorted(one.address for one in remote.listed(address))
    bucket, _, key = address.removeprefix("s3://").partition("/")
    for name in ("", "sub/", "none/"):
        place = f"http://127.0.0.1:{proxy.port}/{bucket}/{quote(key)}/{name}"
        new = urllib.request.Request(place, b"", {"Content-Type": "text/plain"}, method="PUT")
        urllib.request.urlopen(new, timeout=20).close()
    assert sorted(one.address for one in remote.listed(address)) == before
    store = build("text", [address], tmp_path / "s", tokenizer=GOLDEN / "tokenizer.json")
    assert (len(store), store.manifest.left_out) == (2, {"empty file": 1})
    replace(f"{address}/.c.txt", b"three")
    for pattern, count in (("*.txt", 1), (".*.txt", 1), ("*/*.txt", 1)):
        inputs = [f"{address}/{pattern}"]
        out = tmp_path / hashlib.sha256(pattern.encode()).hexdigest()
        assert len(build("text", inputs, out, tokenizer=GOLDEN / "tokenizer.json")) == count
