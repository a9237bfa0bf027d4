"""A disk that is really full, or really read-only: a small tmpfs as the output."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash_stores import contents, is_clean, write_inputs, write_jsonl
from forked import Forked


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
