"""`tokmill build x86` as a person types it, in this process."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tokmill.base.errors import UsageError
from tokmill.report.pages.figures import frequency
from tokmill.x86.tokens.rules import tokenize_bytes
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
    assert "items       2" in plan and "left out    1 file that is no program" in plan
    assert "lifter = " in plan and "iced-x86" in plan
    out, talk = here("build", "x86", "in", "-o", "s")
    assert "rejected: 1 " in out and re.search(r"notes: .*\b1 program\b", out)
    assert "left out of the folders: 1 file that is no program" in talk
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
    assert "no record was found (1 not a program)" in error
    assert not Path("s").exists()
    _, error = here("build", "x86", "in", "-o", "t", "--rules", "semanticbbv", code=2)
    assert "tokmill vocab build x86 INPUT… --rules semanticbbv -o DIR" in error
    _, error = here("build", "x86", "in", "-o", "t", "--walks", 3, code=2)
    assert "hint: --unit walk makes walks" in error


def test_a_file_that_was_named_and_is_refused(here: Command, folder: Path) -> None:
    out, error = here("build", "x86", "in/whole", "in/half", "-o", "s", code=1)
    assert "in/half: refused, the file is cut off" in error and re.search(r"\b1 program\b", out)
    _, error = here("build", "x86", "in", "-o", "t", "--max-rejects", 0, code=1)
    assert "1 of 2 items were rejected (1 the file is cut off)" in error


def test_the_help_of_a_kind_shows_what_it_takes(here: Command, folder: Path) -> None:
    flags = ("--tokenizer", "--role", "--engine")
    for kind, shown in (("x86", 0), ("token-dicts", 0), ("npz", 2), ("select", 2), ("text", 3)):
        help_text, _ = here("build", kind, "--help")
        assert [flag in help_text for flag in flags] == [True] * shown + [False] * (3 - shown), kind
    _, error = here("build", "x86", "in", "-o", "s", "--tokenizer", "t.json", code=2)
    assert "x86 code has no tokenizer\nhint: --vocab names vocabularies" in error
    _, error = here("build", "x86", "in", "-o", "s", "--engine", "tokenizers", code=2)
    assert "No such option: --engine" in error


def test_many_unknown_tokens_are_a_warning(here: Command, tmp_path: Path) -> None:
    code = bytes.fromhex("554889e5c3")
    for name, rules in (("a", "tokmill"), ("b", "semanticbbv")):
        (tmp_path / f"{name}.pkl").write_bytes(pickle.dumps([tokenize_bytes(code, 0, rules)]))
        here("build", "token-dicts", f"{name}.pkl", "-o", name, "--rules", rules, "-q")
    out, talk = here("build", "token-dicts", "a.pkl", "-o", "c", "--vocab", "b")
    # Of the 8 tokens 4 are the "-" of the other rules and the mnemonics are the same.
    assert "tokens of eflag replaced by unk (100.0%)" in out
    assert "warning: unknown to the vocabulary: " in talk and "100.0% of eflag" in talk
    assert "of mne" not in talk and "hint:" in talk
    assert "warning" not in here("build", "token-dicts", "a.pkl", "-o", "d", "--vocab", "a")[1]


def test_places_in_code_are_addresses(here: Command, folder: Path) -> None:
    here("build", "x86", "in", "-o", "s", "-q", code=0)
    rejects, _ = here("store", "rejects", "s")
    assert "half: rejected, " in rejects and "byte" not in rejects
    head = json.loads(here("inspect", "s", "--head", 1, "--json")[0])["head"]
    assert head[0]["at"] == f"address {head[0]['address']:#x}"
    # Of a store that was made of another, the place is the number of a record.
    here("build", "select", "s", "-o", "t", "-q", "--min-length", 1)
    assert " record 1\n" in here("inspect", "t", "--head", 2)[0]


def test_training_before_building(here: Command, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('source = "x86"\n[options]\nunit = "function"\n')
    _, error = here("train", "r.toml", "-o", "run", code=2)
    assert "a recipe of the build x86, not of a training" in error
    assert "hint: tokmill build r.toml INPUT… -o STORE" in error
    _, error = here("train", "in", "-o", "run", code=1)
    assert "the folder holds no store" in error and "hint: `tokmill inspect" in error
    _, error = here("build", "token-dicts", "in/whole", "-o", "s", code=1)
    assert "this is not a sound pickle: no operation of pickles" in error
    _, error = here("plot", "lengths", "in/whole", "-o", "f.svg", code=1)
    assert "in/whole: is a file, not a store" in error and "hint:" in error
    with pytest.raises(UsageError, match="no rules are called 'x'"):
        tokenize_bytes(b"\xc3", 0, "x")


def test_looking_at_columns_whose_tokens_are_known(here: Command, folder: Path) -> None:
    here("build", "x86", "in", "-o", "s", "-q")
    shown, _ = here("inspect", "s")
    lines = [line for line in shown.splitlines() if " ids, " in line]
    assert len(lines) == 6 and max(map(len, lines)) < 140 and "pad 0" in lines[0]
    stats, _ = here("inspect", "s", "--stats")
    assert "READ_WRITE" in stats and " token " in stats
    assert frequency([Path("s")], column="mne").title == "Frequency of ids of mne"
    assert frequency([Path("s")]).title == "Frequency of ids of asm"
    for form in ("bin", "npz"):
        _, error = here("store", "export", form, "s", "-o", "out", code=2)
        assert "hint: --column chooses one of asm, mne, type" in error
