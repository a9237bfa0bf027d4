"""`tokmill cfg`: what it writes, says and refuses; what a kill leaves behind."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from x86_programs import assembled, compiles, pe_file

Here = Callable[..., tuple[str, str]]
SOURCE = "int f(int x) { return x * 3; }\nint main(int n, char **v) { return f(n) + 1; }"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    compiles(folder, "small", SOURCE, "-O1")
    assembled(folder, "tiny", ".globl _start\n_start: call rax\nret\n")
    return folder


@pytest.fixture
def programs(built: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    shutil.copy(built / "small", folder)
    shutil.copy(built / "tiny.s", folder / "tiny")
    (folder / "hand.exe").write_bytes(pe_file(b"\xc3"))
    (folder / "notes").write_text("no program")
    return folder


def test_a_folder(here: Here, programs: Path, tmp_path: Path) -> None:
    out, _ = here("cfg", "programs", "-o", "graphs", "-q", "--workers", 0)
    first, second, third = out.splitlines()
    facts = r"(\d+) functions, (\d+) blocks, (\d+) instructions, (\d+) edges, [\d.]+s"
    shown = re.fullmatch(rf"graphs: 3 programs \(0 unchanged\), {facts}", first)
    report = json.loads(here("cfg", "programs", "-o", "graphs", "-q", "--json")[0])
    names = ("functions", "blocks", "instructions", "edges")
    assert shown and [int(number) for number in shown.groups()] == [report[name] for name in names]
    assert second == "not followed: 2 indirect call, 2 indirect jump"
    assert third == "left out of the folders: 1 file that is no program"
    assert len(list((tmp_path / "graphs").glob("*.parquet"))) == 3
    again, _ = here("cfg", "programs", "-o", "graphs", "-q", "--workers", 0)
    assert again.startswith("graphs: 3 programs (3 unchanged), ")


def test_one_program_as_json_lines(here: Here, programs: Path, tmp_path: Path) -> None:
    here("cfg", "programs/tiny", "-o", "tiny.jsonl", "-q")
    first, *rows = map(json.loads, (tmp_path / "tiny.jsonl").read_text().splitlines())
    assert first["graph"]["functions"] == 1
    assert [row["code"] for row in rows] == ["ffd0", "c3"]
    assert rows[0]["kinds"] == ["indirect", "fall"] and rows[0]["name"] == "_start"
    assert rows[0]["successors"] == [0, rows[1]["address"]]


def test_one_that_is_refused_is_told_with_its_reason(here: Here, programs: Path) -> None:
    _, error = here("cfg", "programs/notes", "-o", "new/graphs", "-q", code=1)
    assert "not a program" in error and "notes" in error and "hint:" in error
    # Nothing of it stays, not even the folder.
    assert not Path("new").exists()
    Path("there").mkdir()
    (programs / "notes2").write_text("no program")
    here("cfg", "programs/notes", "programs/notes2", "-o", "there", "-q", code=1)
    assert list(Path("there").iterdir()) == []


def test_a_file_is_no_folder_of_graphs(here: Here, programs: Path) -> None:
    before = Path("programs/tiny").read_bytes()
    for name in ("tiny", "hand.exe"):
        _, error = here("cfg", f"programs/{name}", "-o", f"programs/{name}", "-q", code=2)
        assert (
            "is a file; graphs are written into a folder" in error and "-o GRAPH.parquet" in error
        )
    assert Path("programs/tiny").read_bytes() == before


def test_a_graph_replaces_no_program(here: Here, programs: Path) -> None:
    before = (programs / "tiny").read_bytes()
    (programs / "tiny.parquet").write_bytes(before)
    _, error = here("cfg", "programs/tiny.parquet", "-o", "programs/tiny.parquet", "-q", code=2)
    assert "would replace the program" in error and "hint:" in error
    _, error = here("cfg", "programs", "-o", "programs", "-q", "--workers", 0, code=2)
    assert "would replace the program" in error
    assert (programs / "tiny.parquet").read_bytes() == before
    _, error = here("cfg", "programs/tiny", "-o", "x.json", "-q", code=2)
    assert "no graph is written as .json" in error
    assert not Path("x.json").exists()


def test_a_folder_may_have_a_dot_in_its_name(here: Here, programs: Path, tmp_path: Path) -> None:
    here("cfg", programs, "-o", "tool-9.7", "-q")
    assert list((tmp_path / "tool-9.7").glob("**/*.parquet"))
    one = next(path for path in sorted(programs.rglob("*")) if path.is_file())
    here("cfg", one, "-o", "tool-9.7", "-q")
    assert "no graph is written as .parqet" in here("cfg", one, "-o", "g.parqet", code=2)[1]


def test_levels_are_those_of_a_saved_index(here: Here, programs: Path) -> None:
    for command in (("cfg",), ("vocab", "build", "x86")):
        arguments = (*command, "programs/tiny", "-o", "x", "--levels", "O0,O1", "-q")
        _, error = here(*arguments, code=2)
        assert "--levels are those of a saved_index.pkl, and none is among the inputs" in error
        assert "hint: leave it out" in error and not Path("x").exists()


def test_the_others_are_made_where_one_is_refused(here: Here, programs: Path) -> None:
    (programs / "arm").write_bytes(b"\x7fELF\2\1\1" + bytes(9) + b"\2\0\xb7\0" + bytes(44))
    out, _ = here("cfg", "programs", "-o", "graphs", "-q", "--workers", 0)
    assert "arm: refused, an ELF file for AArch64" in out
    assert "refused: 1 an ELF file for AArch64" in out
    # One that was named has to be there.
    arguments = ("cfg", "programs/arm", "programs/tiny", "-o", "named", "-q", "--workers", 0)
    out, _ = here(*arguments, code=1)
    facts = "1 function, 2 blocks, 2 instructions, 3 edges"
    assert f"named: 1 program (0 unchanged), {facts}, " in out


def test_wrong_usage(here: Here, programs: Path) -> None:
    for arguments, code, what in (
        (("programs", "-o", "x.parquet"), 2, "is one file, and there are 3 programs"),
        (("programs", "-o", "x", "--lifter", "ida"), 2, "no lifter is called 'ida'"),
        (("programs/tiny", "-o", "x.csv"), 2, "no graph is written as .csv"),
        (("nowhere", "-o", "x"), 1, "nowhere"),
    ):
        _, error = here("cfg", *arguments, "-q", "--workers", 0, code=code)
        assert what in error and "hint:" in error
    (programs / "empty").mkdir()
    _, error = here("cfg", "programs/empty", "-o", "x", "-q", code=1)
    assert "the folder is empty" in error
    (programs / "empty/notes").write_text("no program")
    _, error = here("cfg", "programs/empty", "-o", "x", "-q", code=1)
    assert "there are no programs" in error


def test_a_kill_leaves_whole_graphs_and_the_same_command_goes_on(
    here: Here, programs: Path, tmp_path: Path
) -> None:
    for number in range(30):
        shutil.copy(programs / "small", programs / f"copy{number:02}")
    command = [sys.executable, "-m", "tokmill", "cfg", "programs", "-q", "--workers", "0", "-o"]
    child = subprocess.Popen([*command, "killed"], cwd=tmp_path, stdout=subprocess.PIPE)
    folder = tmp_path / "killed"
    while child.poll() is None and len(list(folder.glob("*.parquet"))) < 5:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    done = {path: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}
    assert len(done) >= 5
    here("cfg", "programs", "-o", "whole", "-q", "--workers", 0)
    out, _ = here("cfg", "programs", "-o", "killed", "-q", "--workers", 0, "--json")
    report = json.loads(out)
    assert report["kept"] == len(done) and report["kept"] + report["made"] == 33
    assert all(path.stat().st_mtime_ns == at for path, at in done.items())
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.parquet")}
    assert {path.name: path.read_bytes() for path in folder.glob("*.parquet")} == whole
    assert not list(folder.glob(".tmp-*"))
