"""The doctor: versions, failures that it must notice."""

from __future__ import annotations

import importlib.metadata

import pytest

from tokmill import doctor


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
