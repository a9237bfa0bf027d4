"""Every kind of build keeps the promises of builds, with the inputs of `source_cases.CASES`."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from crash_stores import contents, is_clean
from source_cases import CASES, SourceCase
from tokmill import plugins
from tokmill.cli import main

KINDS = sorted(CASES)
KILLED = """
import os, signal, sys
import tokmill.builds.plan as plan
from tokmill.cli import main
plan.SHARD_BYTES = 64
left, rename = int(sys.argv[1]), os.rename
def counted(*paths):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*paths)
os.rename = counted
main(sys.argv[2:])
"""
"""Runs a command, and kills it where it renames a file for the so many-th time."""


class Build:
    """Builds of one kind in a folder."""

    def __init__(self, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.kind, self.case, self.folder, self.capsys = kind, CASES[kind], folder, capsys
        (folder / "in").mkdir()
        (folder / "options").mkdir()
        count = range(self.case.most)
        self.inputs = [self.case.write(folder / "in", number) for number in count]
        self.options = [*map(str, self.case.options(folder / "options"))]

    def command(self, out: Path, inputs: Sequence[Path], workers: int) -> list[str]:
        """Return the arguments; a build over a store gets a copy of it as `out`."""
        base = ["build", self.kind]
        if self.case.over:
            if not out.exists():
                shutil.copytree(inputs[0], out)
            if self.kind == "embed":
                base, named = ["embed", self.options[1]], [str(out)]
                return [*base, *named, "-q"]
            return [*base, str(out), *self.options, "--workers", str(workers), "-q"]
        named = [*map(str, inputs), "-o", str(out)]
        return [*base, *named, *self.options, "--workers", str(workers), "-q"]

    def __call__(self, name: str, count: int = 3, workers: int = 0) -> Path:
        """Build from the first inputs in this process; return the store."""
        out = self.folder / name
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as left:
                main(self.command(out, self.inputs[:count], workers))
        finally:
            signal.signal(signal.SIGTERM, before)
        assert not left.value.code, self.capsys.readouterr().err
        return out

    def made(self, out: Path) -> dict[str, bytes]:
        """Return the files of a store; of an overlay its shards, as other files name the base."""
        kept = contents(out)
        if not self.case.over:
            return kept
        return {
            n: data for n, data in kept.items() if n.startswith("overlays/") and "/shards/" in n
        }


@pytest.fixture
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly every item ends its shard."""
    monkeypatch.setattr("tokmill.builds.plan.SHARD_BYTES", 64)


def test_every_source_has_its_case() -> None:
    """A new line in `plugins` needs one in `source_cases`."""
    assert CASES.keys() == plugins.SOURCES.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_any_workers_make_the_same_bytes(
    kind: str, tmp_path: Path, many_shards: None, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Build(kind, tmp_path, capsys)
    alone = build.made(build("alone"))
    shards = [name for name in alone if name.endswith(".safetensors")]
    assert len(shards) >= (2 if CASES[kind].over else 3)
    for workers in (1, 2) if kind != "embed" else ():
        assert build.made(build(f"by-{workers}", workers=workers)) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_build_goes_on(
    kind: str, tmp_path: Path, many_shards: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at its second and at its fifth commit; then the same command makes the same bytes."""
    build = Build(kind, tmp_path, capsys)
    wanted = build.made(build("wanted"))
    for number in (2, 5):
        out = tmp_path / f"killed-{number}"
        command = build.command(out, build.inputs, 0)
        done = subprocess.run([sys.executable, "-c", KILLED, str(number), *command], check=False)
        assert done.returncode == -signal.SIGKILL
        assert build.made(build(out.name)) == wanted


@pytest.mark.parametrize("kind", [kind for kind in KINDS if CASES[kind].grows])
def test_a_grown_store_is_one_that_was_built_at_once(
    kind: str, tmp_path: Path, many_shards: None, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Build(kind, tmp_path, capsys)
    wanted = build.made(build("wanted"))
    build("grown", count=2)
    assert build.made(build("grown")) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_mean_nothing_are_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An input is random bytes, then empty: a clean error, or a store that is valid."""
    case: SourceCase = CASES[kind]
    build = Build(kind, tmp_path, capsys)
    hurt = build.inputs[0] if case.over or case.most == 1 else build.inputs[1]
    files = sorted(
        path
        for path in build.folder.glob("in/**/*")
        if path.is_file()
        and (hurt == path or hurt in path.parents or path.name.startswith(f"{hurt.name}."))
    )
    assert files
    for data in (bytes(range(256)) * 3, b""):
        for path in files:
            path.write_bytes(data)
        out = build.folder / f"hurt-{len(data)}"
        before = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as left:
                main(build.command(out, build.inputs, 0))
        finally:
            signal.signal(signal.SIGTERM, before)
        if left.value.code:
            said = capsys.readouterr().err
            assert left.value.code != 70, said
            assert is_clean(said) or " rejected (" in said, said
        else:
            with pytest.raises(SystemExit) as checked:
                main(["store", "validate", str(out)])
            assert not checked.value.code
