"""The wheel alone, in an empty environment: it starts, reads a store, and names missing extras.

Needs the package registry that pip is configured for; without it everything here is skipped.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Completed = subprocess.CompletedProcess


def pip(python: Path | str, *arguments: object, timeout: float = 300) -> Completed[str]:
    command = [str(python), "-m", "pip", "--no-input", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


class Installed(NamedTuple):
    """An environment that holds the wheel and the base dependencies."""

    wheel: Path
    python: Path

    def run(self, *arguments: object) -> Completed[str]:
        command = [str(self.python.with_name("tokmill")), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def installed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    constraints = ("-c", repository / "constraints.txt")
    probe = pip(
        sys.executable, "download", "-q", "--no-deps", "--retries", "0", "--timeout", "15",
        *constraints, "-d", folder / "probe", "msgspec",
    )  # fmt: skip
    if probe.returncode:
        pytest.skip(f"the package registry cannot be reached: {probe.stderr.strip()[-200:]}")

    built = pip(
        sys.executable, "wheel", "-q", "--no-deps", "--no-build-isolation",
        "-w", folder, repository,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("tokmill-*.whl")

    environment = folder / "environment"
    # The pip of this environment installs: to unpack another one takes as long as all the rest.
    venv = [sys.executable, "-m", "venv", "--without-pip", environment]
    subprocess.run(venv, check=True, timeout=120)
    python = environment / "bin" / "python"
    done = pip(sys.executable, "--python", python, "install", "-q", *constraints, wheel)
    assert done.returncode == 0, done.stderr
    return Installed(wheel, python)


@pytest.fixture(scope="module")
def store(corpus: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store, built here with all extras."""
    import tokmill
    from tokmill.text.learning.train_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("store")
    tokenizer = train_tokenizer(corpus.texts[:50], 512, ["<|endoftext|>"])
    tokenizer.save(folder / "tokenizer.json")
    tokmill.build("text", [corpus.txt], folder / "store", tokenizer=folder / "tokenizer.json")
    return folder / "store"


def test_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"tokmill"}
    assert any(name.endswith("LICENSE") for name in names)
    assert "tokmill/x86/diff/evidence_net.npy" in names
    assert not [name for name in names if name.endswith((".pyc", ".orig"))]


def test_no_extra_came_along(installed: Installed) -> None:
    done = pip(sys.executable, "--python", installed.python, "list", "--format", "freeze")
    listed = done.stdout.lower()
    assert "msgspec==" in listed
    for package in ("torch", "gigatoken", "tokenizers", "pyarrow", "matplotlib"):
        assert f"{package}==" not in listed


HELP = """
import sys
from tokmill.cli import main
for name in sys.argv[1:]:
    try:
        main([name, "--help"])
    except SystemExit as ended:
        print(name, ended.code, file=sys.stderr)
"""


def test_every_command_helps(installed: Installed) -> None:
    from tokmill.plugins import COMMANDS

    command = [installed.python, "-c", HELP, *COMMANDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert {f"{name} 0" for name in COMMANDS} <= set(done.stderr.splitlines()), done.stderr


def test_shipped_recipes(installed: Installed, repository: Path) -> None:
    names = {path.stem for path in (repository / "recipes").rglob("*.toml")}
    assert names == {
        line.split()[0] for line in installed.run("recipe", "list").stdout.splitlines()[2:]
    }


def test_read_a_store(installed: Installed, store: Path) -> None:
    import tokmill

    code = (
        "import sys, tokmill; store = tokmill.Store(sys.argv[1]);"
        "print(store.fingerprint, store.records, store.tokens, store.record(1)['token'].tolist())"
    )
    done = subprocess.run(
        [installed.python, "-c", code, store], capture_output=True, text=True, check=True
    )
    ours = tokmill.Store(store)
    expected = [ours.fingerprint, ours.records, ours.tokens, ours.record(1)["token"].tolist()]
    assert done.stdout.strip() == " ".join(map(str, expected))


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("text", ["build", "text", "TEXT", "-o", "OUT", "--vocab-size", "512"]),
        ("text", ["tokenizer", "train", "TEXT", "-o", "OUT", "--vocab-size", "512"]),
        ("train", ["train", "STORE", "-o", "OUT"]),
        ("train", ["sample", "STORE", "--prompt", "a"]),
    ],
    ids=["build", "tokenizer", "train", "sample"],
)
def test_missing_extra_is_named(
    installed: Installed,
    store: Path,
    corpus: Any,
    tmp_path: Path,
    extra: str,
    arguments: list[str],
) -> None:
    places = {"TEXT": corpus.txt, "STORE": store, "OUT": tmp_path / "out"}
    done = installed.run(*[places.get(argument, argument) for argument in arguments])
    assert done.returncode == 4, done.stderr
    assert f"hint: pip install 'tokmill[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
