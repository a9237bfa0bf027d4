"""A search that does not go to the end says so, wherever its result is shown."""

from pathlib import Path

import pytest

import tokmill
from tokmill.cli import main
from tokmill.report.describe.inspect import describe
from tokmill.x86.graphs.graph_files import read_graph, write_graph
from tokmill.x86.lift import assign_functions as functions
from tokmill.x86.lift import cfg
from tokmill.x86.lift.cfg import lift
from x86_programs import C_SOURCE, assembled, compiles, stripped


@pytest.fixture
def bare(built: Path) -> Path:
    """A program whose functions are to be searched for, in more than one round."""
    path = compiles(built, "cut-short", C_SOURCE, "-O2")
    return stripped(path, ".eh_frame", ".eh_frame_hdr")


def test_rounds_that_were_not_enough(
    bare: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lift(bare).cut_short == ()
    monkeypatch.setattr(cfg, "ROUNDS", 1)
    graph = lift(bare)
    why = "the search for functions ended after 1 rounds"
    assert graph.cut_short == (why,)
    write_graph(graph, tmp_path / "g.parquet")
    assert describe(tmp_path / "g.parquet")["not_complete"] == [why]
    assert read_graph(tmp_path / "g.parquet").cut_short == (why,)
    with pytest.raises(SystemExit):
        main(["cfg", str(bare), "-o", str(tmp_path / "graphs"), "--quiet"])
    assert f"not complete: 1 program: {why}" in capsys.readouterr().out
    # Of the program, and of the graph that was made of it.
    for number, source in enumerate((bare, tmp_path / "g.parquet")):
        store = tokmill.build("x86", [source], tmp_path / str(number))
        assert store.manifest.notes[f"programs that are not complete: {why}"] == 1


def test_code_that_too_many_functions_share(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(
        f".type f{i}, @function\n.globl f{i}\nf{i}: inc rax\njmp tail\n" for i in range(8)
    )
    tail = "tail: " + "".join(f"test rax, rax\nje t{i}\nt{i}:\n" for i in range(50)) + "ret\n"
    path = assembled(built, "tangled", ".globl _start\n_start: jmp f0\n" + text + tail)
    assert lift(path).cut_short == ()
    monkeypatch.setattr(functions, "SHARED", 1)
    assert lift(path).cut_short == (functions.TANGLED,)
