"""What `tokmill build` of text says of inputs that are not quite what it takes them for."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from making import TOKENIZER, jsonl
from tokmill.store.manifest import Plan, read_checked
from tokmill.store.store import Store

NOISE = b"\0\xff\xfe" * 50


def test_files_that_are_no_text_are_named(tmp_path: Path, here: Any) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.md").write_text("words")
    (folder / "empty.md").write_text("")
    names = [f"in/{i}.png" for i in range(6)] + ["in/x\x1b[31m.bin"]
    for name in names:
        (tmp_path / name).write_bytes(NOISE)
    _, err = here("build", "text", "in", "-o", "s", "--tokenizer", TOKENIZER)
    assert "not text: in/0.png, in/1.png, in/2.png, in/3.png, in/4.png and 2 more" in err
    assert read_checked(tmp_path / "s/plan.json", Plan).not_text == names
    assert json.loads(here("inspect", "s", "--json")[0])["not_text"] == names
    shown, _ = here("inspect", "s")
    assert "in/5.png" in shown and "\x1b" not in shown


def test_json_lines_that_are_built_as_text_are_told(tmp_path: Path, here: Any) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    build = ("build", "text", "a.jsonl", "-o", "s", "--tokenizer", TOKENIZER)
    _, err = here(*build)
    assert "note: a.jsonl: JSON Lines" in err and "tokmill build jsonl" in err
    assert "JSON Lines" not in here(*build, "-q")[1]
    (tmp_path / "a.txt").write_text("one")
    _, err = here("build", "text", "a.txt", "-o", "t", "--tokenizer", TOKENIZER)
    assert "JSON Lines" not in err


def test_tasks_and_answers_are_joined_by_the_command_of_the_hint(tmp_path: Path, here: Any) -> None:
    row = {"instruction": "add", "input": "1 and 2", "output": "3"}
    jsonl(tmp_path / "a.jsonl", [row] * 3)
    build = ("build", "jsonl", "a.jsonl", "-o", "s", "--tokenizer", TOKENIZER)
    _, err = here(*build, code=1)
    flags = err.partition(": --field")[2].partition(" makes one document")[0]
    assert flags == " instruction --field input --field output"
    here(*build, *shlex.split("--field" + flags))
    assert Store(tmp_path / "s").record(0)["bytes"] >= len("add1 and 23")


def test_a_line_without_end_has_a_hint_of_its_own(tmp_path: Path, here: Any) -> None:
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(b'{"text": "' + b"word " * (14 << 20) + b'"}')
    build = ("-o", "s", "--tokenizer", TOKENIZER, "--workers", "0")
    _, err = here("build", "jsonl", "a.jsonl", *build, code=1)
    assert "too long" in err and "the line does not end" in err
    _, err = here("build", "text", "a.jsonl", "--record", "line", *build, code=1)
    assert "--record line reads" not in err and "hint: " in err


def test_more_rejects_than_records_end_a_small_build_too(tmp_path: Path, here: Any) -> None:
    build = ("build", "jsonl", "a.jsonl", "-o", "s", "--tokenizer", TOKENIZER)
    jsonl(tmp_path / "a.jsonl", [{"text": "one"}, "{", "["])
    _, err = here(*build, code=1)
    assert "2 of 3 records were rejected" in err and "--max-rejects 1" in err
    assert not (tmp_path / "s/manifest.json").exists()
    here(*build, "--max-rejects", "1")
    assert Store(tmp_path / "s").records == 1
    # A half says nothing yet.
    jsonl(tmp_path / "a.jsonl", [{"text": "one"}, "{"])
    _, err = here(*build, "--yes")
    assert "1 of 2 was rejected (50.0%)" in err


def test_a_record_is_explained_with_a_tokenizer_of_its_own(tmp_path: Path, here: Any) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "one"}] * 2)
    explain = ("build", "jsonl", "--vocab-size", "300", "--explain", "a.jsonl:2")
    for more in ((), ("a.jsonl",), ("a.jsonl", "-o", "s")):
        out, err = here(*explain, *more)
        assert "outcome    kept" in out and "ids  " in out and "not kept" in err
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    # The tokenizer of a store is the one that explains it.
    here("build", "jsonl", "a.jsonl", "-o", "s", "--vocab-size", "300")
    assert "unchanged" in here(*explain, "a.jsonl", "-o", "s")[1]


def test_a_limit_on_the_size_of_files_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word after word\n" * 30_000)
    code = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (99999, 99999)); "
    code += "from tokmill.cli import main; main()"
    build = ["build", "text", "a.txt", "-o", "s", "--tokenizer", str(TOKENIZER), "--workers", "0"]
    done = subprocess.run(
        [sys.executable, "-c", code, *build], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 5 and "ulimit -f" in done.stderr


def test_the_hint_for_utf_16_makes_a_file_that_is_built(tmp_path: Path, here: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "Größe"}\n'.encode("utf-16") * 2)
    build = ("build", "jsonl", "a.jsonl", "-o", "s", "--tokenizer", TOKENIZER)
    assert "`iconv -f UTF-16 -t UTF-8 " in here(*build, code=1)[1]
