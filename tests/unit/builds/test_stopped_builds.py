"""Builds that are stopped by a signal: what is kept, and that they go on to the same bytes."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from making import files_of, here, ids_of, mixed_lines, quick_build
from tokmill import plugins
from tokmill.base import stop
from tokmill.base.errors import Interrupted, TokmillError
from tokmill.builds import plan
from tokmill.builds.plan import How
from tokmill.builds.remake import deep_check
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store


@pytest.fixture(autouse=True)
def one_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight small files lie in one shard."""
    monkeypatch.setattr(plan, "SHARD_BYTES", 1 << 40)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_lines(tmp_path_factory.mktemp("inputs") / "in")


def signalled(
    monkeypatch: pytest.MonkeyPatch, item: str, number: signal.Signals, times: int = 1
) -> list[str]:
    """Send this process a signal in the first batch of an item; return the items as they begin."""
    loaded = plugins.load(plugins.SOURCES, "jsonl")
    read, begun = loaded.read, []

    def noted(self: Any, one: Any, digest: Any) -> Iterator[Any]:
        begun.append(one.name)
        for batch in read(self, one, digest):
            for _ in range(times if one.name == item else 0):
                os.kill(os.getpid(), number)
            yield batch

    monkeypatch.setattr(loaded, "read", noted)
    return begun


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_signal_keeps_the_whole_files_of_a_shard(
    tmp_path: Path,
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    place: int,
) -> None:
    """Eight small files in one shard, with rejects and skipped lines in each."""
    whole = quick_build("jsonl", inputs, tmp_path / "whole", keep=["id"])
    assert len(whole.shards) == 1
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        begun = signalled(patch, f"{place}.jsonl", number)
        with pytest.raises(Interrupted) as caught:
            quick_build("jsonl", inputs, tmp_path / "s", keep=["id"])
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    assert begun == [f"{i}.jsonl" for i in range(place + 1)]
    partial = Store(tmp_path / "s")
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert caught.value.what.startswith(f"stopped by {name} at ")
    assert f"kept: {len(partial):,} records" in caught.value.what
    assert partial.partial and 30 * place < len(partial) <= 8 * 30 and validate(partial).ok
    with monkeypatch.context() as patch:
        begun = signalled(patch, "", number)
        again = quick_build("jsonl", inputs, tmp_path / "s", keep=["id"])
    assert begun == [f"{i}.jsonl" for i in range(place, 8)]
    assert files_of(again.path) == files_of(whole.path)


def test_what_is_kept_of_a_shard_is_not_trusted_blindly(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped byte in it: the shard is made from its beginning. A touched file is compared."""
    folder = shutil.copytree(inputs, tmp_path / "in")
    whole = quick_build("jsonl", folder, tmp_path / "whole", keep=["id"])
    for damaged in (False, True):
        out = tmp_path / f"s{damaged}"
        with monkeypatch.context() as patch:
            signalled(patch, "5.jsonl", signal.SIGINT)
            with pytest.raises(Interrupted):
                quick_build("jsonl", folder, out, keep=["id"])
        (shard,) = (out / "shards").glob("*.safetensors")
        assert deep_check(Store(out), 1) == []
        if damaged:
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
        for name in ("2.jsonl", "5.jsonl"):
            os.utime(folder / name)
        with monkeypatch.context() as patch:
            begun = signalled(patch, "", signal.SIGINT)
            quick_build("jsonl", folder, out, keep=["id"])
        assert begun == [f"{i}.jsonl" for i in range(0 if damaged else 5, 8)]
        assert files_of(out) == files_of(whole.path)


def test_a_changed_file_of_a_cut_shard_is_told(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(inputs, tmp_path / "in")
    with monkeypatch.context() as patch:
        signalled(patch, "5.jsonl", signal.SIGINT)
        with pytest.raises(Interrupted):
            quick_build("jsonl", folder, tmp_path / "s")
    data = (folder / "2.jsonl").read_bytes()
    (folder / "2.jsonl").write_bytes(data.replace(b"file 2", b"fill 2"))
    with pytest.raises(TokmillError, match=r"inputs have changed:\n  changed: 2\.jsonl"):
        quick_build("jsonl", folder, tmp_path / "s")
    quick_build("jsonl", folder, tmp_path / "s", how=How(quiet=True, yes=True, amount=here()))
    quick_build("jsonl", folder, tmp_path / "whole")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")


def test_a_second_signal_ends_at_once(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But two within half a second are one, as `timeout` sends them."""
    whole = quick_build("jsonl", inputs, tmp_path / "whole", keep=["id"])
    for seconds, kept in ((60.0, True), (-1.0, False)):
        monkeypatch.setattr(stop, "AT_ONCE", seconds)
        out = tmp_path / f"s{kept}"
        with monkeypatch.context() as patch:
            signalled(patch, "0.jsonl", signal.SIGINT, times=2)
            with pytest.raises(Interrupted) as caught:
                quick_build("jsonl", inputs, out, keep=["id"])
        assert ("kept: 3" in caught.value.what) == kept
        assert bool(len(Store(out))) == kept
        quick_build("jsonl", inputs, out, keep=["id"])
        assert files_of(out) == files_of(whole.path)


def test_a_signal_while_a_store_grows_leaves_what_it_was(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mixed_lines(tmp_path / "in", 4)
    before = quick_build("jsonl", folder, tmp_path / "s")
    for number in range(4, 8):
        shutil.copy(inputs / f"{number}.jsonl", folder)
    with monkeypatch.context() as patch:
        signalled(patch, "6.jsonl", signal.SIGTERM)
        with pytest.raises(Interrupted):
            quick_build("jsonl", folder, tmp_path / "s")
    now = Store(tmp_path / "s")
    assert not now.partial and now.fingerprint == before.fingerprint
    assert ids_of(now) == ids_of(before)
    quick_build("jsonl", folder, tmp_path / "s")
    quick_build("jsonl", folder, tmp_path / "whole")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")
