"""Files with odd names: bytes that are not UTF-8, escapes, newlines, very long ones."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from making import TOKENIZER, jsonl
from tokmill.base.errors import TokmillError, plain, shell_word
from tokmill.base.files import path_from_text, path_to_text
from tokmill.cli.inspect_command import print_facts, print_records
from tokmill.store.receipts import read_planned
from tokmill.store.store import Store
from tokmill.terminal.output import print_table

ODD = {
    "bytes": os.fsdecode(b"caf\xe9 \xff.jsonl"),
    "escapes": "\x1b]0;owned\x07\x1b[2J\x1b[31mred.jsonl",
    "newline": "a\nerror: forged\n.jsonl",
    "direction": "evil‮lnosj.jsonl",
    "c1": "a\x9b31mb.jsonl",
    "spaces": "  a  b .jsonl",
    "long": "n" * 249 + ".jsonl",
    "quotes": "a'b\"c$(d)`e`;f.jsonl",
    "percent": "100%25 %E9.jsonl",
}


def is_printable(text: str) -> bool:
    """Whether a terminal only prints it."""
    return text == plain(text)


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a file of an odd name, in a folder of an odd name."""
    folder = tmp_path / "in" / ODD[request.param].removesuffix(".jsonl")[:100]
    folder.mkdir(parents=True)
    return jsonl(folder / ODD[request.param], [{"text": f"record {i}"} for i in range(9)])


