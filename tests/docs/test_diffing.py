"""The commands of docs/diffing.md print what the page shows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from test_readme import masked, steps

from diff_sources import NEW, OLD
from x86_programs import compiles


def check(page: Path, folder: Path, count: int) -> None:
    """Run the commands of a page in a folder, and compare what they print."""
    found = steps(page.read_text("utf-8"))
    assert len(found) == count
    for step in found:
        command = [sys.executable, "-m", *step.command.split()]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "COLUMNS": "100"}, capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        printed = {masked(line) for line in done.stdout.splitlines()}
        missing = [line for line in step.shown if line != "…" and masked(line) not in printed]
        assert not missing, f"{missing}\n{done.stdout}"


def test_commands_print_what_the_page_shows(repository: Path, tmp_path: Path) -> None:
    programs = {
        "old": compiles(tmp_path, "old-program", OLD, "-O1"),
        "new": compiles(tmp_path, "new-program", NEW, "-O1"),
    }
    for folder, program in programs.items():
        (tmp_path / folder).mkdir()
        shutil.copy(program, tmp_path / folder / "tool")
    check(repository / "docs" / "diffing.md", tmp_path, 1)
