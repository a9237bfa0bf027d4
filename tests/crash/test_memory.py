"""Memory of a build: it does not grow with a file, and an endless line is not held."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc/PID/status"
)

MIB = 1 << 20


def peak_anonymous(command: list[object]) -> tuple[int, str]:
    """Run a command; return its peak anonymous resident bytes (sampled), and its stdout.

    Files that are mapped do not count: the system takes those pages back when it needs them.
    """
    peak = 0
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            for line in status.read_text().splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) << 10)
            time.sleep(0.005)
        assert process.stdout
        out = process.stdout.read()
    assert process.returncode == 0
    return peak, out


def build(inputs: Path, store: Path, tokenizer: Path) -> list[object]:
    return [
        sys.executable, "-m", "tokmill", "build", "jsonl", inputs, "-o", store, "--json",
        "--tokenizer", tokenizer, "--workers", 0, "--quiet", "--preset", "memory",
    ]  # fmt: skip


def write(path: Path, size: int) -> Path:
    line = json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 20}) + "\n"
    with path.open("w") as handle:
        for _ in range(size // len(line)):
            handle.write(line)
    return path


@pytest.mark.long
def test_memory_does_not_grow_with_the_file(fast_path: Path, tokenizer: Path) -> None:
    """512 MiB of input need no more than 64 MiB do and a little; both stay below 400 MiB."""
    peaks = []
    for size in (64 * MIB, 512 * MIB):
        path = write(fast_path / f"{size}.jsonl", size)
        peak, _ = peak_anonymous(build(path, fast_path / f"store-{size}", tokenizer))
        peaks.append(peak)
    print(f"peak anonymous memory: {[peak >> 20 for peak in peaks]} MiB")
    assert peaks[1] < peaks[0] + 100 * MIB
    assert max(peaks) < 400 * MIB


@pytest.mark.long
def test_a_line_of_200_mb_is_rejected_without_being_held(fast_path: Path, tokenizer: Path) -> None:
    """It is counted as too long; the records around it are built."""
    path = fast_path / "long.jsonl"
    with path.open("w") as handle:
        handle.write('{"text": "before"}\n{"text": "')
        for _ in range(200):
            handle.write("abcdefgh " * (1_000_000 // 9))
        handle.write('"}\n{"text": "after"}\n')
    peak, out = peak_anonymous(build(path, fast_path / "store", tokenizer))
    print(f"peak anonymous memory: {peak >> 20} MiB")
    report = json.loads(out)
    assert report["records"] == 2
    assert report["rejected"] == {"too long": 1}
    assert peak < 320 * MIB


def random_words(path: Path, size: int) -> Path:
    """JSON Lines of words that hardly ever come again."""
    draw = np.random.default_rng(0)
    with path.open("wb") as handle:
        while handle.tell() < size:
            letters = draw.integers(97, 123, MIB, dtype=np.uint8)
            letters[np.cumsum(draw.integers(4, 12, MIB // 12))] = 32
            text = letters.tobytes()
            for start in range(0, MIB, 1024):
                handle.write(b'{"text": "%b"}\n' % text[start : start + 1024])
    return path


@pytest.mark.long
def test_words_that_never_come_again_are_not_kept(fast_path: Path, tokenizer: Path) -> None:
    """An encoder that keeps each word that it met took 900 MiB of such a file."""
    path = random_words(fast_path / "words.jsonl", 100 * MIB)
    peak, out = peak_anonymous(build(path, fast_path / "store", tokenizer))
    print(f"peak anonymous memory: {peak >> 20} MiB")
    assert json.loads(out)["records"] > 100_000
    assert peak < 300 * MIB


BLANK = b"\n" * 50_000_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("blank.jsonl", BLANK),
        ("blank.jsonl.gz", gzip.compress(BLANK)),
        ("rejected.jsonl", b"x\n" * 2_000_000),
        ("both.jsonl", b'{"text": "a"}\nx\n' * 1_000_000),
        ("empty.jsonl", b"{}\n" * 3_000_000),
    ],
)
def test_what_is_left_out_takes_no_memory(
    fast_path: Path, tokenizer: Path, name: str, content: bytes
) -> None:
    """4 MB of newlines took 1.2 GB and a receipt of 202 MB, 100 KB of .gz took 4.2 GB."""
    path = fast_path / name
    path.write_bytes(content)
    with (gzip.open if name.endswith(".gz") else open)(path, "ab") as handle:
        handle.write(b'{"text": "the end"}\n')
    command = [*build(path, fast_path / "store", tokenizer), "--max-rejects", 1]
    peak, out = peak_anonymous(command)
    print(f"{name}: peak anonymous memory: {peak >> 20} MiB")
    assert json.loads(out)["records"] >= 1
    assert peak < 300 * MIB
    receipts = (fast_path / "store/shards").glob("*.json")
    assert sum(receipt.stat().st_size for receipt in receipts) < 1 << 20
