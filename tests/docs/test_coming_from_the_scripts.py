"""Every script of the old systems has its row, and the commands of the rows do what they say.

They run in the order of the page in one folder, on small inputs with the names that the page uses;
only the training is made smaller.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from scripts import ROW, SCRIPTS

import tokmill
from tokmill.cli import main

SMALL = "--steps 2 --set dim=64 --set layers=1 --set eval_rows=4 --set peak_flops=1e12"
CODE = re.compile(r"`([^`]+)`")
# What runs in the page is whole commands, and expressions of the public names.
COMMAND = re.compile(r"`(tokmill [^`]*|(?:list\()?tokmill\.[^`]+)`")


@pytest.fixture(scope="module")
def text(repository: Path) -> str:
    # The section has tests of its own.
    page = (repository / "docs/coming-from-the-scripts.md").read_text("utf-8")
    return page.split("## SemanticBBV")[0]


def rows(text: str) -> list[tuple[str, list[str], str]]:
    """System, scripts and what does their job, of each row."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith("| system |")
    ]
    return [(system, CODE.findall(names), here) for system, names, here in cells]


def commands(text: str) -> list[str]:
    found = [command for _, _, here in rows(text) for command in COMMAND.findall(here)]
    return [command.replace("\\|", "|") for command in found if command != "tokmill train"]


def test_every_script_has_a_row_or_a_page(text: str) -> None:
    shown = [(system, script) for system, scripts, _ in rows(text) for script in scripts]
    listed = text.split("## On pages of their own")[1]
    others = [
        (system, script)
        for system, scripts in re.findall(r"^- ([\w -]+): ((?:`[^`]+`,?\s*)+)", listed, re.M)
        for script in CODE.findall(scripts)
    ]
    others_of = {name: scripts for name, scripts in SCRIPTS.items() if name != "SemanticBBV"}
    every = [(system, script) for system, scripts in others_of.items() for script in scripts]
    state = {(system, script): SCRIPTS[system][script] for system, script in every}
    assert sorted(shown) == sorted(key for key in every if state[key] == ROW)
    assert sorted(others) == sorted(key for key in every if state[key] != ROW)


def test_every_row_names_something_that_runs(text: str) -> None:
    bare = [scripts for _, scripts, here in rows(text) if not COMMAND.search(here)]
    assert bare == [["optim.py"]]
    assert len(commands(text)) >= 20


def put_inputs(folder: Path, corpus: Any) -> None:
    """Write the inputs that the page names."""
    documents = corpus.txt.read_text("utf-8").split("<|endoftext|>")
    (folder / "train.txt").write_text("<|endoftext|>".join(documents[:60]))
    (folder / "val.txt").write_text("<|endoftext|>".join(documents[60:80]))
    (folder / "data/cleaned").mkdir(parents=True)
    lines = [json.dumps({"title": f"{i}", "text": one}) for i, one in enumerate(documents[:60])]
    (folder / "data/cleaned/a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "binaries").mkdir()
    program = shutil.which("true")
    assert program
    shutil.copy(program, folder / "binaries/program")
    for level, name in (("O0", "true"), ("O2", "false")):
        (folder / "versions" / level).mkdir(parents=True)
        shutil.copy(shutil.which(name) or program, folder / "versions" / level / "tool")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its own programs are not x86")
def test_the_commands_run_in_order(
    text: str, corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_inputs(tmp_path, corpus)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    for command in commands(text):
        if not command.startswith("tokmill "):
            assert len(eval(command, {"tokmill": tokmill, "list": list}))
            continue
        given = shlex.split(re.sub(r"--steps \d+", SMALL, command))[1:]
        with pytest.raises(SystemExit) as left:
            main(given)
        assert not left.value.code, command
    signal.signal(signal.SIGTERM, handler)
    written = {
        "lm/train.bin", "again/manifest.json", "run/model/model.safetensors",
        "data_tokenized/tokenized_data_part001.npz", "bert/vocab.txt",
    }  # fmt: skip
    assert not {name for name in written if not (tmp_path / name).exists()}
    assert tokmill.Store("quick").fingerprint == tokmill.Store("tokenized").fingerprint
    assert tokmill.Store("corpus").tokens == tokmill.Store("pairs").tokens > 0
