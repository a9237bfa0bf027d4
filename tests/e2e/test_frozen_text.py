"""The frozen text: what is taken from an archive, and that pip fetches it without running it."""

import hashlib
import importlib.util
import io
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NAME = "frozen_example-1.0.tar.gz"
PROSE = "the documentation of a project says what it does and why it does so, in many words\n"
PAGE = PROSE * 10


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("frozen", repository / "scripts/frozen_text.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as members:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            members.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An index of one source distribution; its setup code would leave a file behind."""
    project = tmp_path / "simple/frozen-example"
    project.mkdir(parents=True)
    ran = tmp_path / "ran"
    setup = f"open({str(ran)!r}, 'w'); from setuptools import setup; setup(name='frozen_example')"
    files = {
        "frozen_example-1.0/setup.py": setup.encode(),
        "frozen_example-1.0/docs/page.rst": PAGE.encode(),
    }
    data = archive(project / NAME, files).read_bytes()
    (project / "index.html").write_text(f'<!DOCTYPE html><a href="{NAME}">{NAME}</a>')
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    yield hashlib.sha256(data).hexdigest()
    assert not ran.exists()


def test_pip_fetches_and_runs_nothing(script: ModuleType, index: str, tmp_path: Path) -> None:
    folder = tmp_path / "archives"
    script.fetch(folder, {NAME: index})
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert list(script.pages(folder / NAME)) == [PAGE]
    # What is there is not fetched again.
    (tmp_path / "simple/frozen-example" / NAME).unlink()
    script.fetch(folder, {NAME: index})


def test_an_archive_that_is_not_the_pinned_one_is_refused(
    script: ModuleType, index: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=f"{index}, not {'0' * 64}\nhint: remove"):
        script.fetch(tmp_path / "archives", {NAME: "0" * 64})


def test_an_archive_that_cannot_be_had_says_what_to_do(
    script: ModuleType, index: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="(?s)could not be downloaded.*hint: put the file"):
        script.fetch(tmp_path / "archives", {"frozen_example-2.0.tar.gz": index})
