"""The doctor: extras, failures that it must notice."""

import importlib.metadata

import pytest

from tokmill import doctor


def test_extras_come_from_the_metadata() -> None:
    found = doctor.extras()
    assert "numpy" not in {package for packages in found.values() for package in packages}
    assert "gigatoken" in found["text"]
    assert "dev" not in found


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "gone":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    absent = doctor._extra("text", ["gone", "there"])
    assert (absent.state, absent.found) == ("absent", "missing: gone; there 1.0")
    assert doctor._extra("text", ["there"]).state == "ok"
