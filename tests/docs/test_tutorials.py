"""The tutorials are true: their commands run in an empty folder beside a clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import PYTHON, check_commands

NEEDS = {
    "compare-two-programs": ("gcc", "strip"),
    "find-a-function": ("gcc", "strip", "gzip"),
    "points-of-an-execution": ("gcc", "valgrind"),
}
SHORTER = {
    "tune-a-model": [
        ("rl tune small.onnx -o small", "rl tune 'matmul 8 8 8' -o small --max-time 60s"),
        ("--input=1x3x64x64xf32=0.5", "--help"),
    ],
    "points-of-an-execution": [
        ("$ tokmill plot tsne profiles/words.bb.gz -o phases.png\nphases.png", "")
    ],
}
"""What is replaced in a page, so that its commands take seconds; the long test types them all."""
PAGES = sorted(path.stem for path in (Path(__file__).parents[2] / "docs/tutorials").glob("*.md"))


def check_page(name: str, repository: Path, base: Path, replaced: list[tuple[str, str]]) -> None:
    for program in NEEDS.get(name, ()):
        if not shutil.which(program):
            pytest.skip(f"needs {program}")
    (base / "tokmill").symlink_to(repository)
    folder = base / "here"
    folder.mkdir()
    text = (repository / f"docs/tutorials/{name}.md").read_text("utf-8")
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    check_commands(text, folder)
    for code in PYTHON.findall(text):
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=60)


@pytest.mark.parametrize("name", PAGES)
def test_commands_run(name: str, repository: Path, tmp_path: Path) -> None:
    check_page(name, repository, tmp_path, SHORTER.get(name, []))


@pytest.mark.long
@pytest.mark.parametrize("name", SHORTER)
def test_all_commands_run(name: str, repository: Path, tmp_path: Path) -> None:
    check_page(name, repository, tmp_path, [])
