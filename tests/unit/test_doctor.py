"""The doctor: versions, failures that it must notice."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from tokmill import doctor
from tokmill.base.errors import TokmillError


@pytest.mark.parametrize(
    ("version", "wanted", "good"),
    [
        ("0.10.0", ">=0.10", True),
        ("0.9.9", ">=0.10", False),
        ("2.13.0+cpu", "==2.13.0", True),
        ("3.1.6", ">=3.1,<3", False),
        ("5", "", True),
        ("1.0", "!=1", False),
    ],
)
def test_versions(version: str, wanted: str, good: bool) -> None:
    assert doctor.satisfies(version, wanted) is good


def test_extras_come_from_the_metadata() -> None:
    found = doctor.extras()
    assert "numpy" not in {package for packages in found.values() for package in packages}
    assert found["text"]["gigatoken"].startswith(">=")
    assert "dev" not in found


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "gone":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert doctor._extra("text", {"gone": "", "there": ""}).state == "absent"
    assert doctor._extra("text", {"there": ">=2"}).state == "failed"
    assert doctor._extra("text", {"there": ">=1"}).state == "ok"


def test_a_wrong_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWER", [1])
    check = doctor._tried("encoder", doctor.KNOWN_ANSWERS["encoder: tokenizers"])
    assert check.state == "failed"
    assert check.hint.startswith("another version of tokenizers")


def test_locks_that_hold_nothing_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    monkeypatch.setattr(doctor, "locked", lambda *_: contextlib.nullcontext())
    with pytest.raises(TokmillError, match="two processes"):
        doctor._lock(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    states = {check.name: check.state for check in doctor.examine(tmp_path)}
    assert states["rename and fsync"] == "failed"


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    check = doctor._tried("rename", lambda: doctor._rename(tmp_path / "x"))
    assert check.state == "failed"
    assert "nothing can be written" in check.found
