"""What every executor promises: the bytes of one process, and the errors of the input."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ray_clusters
from crash_stores import contents, is_clean, write_inputs, write_tokenizer
from making import quick_build
from tokmill import plugins

CASES = {
    "here": ["--workers", "0"],
    "pool": ["--workers", "2"],
    "ray": ["--executor", "ray", "--workers", "1"],
}
"""Executor → its options; that of examples/plugin-ray too. Without an address Ray starts on this
machine, with one worker sooner than with two; tests/crash/test_ray_cluster.py has several."""


def test_every_executor_has_a_case() -> None:
    assert CASES.keys() >= {*plugins.EXECUTORS}


@pytest.fixture(scope="module", params=CASES)
def executor(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    with contextlib.ExitStack() as held:
        if name == "ray":
            pytest.importorskip("ray", reason="needs the package ray")
            held.enter_context(ray_clusters.environment())
        yield name


def build(executor: str, inputs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    tokenizer = inputs.parent / "tokenizer.json"
    if not tokenizer.exists():
        write_tokenizer(tokenizer)
    words = ["build", "jsonl", inputs, "--tokenizer", tokenizer, "-o", out]
    words += ["--max-rejects", "0", *CASES[executor]]
    command = [sys.executable, "-m", "tokmill", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_same_bytes_and_the_errors_of_the_input(executor: str, tmp_path: Path) -> None:
    files = write_inputs(tmp_path / "in", 3)
    ran = build(executor, tmp_path / "in", tmp_path / "s")
    assert ran.returncode == 0, ran.stderr
    quick_build("jsonl", tmp_path / "in", tmp_path / "here", tokenizer=tmp_path / "tokenizer.json")
    assert contents(tmp_path / "s") == contents(tmp_path / "here")
    if executor == "ray":
        assert ran.stderr.startswith("Ray: 1 node with 1 core\n")
        return  # It takes seconds to start; what it does with errors is seen on a cluster.
    files[0].write_text("no JSON\n" * 2000)
    ran = build(executor, tmp_path / "in", tmp_path / "refused")
    assert ran.returncode == 1 and is_clean(ran.stderr) and "were rejected" in ran.stderr
