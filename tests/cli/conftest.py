"""The command in this process, where a child process would show nothing more."""

import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

    def run(*arguments: object, code: int | None = 0) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        found = capsys.readouterr()
        assert code in (None, ended.value.code), found
        return found.out, found.err

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def tokmill(here: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The fixture of this name for all tests, in this process: tokmill("--help").stdout."""

    def run(*arguments: object, code: int | None = 0, input: str = "") -> Any:  # noqa: A002
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input.encode())))
        stdout, stderr = here(*arguments, code=code)
        return SimpleNamespace(stdout=stdout, stderr=stderr)

    return run
