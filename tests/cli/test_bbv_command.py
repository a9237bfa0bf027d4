"""`tokmill bbv` and `tokmill build bbv`: what they say and refuse."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from source_cases import block_store, write_trace
from tokmill.store.store import Store
from x86_programs import compiles

Here = Callable[..., tuple[str, str]]
VALGRIND = (
    "T:1:4   :2:6   \nT:1:9   \nT:2:2   \n\n# Thread 2\n#   Total intervals: 3 (Interval Size 10)\n"
    "#   Total instructions: 25\n#   Total reps: 7\n"
)


def test_check_says_what_a_file_holds(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "a.bb"
    path.write_text(VALGRIND)
    out, _ = here("bbv", "check", "a.bb")
    assert "a.bb: 3 intervals, 4 entries, 21 instructions, ids 1 to 2" in out
    assert "intervals: 2 to 10 instructions" in out and "declared: interval 10" in out
    assert "4 instructions after the last interval were not written" in out
    assert "repetitions of REP instructions are not counted here" in out
    facts = json.loads(here("bbv", "check", "a.bb", "--json")[0])
    assert facts["declared"]["thread"] == 2
    assert facts["sizes"] == {"smallest": 2, "largest": 10}
    path.write_text(VALGRIND.replace("25", "20"))
    assert "execute 1 instruction more than the file declares" in here("bbv", "check", "a.bb")[0]
    path.write_text("T\n")
    assert "1 interval, 0 entries, 0 instructions, 2 B" in here("bbv", "check", "a.bb")[0]
    assert json.loads(here("bbv", "check", "a.bb", "--json")[0])["ids"] == []
    path.write_text("T:1:4")
    assert "may be cut off" in here("bbv", "check", "a.bb", code=1)[0]
    path.write_text(VALGRIND.replace("T:2:2   \n", ""))
    assert "declares 3 intervals and has 2" in here("bbv", "check", "a.bb", code=1)[1]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_build_says_what_was_not_joined(here: Here, tmp_path: Path) -> None:
    options = [str(one) for one in block_store(tmp_path)][:2]
    trace = write_trace(tmp_path, 0)
    out, _ = here("build", "bbv", trace, *options, "-o", "s", "-q")
    assert "9 instructions not joined: no program of the store lies there" in out
    store = Store(tmp_path / "s")
    assert store.records == 10
    first = store.record(0)
    assert first["block"].tolist() == [0, 1] and first["count"].tolist() == [1, 1]
    assert first["cpi_kind"] == "modelled" and first["thread"] == 1
    assert store.record(4)["block"].tolist() == []
    assert store.record(4)["instructions"] == 9
    # What names no program, no pc file, or measures of another run.
    trace.with_suffix(".map").write_text("5000 0\n")
    said = here("build", "bbv", trace, *options, "-o", "t", "-q", "--min-joined", 1, code=1)[1]
    assert "of the instructions are in blocks of the store" in said
    trace.with_suffix(".intervals.csv").write_text("cpi\n1\n")
    assert "9 missing intervals: 1 here and 10" in here(
        "build", "bbv", trace, *options, "-o", "u", "-q", code=1
    )[1]  # fmt: skip
    trace.with_suffix(".pc").unlink()
    assert "no pc file" in here("build", "bbv", trace, *options, "-o", "v", "-q", code=1)[1]
    assert "names 2 files" in here(
        "build", "bbv", trace, *options, "--pc", "a", "--pc", "b", "-o", "x", code=2
    )[1]  # fmt: skip


def test_a_trace_without_code(here: Here, tmp_path: Path) -> None:
    trace = write_trace(tmp_path, 0)
    out, _ = here("build", "bbv", trace, "-o", "s", "-q")
    assert "1 trace whose blocks are called by their own ids" in out
    assert "trace: " in here("inspect", "s", "--head", 1)[0]
    said = here("simpoint", "s", "-o", "p", code=2)[1]
    assert "are chosen in its file of block vectors" in said and "tokmill simpoint TRACE" in said
    write(tmp_path / "same.bb", "T:1:5 :2:6\n" * 5)
    here("build", "bbv", "same.bb", "-o", "same", "-q")
    said = here("build", "mine", "same", "--what", "bbv", "-o", "m", "-q", code=1)[1]
    assert "no record was found (5 no positive above the threshold)" in said
    assert "--above" in said and "intervals with equal counts are not a pair" in said


def test_files_beside_a_trace_are_not_told_as_left_out(here: Here, tmp_path: Path) -> None:
    options = [str(one) for one in block_store(tmp_path)][:2]
    folder = tmp_path / "profiles"
    folder.mkdir()
    trace = write_trace(folder, 0)
    trace.with_suffix(".about.json").write_text("{}")
    assert "left out" not in here("build", "bbv", folder, *options, "-o", "s")[1]
    (folder / "notes.json").write_text("{}")
    said = here("build", "bbv", folder, *options, "-o", "t")[1]
    assert "left out of the folders: of other kinds: 1 .json\n" in said


def test_profile_of_a_program(here: Here, tmp_path: Path) -> None:
    source = (
        "#include <stdio.h>\nint main(void) { int c, n = 0; while ((c = getchar()) != EOF) n += c;"
    )
    compiles(tmp_path, "count", source + " return n == 0; }", "-O1")
    write(tmp_path / "in.txt", "some text\n" * 2000)
    out, told = here(
        "bbv", "profile", "-o", "p", "--stdin", "in.txt", "--every-blocks", 20_000, "-q",
        "--", tmp_path / "count",
    )  # fmt: skip
    assert out.startswith("p/count.bb.gz: ") and "CPI, modelled: " in out
    assert "few intervals: a longer execution makes more" in told
    (says,) = re.findall("next: tokmill (.*)", told)
    here(*says.split())
    assert (tmp_path / "POINTS/count.simpoints").is_file()
    said = here("bbv", "profile", "-o", "q", "-q", "--", tmp_path / "count", code=1)[1]
    assert "ended with exit code 1" in said
    assert "no such program" in here("bbv", "profile", "-o", "q", "--", "none-such", code=2)[1]
    (tmp_path / "data").touch()
    assert "chmod +x" in here("bbv", "profile", "-o", "q", "--", tmp_path / "data", code=2)[1]
    # No warning of valgrind is given as the reason.
    assert "--" not in said.splitlines()[0].partition("exit code 1")[2]
    command = ("bbv", "profile", "-o", "q", "-q", "--stdin", "in.txt")
    said = here(*command, "--", "env", tmp_path / "count", code=1)[1]
    assert "starting another in its place" in said
