"""The commands of docs/schedules.md work one after the other."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path


def test_the_commands_of_the_page_work(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "schedules.md").read_text("utf-8")
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    commands = block.replace("--budget 32", "--budget 4").splitlines()
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "matmul" in done.stdout or "000.mlir" in done.stdout
