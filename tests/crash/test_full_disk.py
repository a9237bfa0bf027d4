"""A disk that is really full, or really read-only: a small tmpfs as the output."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_strange_disks import run as run_command

from crash_stores import contents, is_clean, write_inputs, write_jsonl
from forked import Forked
from making import quick_build
from object_servers import Proxy
from tokmill.store.publish import push


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with some options, or skips where that is not allowed."""
    if shutil.which("mount") is None:
        pytest.skip("needs the command mount")
    point = tmp_path / "disk"

    def run(options: str) -> Path:
        point.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", point],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        return point

    try:
        yield run
    finally:
        if point.is_mount():
            subprocess.run(["umount", "--lazy", point], check=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_names_the_file_and_the_build_continues_with_space(
    workers: int,
    mount: Callable[[str], Path],
    tmp_path: Path,
    tokenizer: Path,
    forked: Forked,
) -> None:
    inputs = tmp_path / "in"
    write_inputs(inputs, 3)
    write_jsonl(inputs / "n-large.jsonl", 1 << 20)
    disk = mount("size=400k")
    command = ("build", "jsonl", inputs, "--tokenizer", tokenizer, "--quiet")
    ran = forked(*command, "--workers", workers, "-o", disk / "store")
    assert ran.code == 5, ran.err
    assert is_clean(ran.err) and "No space left" in ran.err
    assert f"{disk}/store/" in ran.err
    assert "free some space" in ran.err
    assert not list((disk / "store").rglob(".tmp-*"))
    subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
    again = forked(*command, "--workers", 0, "-o", disk / "store")
    assert again.code == 0, again.err
    assert forked(*command, "--workers", 0, "-o", tmp_path / "wanted").code == 0
    assert contents(disk / "store") == contents(tmp_path / "wanted")
    assert forked("store", "validate", disk / "store").code == 0


def test_a_read_only_disk(
    mount: Callable[[str], Path], tmp_path: Path, tokenizer: Path, forked: Forked
) -> None:
    """No new store can be made, and a finished one there can be read."""
    inputs = tmp_path / "in"
    write_inputs(inputs, 2)
    disk = mount("size=8m")
    command = ("build", "jsonl", inputs, "--tokenizer", tokenizer, "--workers", 0, "-q", "-o")
    assert forked(*command, disk / "store").code == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for store in (disk / "new", disk / "store"):
        ran = forked(*command, store)
        assert ran.code == 5 and is_clean(ran.err), ran.err
        assert "ead-only" in ran.err and str(store) in ran.err
    assert forked("store", "validate", disk / "store").code == 0


SMALL = ("model.dim=16", "model.layers=1", "task.length=16", "data.batch=2")


def sets(*more: str) -> list[str]:
    return [word for key in (*SMALL, *more) for word in ("--set", key)]


@pytest.mark.long
def test_other_writers_on_a_read_only_disk(
    mount: Callable[[str], Path], tmp_path: Path, proxy: Proxy, address: str
) -> None:
    """A training, an export, a pull and the cache say it; a run that lies there can be used."""
    write_inputs(tmp_path / "in", 2)
    store = quick_build("jsonl", tmp_path / "in", tmp_path / "store").path
    push(store, address)
    disk = mount("size=8m")
    train = ("train", store, "--steps", 2, "--device", "cpu", "-q", *sets(), "-o")
    assert run_command(*train, disk / "run").returncode == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    commands: list[tuple[object, ...]] = [
        (*train, disk / "new"),
        ("train", "-o", disk / "run", "--steps", 4, "-q"),
        ("store", "export", "npz", store, "-o", disk / "windows", "--max-length", 16),
        ("store", "pull", address, "-o", disk / "pulled"),
    ]
    for command in commands:
        ran = run_command(*command)
        assert ran.returncode == 5 and is_clean(ran.stderr), ran.stderr
        assert "ead-only" in ran.stderr and str(disk) in ran.stderr
    ran = run_command("inspect", address, TOKMILL_CACHE=str(disk / "cache"))
    assert ran.returncode == 5 and is_clean(ran.stderr) and "ead-only" in ran.stderr, ran.stderr
    assert str(disk / "cache") in ran.stderr
    assert run_command("eval", disk / "run", store, "-q").returncode == 0


def test_a_full_disk_under_the_cache_and_under_a_pull(
    mount: Callable[[str], Path], tmp_path: Path, proxy: Proxy, address: str
) -> None:
    """They are refused with the sizes or name the file, and go on with more room."""
    write_jsonl(tmp_path / "in/a.jsonl", 2_000_000)
    store = quick_build("jsonl", tmp_path / "in", tmp_path / "store").path
    push(store, address)
    disk = mount("size=400k")
    again = []
    for command, cache in (
        (("store", "pull", address, "-o", disk / "pulled"), tmp_path / "cache"),
        (("train", address, "--steps", 2, "-q", *sets(), "-o", tmp_path / "run"), disk / "cache"),
        (("store", "export", "npz", address, "-o", tmp_path / "n"), disk / "cache"),
    ):
        again.append((command, cache))
        ran = run_command(*command, TOKMILL_CACHE=str(cache))
        assert ran.returncode in (2, 5) and is_clean(ran.stderr), ran.stderr
        assert "No space left" in ran.stderr or "free" in ran.stderr
        assert str(disk) in ran.stderr
    subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
    for command, cache in again:
        ran = run_command(*command, TOKMILL_CACHE=str(cache))
        assert ran.returncode == 0, ran.stderr
    assert contents(disk / "pulled") == contents(store)
