"""`tokmill build x86` as a person types it, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from x86_programs import C_SOURCE, compiles

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A program, half a program and a text."""
    found = tmp_path / "in"
    found.mkdir()
    data = compiles(tmp_path, "program", C_SOURCE, "-O2", "-g").read_bytes()
    (found / "whole").write_bytes(data)
    (found / "half").write_bytes(data[:1500])
    (found / "text").write_text("no program")
    return found


def test_programs_to_a_store_that_shows_a_function(here: Command, folder: Path) -> None:
    plan, _ = here("build", "x86", "in", "-o", "s", "--dry-run")
    assert "items       2" in plan and "no input    1 files of the folders" in plan
    assert "lifter = " in plan and "iced-x86" in plan
    out, talk = here("build", "x86", "in", "-o", "s")
    assert "rejected: 1 " in out and "1 programs" in out
    assert "files of the folders that are no input: 1" in talk
    assert "half" in here("store", "rejects", "s")[0]
    shown, _ = here("inspect", "s", "--where", "function = checked")
    assert "\nRET" in shown and "\nfunction: checked\n" in shown and "\naddress: 0x" in shown
    facts = json.loads(here("inspect", "s", "--where", "length > 20", "--head", 1, "--json")[0])
    assert facts["head"][0]["level"] == "O2" and facts["head"][0]["tokens"] > 20
    again, _ = here("build", "x86", "in", "-o", "s", "-q", "--json")
    assert json.loads(again)["rejected"]


def test_what_cannot_be_built(here: Command, folder: Path) -> None:
    (folder / "saved_index.pkl").write_bytes(b"\x80\x04}.")
    _, error = here("build", "x86", "in", "-o", "s", code=1)
    assert "hint: make graphs of it first: tokmill cfg in/saved_index.pkl -o GRAPHS" in error
    _, error = here("build", "x86", "in/text", "-o", "s", code=1)
    assert "not one record was found (1 no program file)" in error
    _, error = here("build", "x86", "in", "-o", "t", "--rules", "semanticbbv", code=2)
    assert "tokmill vocab build x86 INPUT… --rules semanticbbv -o DIR" in error
    _, error = here("build", "x86", "in", "-o", "t", "--walks", 3, code=2)
    assert "hint: --unit walk makes walks" in error