def test_a_cell_of_a_table_is_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A string of a program, or the name of a run, must not write rows of its own."""
    forged = "usage: x\n0.999  strcpy  0x1000\tlibc"
    print_table(["name\nx", "why"], [["a", forged], [forged, 1]])
    print_facts({"name": forged, "list": [forged, 2], "table": [{"column": forged}]})
    print_records([{"record": 0, "tokens": 1, "name": forged}])
    lines = capsys.readouterr().out.splitlines()
    escaped = forged.replace("\n", "\\n").replace("\t", "\\t")
    assert not [line for line in lines if line.startswith("0.999") or "\t" in line]
    assert sum(line.count(escaped) for line in lines) == 6
    assert len(lines) == 4 + 2 + 5 + 2


def test_odd_names_are_inputs_like_any_other(odd: Path, tmp_path: Path, here: Any) -> None:
    """As a file, in a folder, in every command that names it again."""
    for number, given in enumerate((odd, odd.parent, tmp_path / "in")):
        store = tmp_path / f"s{number}"
        command = ("build", "jsonl", given, "-o", store, "--tokenizer", TOKENIZER, "--workers", 0)
        for _ in range(2):
            out, err = here(*command)
            assert is_printable(out) and is_printable(err)
        [item] = read_planned(store)
        assert item.path == str(odd)
        assert item.name.encode() and len(Store(store)) == 9
        for more in (
            ("store", "validate", store, "--deep", 1),
            ("store", "rejects", store, "--skipped"),
            ("inspect", store),
            ("build", "jsonl", "--explain", f"{odd}:2", "--tokenizer", TOKENIZER),
            (*command, "--dry-run"),
        ):
            out, err = here(*more)
            assert is_printable(out) and is_printable(err)
        out, _ = here("inspect", store, "--head", 1, "--json")
        assert is_printable(out) and json.loads(out)
    odd.write_text('{"text": "changed"}\n')
    _, err = here(*command, code=1)
    assert "changed: " in err and is_printable(err)
    here(*command, "--yes")
    odd.write_text("{\n" * 2000)
    _, err = here(*command, "--yes", code=1)
    assert is_printable(err)
    odd.unlink()
    _, err = here(*command, code=1)
    assert is_printable(err) and "hint:" in err


def test_odd_names_of_stores_and_missing_things(odd: Path, here: Any) -> None:
    store = odd.with_suffix(".store") if len(odd.name) < 200 else odd.with_name("store")
    here("build", "jsonl", odd, "-o", store, "--tokenizer", TOKENIZER, "--workers", 2)
    out, err = here("inspect", store)
    assert is_printable(out + err)
    here("build", "select", store, "-o", f"{store}2", "--min-length", 1, "--workers", 0)
    gone = f"{store}-gone"
    for wrong in (
        ("inspect", gone),
        ("build", "text", gone, "-o", "x", "--tokenizer", TOKENIZER),
        ("store", "validate", gone),
        ("cfg", odd, "-o", "graphs"),
        ("tokenizer", "encode", "-t", gone, "a"),
    ):
        out, err = here(*wrong, code=1)
        assert is_printable(out) and is_printable(err) and "hint:" in err


def test_a_newline_in_a_path_makes_no_second_line(tmp_path: Path, here: Any) -> None:
    """A result of a line, as `cut` and `grep` read it, stays one."""
    folder = tmp_path / "a\nerror: forged"
    folder.mkdir()
    data = jsonl(folder / "in.jsonl", [{"text": f"record {i}"} for i in range(9)])
    store, shown = folder / "s", str(folder).replace("\n", "\\n")
    made = ("build", "jsonl", data, "-o", store, "--tokenizer", TOKENIZER, "--workers", 0)
    out, _ = here(*made)
    assert out.splitlines()[0].startswith(f"{shown}/s: 9 records")
    data.write_text(data.read_text() + "{\n")
    for command in (
        (*made, "--yes", "--max-rejects", 1),
        ("store", "validate", store),
        ("store", "rejects", store),
        ("store", "export", "bin", store, "-o", folder / "t.bin"),
        ("store", "validate", folder / "t.bin"),
        ("tokenizer", "train", data, "--vocab-size", 270, "-o", folder / "t.json"),
        ("inspect", store, "--head", 1),
    ):
        out, err = here(*command)
        assert not [line for line in f"{out}\n{err}".splitlines() if line.startswith("error:")]
        assert "a\\nerror: forged" in out or command[0] == "inspect"


def test_a_bug_with_an_odd_name_is_reported_as_one(tmp_path: Path) -> None:
    """The handler itself failed on such a name."""
    code = (
        "import sys, os, tokmill.cli as cli\n"
        "def broken(): raise ValueError(os.fsdecode(b'\\xe9') + '\\x1b[2J')\n"
        "cli.application = broken\n"
        "cli.main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, b"\xff\x1b[2J"], capture_output=True, check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    assert done.returncode == 70, done.stderr
    assert b"this is a bug" in done.stderr and is_printable(done.stderr.decode())
    [report] = tmp_path.glob("tokmill-bug-*")
    assert "ValueError" in report.read_text("utf-8")


def test_paths_survive_in_json() -> None:
    for path in ("/a b", "/é", "/100%25", os.fsdecode(b"/caf\xe9/\xff%20"), "/file:///x"):
        text = path_to_text(path)
        assert text.encode() and path_from_text(text) == path


def test_errors_are_printable() -> None:
    error = TokmillError("what\x1b[2J", where="a\nerror: b\r", hint="c‮")
    assert is_printable(str(error))
    assert str(error).splitlines() == ["a\\nerror: b\\x0d: what\\x1b[2J", "hint: c\\u202e"]


@pytest.mark.parametrize(
    "name",
    ["-o.jsonl", "a\nb.jsonl", "a'\\\n\t.jsonl", os.fsdecode(b"caf\xe9 \xff.jsonl"), "‮ \x9b"],
)
def test_a_path_in_a_command_to_copy_is_one_word(name: str) -> None:
    """A shell passes it on as the path, and no program takes it for an option."""
    word = shell_word(name)
    assert is_printable(word) and "\n" not in word and not word.startswith("-")
    done = subprocess.run(
        ["bash", "-c", f"printf %s {word}"], capture_output=True, check=True,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    assert done.stdout.removeprefix(b"./") == os.fsencode(name)


@pytest.mark.parametrize("option", ["--field", "--glob", "--placeholder"])
def test_a_value_that_is_not_utf8_is_no_bug(option: str, tmp_path: Path, here: Any) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "a"}])
    command = ("build", "jsonl", path, "--tokenizer", TOKENIZER, "-o", tmp_path / "store")
    _, err = here(*command, option, os.fsdecode(b"caf\xe9"), code=2)
    assert err.startswith("error: caf\\xe9 is not UTF-8\nhint: ")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    """No file of the store gets the number of a stream, and what is printed."""
    path = jsonl(tmp_path / "x.jsonl", [{"text": f"record {i}"} for i in range(9)])
    store = tmp_path / "store"
    words = [sys.executable, "-m", "tokmill", "build", "jsonl", path, "-o", store]
    command = shlex.join(map(str, [*words, "--tokenizer", TOKENIZER, "--workers", 2]))
    done = subprocess.run(["bash", "-c", f"{command} {closed}"], capture_output=True, check=False)
    assert done.returncode == 0, done
    assert len(Store(store)) == 9 and b"Error" not in done.stderr
