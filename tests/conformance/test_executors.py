"""Builds with and without workers: the same bytes, and the errors of the input."""

import subprocess
import sys
from pathlib import Path

import pytest

from crash_stores import contents, is_clean, write_inputs, write_tokenizer
from making import quick_build

CASES = {"here": ["--workers", "0"], "pool": ["--workers", "2"]}


def build(executor: str, inputs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    tokenizer = inputs.parent / "tokenizer.json"
    if not tokenizer.exists():
        write_tokenizer(tokenizer)
    words = ["build", "jsonl", inputs, "--tokenizer", tokenizer, "-o", out]
    words += ["--max-rejects", "0", *CASES[executor]]
    command = [sys.executable, "-m", "tokmill", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("executor", CASES)
def test_same_bytes_and_the_errors_of_the_input(executor: str, tmp_path: Path) -> None:
    files = write_inputs(tmp_path / "in", 3)
    ran = build(executor, tmp_path / "in", tmp_path / "s")
    assert ran.returncode == 0, ran.stderr
    quick_build("jsonl", tmp_path / "in", tmp_path / "here", tokenizer=tmp_path / "tokenizer.json")
    assert contents(tmp_path / "s") == contents(tmp_path / "here")
    files[0].write_text("no JSON\n" * 2000)
    ran = build(executor, tmp_path / "in", tmp_path / "refused")
    assert ran.returncode == 1 and is_clean(ran.stderr) and "were rejected" in ran.stderr
