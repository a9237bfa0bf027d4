"""A network that falls silent: no packet comes, and no end of the connection."""

import random
import time
from pathlib import Path

import pytest

from object_servers import Proxy
from tokmill.base import remote
from tokmill.base.errors import MachineError


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 1 << 30])
@pytest.mark.parametrize("size", [3 << 20, 20 << 20])
def test_a_cable_that_is_cut_without_a_word(
    proxy: Proxy,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    size: int,
) -> None:
    """No packet comes back any more, in the middle of a read and of a push: once, or for good."""
    monkeypatch.delenv("TOKMILL_PATIENCE")
    data = random.Random(size).randbytes(size)
    path = tmp_path / "data"
    path.write_bytes(data)
    remote.put(f"{address}/there", path, "")
    facts, left = remote.head(f"{address}/there"), [0]

    def fault(method: str, path: str) -> str | None:
        left[0] -= 1
        return None if left[0] < 0 else "stall" if method == "GET" else "swallow"

    proxy.fault = fault
    for action in (
        lambda: b"".join(remote.chunks(facts)),
        lambda: remote.put(f"{address}/new", path, ""),
    ):
        begun, left[0] = time.monotonic(), times
        if times == 1:
            action()
        else:
            with pytest.raises(MachineError, match="failed") as error:
                action()
            assert error.value.where.startswith(address) and error.value.hint
        assert time.monotonic() - begun < 65 + size / 1e6
    proxy.fault = lambda method, path: None
    assert remote.read_whole(f"{address}/there") == data
    assert times > 1 or remote.read_whole(f"{address}/new") == data
