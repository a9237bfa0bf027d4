"""Hints that name a command: it exists with these options, and it works when it is followed."""

import ast
import bz2
import gzip
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from making import TOKENIZER
from tokmill.base.errors import UsageError
from tokmill.cli import application

SOURCES = Path(__file__).parents[2] / "src/tokmill"
HELPFUL = {"-h", "--help", "--version", "--install-completion"}


def named_commands() -> Iterator[tuple[str, str]]:
    """(place, command) of all texts in the sources that hold a command between backticks."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if not isinstance(node, ast.JoinedStr | ast.Constant):
                continue
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts
            )
            for match in re.finditer(r"`tokmill ([^`]+)`", text):
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", match[1]


@cache
def found(*words: str) -> Any:
    if not words:
        return application()
    group = found(*words[:-1])
    if not hasattr(group, "get_command"):
        return None
    try:
        return group.get_command(group.context_class(group), words[-1])
    except UsageError:
        return None


def wrong(command: str) -> str:
    """Return what of a command does not exist: its name, or an option."""
    words = command.replace("…", " ").split()
    names: list[str] = []
    for word in words:
        here = found(*names)
        if not hasattr(here, "get_command"):
            break
        if word.startswith("-") or word.isupper():  # KIND, or an option of the whole program
            return ""
        choices = word.split("|")
        if missing := [choice for choice in choices if found(*names, choice) is None]:
            return missing[0]
        names.append(choices[0])
    last = found(*names)
    assert last is not None
    known = {option for parameter in last.params for option in parameter.opts}
    known |= {option for parameter in last.params for option in parameter.secondary_opts}
    options = [word.split("=")[0] for word in words if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)]
    return next((one for one in options if one not in known | {"-h", "--help"}), "")


def test_commands_in_the_sources_exist_with_their_options() -> None:
    commands = sorted(set(named_commands()))
    assert len(commands) > 200
    assert [(place, one, bad) for place, one in commands if (bad := wrong(one))] == []
    assert wrong("build tsv FILE --vocab-size 8") == "--vocab-size"
    assert wrong("bild text") == "bild"


ROWS = [{"text": f"the text number {i}"} for i in range(9)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
BUILD = ("--tokenizer", str(TOKENIZER), "-o", "s")


def latin(folder: Path) -> tuple[str, ...]:
    (folder / "a.jsonl").write_bytes('{"text": "caf\u00e9"}\n'.encode("latin-1"))
    return ("jsonl", "a.jsonl")


def one_list(folder: Path) -> tuple[str, ...]:
    (folder / "a.json").write_text(json.dumps(ROWS, indent=1))
    return ("jsonl", "a.json")


def one_packed_list(folder: Path) -> tuple[str, ...]:
    (folder / "a.json.bz2").write_bytes(bz2.compress(json.dumps(ROWS, indent=1).encode()))
    return ("jsonl", "a.json.bz2")


def packed_corpus(folder: Path) -> tuple[str, ...]:
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"push rbp\nret\n"))
    return ("corpus", "a.txt.gz")


def other_suffix(folder: Path) -> tuple[str, ...]:
    (folder / "in").mkdir()
    (folder / "in/a.log").write_text(LINES)
    return ("jsonl", "in")


def table(folder: Path) -> tuple[str, ...]:
    lines = [f"the text {i} is one\t{i % 2}" for i in range(99)]
    (folder / "FILE.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    return ("tsv", "FILE.tsv", "!")


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [latin, one_list, one_packed_list, packed_corpus, other_suffix, table]
)
def test_a_hint_that_is_followed_leads_to_a_store(tmp_path: Path, tokmill: Any, make: Any) -> None:
    kind, name, *without = make(tmp_path)
    build = ("-o", "s") if without else BUILD
    failed = tokmill("build", kind, name, *build, code=None)
    hint = failed.stderr.partition("hint: ")[2]
    if match := re.search(r"--suffix \S+", hint):
        tokmill("build", kind, name, *build, *match[0].split())
        return
    command = re.search(r"`([^`]+)`", hint)
    line = (command[1] if command else hint.strip().splitlines()[0]).replace("NEW.txt", "NEW")
    line = re.sub(r"^.*?(?=python3 |\w+cat )", "", line) if not command else line
    line = line.replace("NEW", "new.txt").replace("python3", shlex.quote(sys.executable))
    line = line.replace("COLUMN", "sentence")
    line = line.replace("tokmill ", f"{shlex.quote(sys.executable)} -m tokmill ")
    subprocess.run(line, shell=True, check=True, cwd=tmp_path)
    if without:
        tokmill("build", kind, name, "--tokenizer", "TOKENIZER", *build)
        return
    made = line.rpartition("> ")[2].strip()
    tokmill("build", kind, made, *build, "--fresh")
