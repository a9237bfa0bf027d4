"""The frozen text: what is taken from an archive, and that pip fetches it without running it."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import random
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


def test_only_pages_of_prose_are_taken(script: ModuleType, tmp_path: Path) -> None:
    page = PAGE.encode()
    files = {
        "p-1.0/docs/guide/good.rst": b"1 " + page,
        "p-1.0/doc/lines.txt": b"2 " + page.replace(b"\n", b"\r\n"),
        "p-1.0/docs/good.md": b"3 " + page,
        "p-1.0/docs/code.py": b"4 " + page,
        "p-1.0/src/good.rst": b"5 " + page,
        "p-1.0/docs/releases/1.0.rst": b"6 " + page,
        "p-1.0/docs/CHANGES.rst": b"7 " + page,
        "p-1.0/docs/short.rst": b"8 " + page[:300],
        "p-1.0/docs/list.rst": b"9 " + b"X-1, Y_2: {Z}; " * 100,
        "p-1.0/docs/latin.rst": "Ä ".encode("latin-1") + page,
        "p-1.0/docs/separated.rst": page + script.SEPARATOR.encode(),
        "p-1.0/docs/long.rst": page * 400,
        "docs.rst": page,
    }
    found = list(script.pages(archive(tmp_path / "p-1.0.tar.gz", files)))
    assert found == [f"{number} {PAGE}" for number in (1, 2, 3)]


def test_the_split_depends_on_the_pages_alone(script: ModuleType) -> None:
    texts = [f"page {number} " + "x" * (number % 50) for number in range(300)]
    sizes = {"train": 5000, "val": 800}
    files = script.split(iter(texts), sizes)
    shuffled = random.Random(0).sample(texts, len(texts))
    assert script.split(iter(shuffled + shuffled[:100]), sizes) == files
    parts = {name: data.decode().split(script.SEPARATOR)[:-1] for name, data in files.items()}
    taken = parts["train"] + parts["val"]
    assert len(set(taken)) == len(taken) and set(taken) <= set(texts)
    for name, size in sizes.items():
        assert size - 100 < len(files[name]) <= size
    with pytest.raises(SystemExit, match="do not fill val"):
        script.split(iter(texts[:120]), sizes)


def test_compressors_that_have_seen_the_text_do_better(script: ModuleType) -> None:
    train = random.Random(0).randbytes(20_000)
    found = dict(script.baselines(train, train[5000:9000]))
    assert len(found) == 5
    for name, size in found.items():
        assert (size < 400) if name.endswith("train.txt") else (size >= 4000), name


def test_what_is_pinned_is_in_order(script: ModuleType) -> None:
    assert list(script.ARCHIVES) == sorted(script.ARCHIVES)
    assert script.TEXTS.keys() == script.SIZES.keys()
    for digest in (*script.ARCHIVES.values(), *script.TEXTS.values()):
        assert len(bytes.fromhex(digest)) == 32


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
