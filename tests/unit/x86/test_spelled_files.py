"""Programs written out as kTrans and asm2vec have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokmill.errors import TokmillError, UsageError
from tokmill.files import private_path
from tokmill.x86.graphs.files import write_graph
from tokmill.x86.lift.cfg import lift
from tokmill.x86.tokens.rules import decode
from tokmill.x86.tokens.spelled_files import functions_of, spell
from tokmill.x86.tokens.spellings import KTRANS, ktrans
from x86_programs import C_SOURCE, assembled, compiles

LOOP = """
.globl _start
.type _start, @function
_start:
    mov ecx, 77
again:
    dec ecx
    jne again
    ret
.size _start, .-_start
"""


@pytest.fixture(scope="session")
def program(built: Path) -> Path:
    return compiles(built, "spelled", C_SOURCE, "-O1")


@pytest.fixture(scope="session")
def loop(built: Path) -> Path:
    return assembled(built, "loop", LOOP)


def test_ktrans_a_line_a_function(tmp_path: Path, program: Path) -> None:
    done = spell([str(program)], tmp_path, "ktrans")
    lines = [json.loads(line) for line in (tmp_path / "spelled.jsonl").read_text().splitlines()]
    assert (done.programs, done.functions, done.files) == (1, len(lines), 1) and len(lines) > 10
    graph = lift(program)
    assert [line["address"] for line in lines] == graph.function_address.tolist()
    [main] = [line for line in lines if line["function"] == "main"]
    assert list(main) == ["function", "address", *KTRANS]
    assert len({len(main[stream]) for stream in KTRANS}) == 1
    place = graph.function_name.index("main")
    blocks = graph.block_bytes[graph.function_blocks[place : place + 2]]
    code = graph.code[slice(*blocks.tolist())].tobytes()
    tokens = [ktrans(one)["token"] for one in decode(code, main["address"], 64)]
    assert len(main["token"]) == sum(map(len, tokens)) and main["token"][0] == tokens[0][0]


def test_asm2vec_a_file_a_function(tmp_path: Path, loop: Path) -> None:
    done = spell([str(loop)], tmp_path, "asm2vec")
    assert (done.functions, done.files) == (1, 1)
    [path] = tmp_path.iterdir()
    assert path.name == "loop.s-401000"
    assert path.read_text() == (
        " .name _start\n .offset 0000000000401000\n .file loop.s\n"
        " mov ecx,CONST\nLABEL1:\n dec ecx\n jne LABEL1\n ret\n"
    )


def test_what_a_stopped_run_left_behind_is_removed(tmp_path: Path, loop: Path) -> None:
    private_path(tmp_path / "loop.s-401000").write_text("half")
    (tmp_path / "thesis.tmp-1.doc").write_text("mine")
    spell([str(loop)], tmp_path, "asm2vec")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop.s-401000", "thesis.tmp-1.doc"]


def test_small_functions_are_left_out(tmp_path: Path, loop: Path) -> None:
    assert spell([str(loop)], tmp_path, "asm2vec", least=5).files == 0
    graph = lift(loop)
    assert [len(one) for _, _, one in functions_of(graph, 4)] == [4]


def test_graphs_and_names_with_folders(tmp_path: Path, loop: Path) -> None:
    graph = lift(loop)
    graph.program = "bin/loop"
    write_graph(graph, tmp_path / "g.parquet")
    spell([str(tmp_path / "g.parquet")], tmp_path / "out", "ktrans")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bin_loop.jsonl"]


def test_two_programs_never_go_to_one_file(tmp_path: Path, loop: Path) -> None:
    (tmp_path / "in/a").mkdir(parents=True)
    for name in ("a/b", "a_b"):
        (tmp_path / "in" / name).write_bytes(loop.read_bytes())
    with pytest.raises(UsageError, match="a/b and a_b would be written to the same file"):
        spell([str(tmp_path / "in")], tmp_path / "out", "ktrans")


def test_what_cannot_be_spelled(tmp_path: Path, loop: Path) -> None:
    with pytest.raises(UsageError, match="no spelling is called 'palmtree'"):
        spell([str(loop)], tmp_path / "out", "palmtree")
    (tmp_path / "text").write_text("no program")
    with pytest.raises(TokmillError, match="no program was read"):
        spell([str(tmp_path / "text")], tmp_path / "out", "ktrans")
    done = spell([str(tmp_path / "text"), str(loop)], tmp_path / "out", "ktrans")
    assert done.programs == 1 and list(done.refused) == ["text"]


@pytest.mark.parametrize("spelling", ["ktrans", "asm2vec"])
def test_files_of_others_are_not_replaced(tmp_path: Path, loop: Path, spelling: str) -> None:
    spell([str(loop)], tmp_path / "o", spelling)
    written = [*(tmp_path / "o").iterdir()]
    ours = written[0].read_bytes()
    spell([str(loop)], tmp_path / "o", spelling)
    assert written[0].read_bytes() == ours
    written[0].write_text("mine")
    with pytest.raises(TokmillError, match="would be replaced"):
        spell([str(loop)], tmp_path / "o", spelling)
    assert written[0].read_text() == "mine"
