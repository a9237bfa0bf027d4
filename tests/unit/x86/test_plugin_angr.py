"""The plug-in with angr: how it joins, its answer as a graph, its child process, its errors."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tokmill_angr as angr
from tokmill.base.errors import MachineError, MissingExtraError, TokmillError
from tokmill.x86.lift.cfg import lift
from x86_programs import (
    C_SOURCE,
    blocks_of,
    check_graph,
    compiles,
    flat,
    stripped,
    symbols,
)

# cmp eax, 3; ja over; jmp [rax * 8 + table] / ret (over) / call over; ret / jmp rax
CODE = {
    0x401000: "83f803 7709".replace(" ", ""),
    0x401005: "ff24c500204000",
    0x40100E: "c3",
    0x401010: "e8f9ffffff",
    0x401015: "c3",
    0x401020: "ffe0",
    0x401030: "ffd0",
}
WAYS = {
    0x401000: [0x401005, 0x40100E],
    0x401005: [0x40100E, 0x401010],
    0x401010: [0x40100E, 0x401015],
    0x401030: [0x401032, 0x401010],
}


POINTS = """\
import importlib.metadata, sys
from tokmill import plugins
from tokmill.x86.graphs.lifting import lifter_version
assert "angr" not in dict(plugins.LIFTERS)
assert "angr" in plugins.LIFTERS
print(plugins.load(plugins.LIFTERS, "angr").__module__, plugins.LIFTERS["angr"].help)
print(lifter_version("angr"))
"""


def installed(folder: Path, repository: Path, points: str) -> dict[str, str]:
    """Make a folder as pip makes it of the plug-in; return an environment with it on its path."""
    information = folder / "tokmill_angr-1.dist-info"
    information.mkdir(parents=True)
    head = "Metadata-Version: 2.1\nName: tokmill-angr\nVersion: 1\nSummary: angr's CFGFast\n"
    (information / "METADATA").write_text(head)
    (information / "entry_points.txt").write_text(points)
    package = repository / "examples" / "plugin-angr" / "tokmill_angr"
    shutil.copytree(package, folder / "tokmill_angr")
    return os.environ | {"PYTHONPATH": str(folder)}


def test_an_installed_package_adds_a_lifter(tmp_path: Path, repository: Path) -> None:
    text = (repository / "examples" / "plugin-angr" / "pyproject.toml").read_text()
    ((name, target),) = tomllib.loads(text)["project"]["entry-points"]["tokmill.parts"].items()
    points = f"[tokmill.parts]\n{name} = {target}\n"
    environment = installed(tmp_path / "site", repository, points)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"version": "9.9.9"}\'\n')
    python.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", POINTS],
        env=environment | {angr.PYTHON: str(python)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wanted = ["tokmill_angr angr's CFGFast", "angr 2, angr 9.9.9"]
    assert done.stdout.splitlines() == wanted, done.stderr


def test_an_entry_point_of_no_table_is_named(tmp_path: Path, repository: Path) -> None:
    environment = installed(tmp_path, repository, "[tokmill.parts]\nFOO.angr = tokmill_angr:lift\n")
    command = [sys.executable, "-m", "tokmill", "cfg", "/bin/true", "-o", "x", "--lifter", "angr"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert (
        "'FOO.angr' = 'tokmill_angr:lift' of the package tokmill-angr names no table" in done.stderr
    )


def answer() -> angr.Answer:
    """Two functions, an import stub, and a function without a block of its own."""
    owner = {address: 1 if address < 0x401010 else 0 for address in CODE}
    blocks = [(owner[at], at, code, WAYS.get(at, [])) for at, code in CODE.items()]
    return angr.Answer(
        functions=[(0x401010, "second"), (0x401000, ""), (0x401100, "stub"), (0x401200, "")],
        blocks=[*blocks[::-1], (2, 0x401100, "ff2500000000", []), (3, 0x401204, "c3", [])],
    )


def test_an_answer_as_a_graph() -> None:
    program = flat(b"\xc3" * 0x100, b"\xc3" * 16, b"\xc3" * 16)
    program.name = "/some/where/flat"
    program.sections[1].stubs = True
    graph = angr.graph_of(answer(), program)
    check_graph(graph, None)
    assert (graph.program, graph.bits) == ("flat", 64)
    assert graph.function_address.tolist() == [0x401000, 0x401010]
    assert graph.function_name == ["", "second"]
    assert blocks_of(graph, 0x401000) == {
        0x401000: (5, [("BRANCH", 0x40100E), ("FALL", 0x401005)]),
        0x401005: (7, [("INDIRECT", 0x40100E), ("INDIRECT", 0x401010)]),
        0x40100E: (1, [("RETURN", 0)]),
    }
    assert blocks_of(graph, 0x401010) == {
        0x401010: (5, [("CALL", 0x40100E), ("FALL", 0x401015)]),
        0x401015: (1, [("RETURN", 0)]),
        0x401020: (2, [("INDIRECT", 0)]),
        0x401030: (2, [("FALL", 0x401032), ("INDIRECT", 0x401010)]),
    }
    assert graph.lengths[:3].tolist() == [3, 2, 7]
    assert graph.unresolved == [(0x401020, "indirect jump")]


def interpreter(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a shell script stand where the interpreter with angr is looked for."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv(angr.PYTHON, str(path))


def test_a_limit_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(tmp_path, "exec sleep 60", monkeypatch)
    with pytest.raises(TokmillError, match="took more than 0.1 seconds") as caught:
        angr.analyse("some/program", seconds=0.1)
    assert caught.value.where == "some/program"
    assert "native" in caught.value.hint


def test_an_interpreter_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(angr.PYTHON, str(tmp_path / "nothing"))
    with pytest.raises(MachineError, match="No such file") as caught:
        angr.analyse("some/program")
    assert angr.PYTHON in caught.value.hint


def test_without_angr_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("angr"):
        pytest.skip("angr is installed here")
    monkeypatch.delenv(angr.PYTHON, raising=False)
    with pytest.raises(MissingExtraError, match="No module named 'angr'") as caught:
        angr.analyse("some/program")
    assert angr.PYTHON in caught.value.hint


def has_angr() -> bool:
    """Say whether angr can be run."""
    python = os.environ.get(angr.PYTHON, sys.executable)
    found = subprocess.run([python, "-c", "import angr"], capture_output=True, check=False)
    return found.returncode == 0


@pytest.mark.long
def test_angr_finds_what_the_native_lifter_finds(built: Path) -> None:
    if not has_angr():
        pytest.skip(f"needs angr: an interpreter that has it in {angr.PYTHON}")
    whole = compiles(built, "angr-O0", C_SOURCE, "-O0")
    path, places = stripped(whole), symbols(whole)
    graph, native = angr.lift(path), lift(path)
    starts = {places[name] for name in ("main", "dispatch", "walk", "interpret", "checked")}
    assert starts <= set(graph.function_address.tolist())
    mine = {at: block for one in starts for at, block in blocks_of(native, one).items()}
    other = {at: block for one in starts for at, block in blocks_of(graph, one).items()}
    shared = mine.keys() & other.keys()
    assert len(shared) > 0.95 * len(mine)
    # They part where a call does not come back, and where angr ends a block for itself.
    assert sum(mine[at] == other[at] for at in shared) > 0.85 * len(shared)
