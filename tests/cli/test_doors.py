"""What a stranger types next: hints and `next` lines that hold commands which run."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokmill.report.describe.inspect import describe

Tokmill = Callable[..., Any]


def test_a_program_can_be_compared_and_its_graphs_built(tokmill: Tokmill, tmp_path: Path) -> None:
    program = tmp_path / "true"
    shutil.copy(shutil.which("true") or "", program)
    assert describe(program)["or"] == f"tokmill diff {program} OTHER --html page.html"
    tokmill("cfg", program, "-o", tmp_path / "graphs", "--quiet")
    says = describe(tmp_path / "graphs")["next"]
    assert says == f"tokmill build x86 {tmp_path / 'graphs'} -o STORE"
    store = tmp_path / "store"
    tokmill(*shlex.split(says.replace("STORE", str(store)))[1:], "--quiet")
    tokmill("similarity", "query", store, "--function", "main", "--program", "true", code=None)


def test_other_uses_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.bb").write_text("T:1:20 :2:30\nT:1:50\n")
    (tmp_path / "a.mlir").write_text("func.func @main() { return }\n")
    (tmp_path / "a.onnx").write_bytes(b"\x08\x08")
    assert "tokmill simpoint" in describe(tmp_path / "a.bb")["or"]
    assert "tokmill rl search" in describe(tmp_path / "a.mlir")["or"]
    assert "tokmill rl tune" in describe(tmp_path / "a.onnx")["or"]


def test_from_a_table_to_a_classifier(tokmill: Tokmill, tmp_path: Path) -> None:
    table = tmp_path / "a.tsv"
    table.write_text("text\tkind\n" + "a dog barks\tdog\na cat sleeps\tcat\n" * 9)
    words = ["tokenizer", "train", table, "--model", "wordpiece", "--vocab-size", 60]
    out = ["-o", tmp_path / "words"]
    assert "--field" in tokmill(*words, *out, code=2).stderr
    tokmill(*words, "--field", "text", *out)
    named = ["--sentence", "text", "--label-column", "kind", "-o", tmp_path / "store"]
    tokmill("build", "tsv", table, "--tokenizer", tmp_path / "words", *named, "--quiet")
    assert "tokmill train classify" in describe(tmp_path / "store")["next"]


def test_help_of_a_build_shows_a_command(tokmill: Tokmill) -> None:
    help_text = " ".join(tokmill("build", "jsonl", "--help").stdout.split())
    assert "tokmill build jsonl INPUT --vocab-size 8192 -o STORE" in help_text
