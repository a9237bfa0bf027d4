"""The command in this process, where a child process would show nothing more."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokmill.cli import main


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[str, str]]]:
    """The command in this process, in `tmp_path`: here("store", "--help") → (stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        found = capsys.readouterr()
        assert ended.value.code == code, found
        return found.out, found.err

    yield run
    signal.signal(signal.SIGTERM, before)
