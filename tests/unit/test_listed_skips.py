"""A skip that is not listed fails the session, one that is listed does not."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
import pytest

@pytest.mark.skipif(True, reason={reason!r})
def test_skipped():
    pass

def test_skipped_within():
    pytest.skip({reason!r})

def test_run():
    pass
"""


@pytest.mark.parametrize(
    ("reason", "code", "processes"),
    [("there is no CUDA device", 0, "2"), ("needs clang", 1, "2"), ("root may", 1, "0")],
)
def test_exit_status(
    reason: str, code: int, processes: str, tmp_path: Path, repository: Path
) -> None:
    (tmp_path / "test_here.py").write_text(SOURCE.format(reason=reason))
    (tmp_path / "conftest.py").write_text((repository / "tests" / "conftest.py").read_text())
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-n", processes, "-p", "no:cacheprovider",
            "--only-listed-skips", "-o", f"pythonpath={repository / 'tests'}",
            "--rootdir", str(tmp_path), str(tmp_path),
        ],
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert ("listed_skips.py does not list" in done.stdout) == bool(code)
    assert "1 passed, 2 skipped" in done.stdout
