"""Instructions and programs as kTrans has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import private_path
from tokmill.x86.graphs.graph_files import write_graph
from tokmill.x86.lift.cfg import lift
from tokmill.x86.tokens.rules import decode
from tokmill.x86.tokens.spellings import KTRANS, functions_of, ktrans, spell
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
    done = spell([str(program)], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "spelled.jsonl").read_text().splitlines()]
    assert (done.programs, done.functions) == (1, len(lines)) and len(lines) > 10
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


def test_what_a_stopped_run_left_behind_is_removed(tmp_path: Path, loop: Path) -> None:
    private_path(tmp_path / "loop.s.jsonl").write_text("half")
    (tmp_path / "thesis.tmp-1.doc").write_text("mine")
    spell([str(loop)], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop.s.jsonl", "thesis.tmp-1.doc"]


def test_small_functions_are_left_out(tmp_path: Path, loop: Path) -> None:
    assert spell([str(loop)], tmp_path, least=5).functions == 0
    graph = lift(loop)
    assert [len(one) for _, _, one in functions_of(graph, 4)] == [4]


def test_graphs_and_names_with_folders(tmp_path: Path, loop: Path) -> None:
    graph = lift(loop)
    graph.program = "bin/loop"
    write_graph(graph, tmp_path / "g.parquet")
    spell([str(tmp_path / "g.parquet")], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bin_loop.jsonl"]


def test_two_programs_never_go_to_one_file(tmp_path: Path, loop: Path) -> None:
    (tmp_path / "in/a").mkdir(parents=True)
    for name in ("a/b", "a_b"):
        (tmp_path / "in" / name).write_bytes(loop.read_bytes())
    with pytest.raises(UsageError, match="a/b and a_b would be written to the same file"):
        spell([str(tmp_path / "in")], tmp_path / "out")


def test_what_cannot_be_spelled(tmp_path: Path, loop: Path) -> None:
    (tmp_path / "text").write_text("no program")
    with pytest.raises(TokmillError, match="no program was read"):
        spell([str(tmp_path / "text")], tmp_path / "out")
    done = spell([str(tmp_path / "text"), str(loop)], tmp_path / "out")
    assert done.programs == 1 and list(done.refused) == ["text"]


def test_files_of_others_are_not_replaced(tmp_path: Path, loop: Path) -> None:
    spell([str(loop)], tmp_path / "o")
    written = [*(tmp_path / "o").iterdir()]
    ours = written[0].read_bytes()
    spell([str(loop)], tmp_path / "o")
    assert written[0].read_bytes() == ours
    written[0].write_text("mine")
    with pytest.raises(TokmillError, match="would be replaced"):
        spell([str(loop)], tmp_path / "o")
    assert written[0].read_text() == "mine"


def streams(code: str) -> dict[str, str]:
    instruction = next(decode(bytes.fromhex(code), 0x401000, 64))
    return {name: " ".join(values) for name, values in ktrans(instruction).items()}


def test_ktrans_streams() -> None:
    assert streams("8b45f8") == {
        "token": "mov eax , dword ptr [rbp-8]",
        "itype": "MOV MOV MOV MOV MOV MOV",
        "opnd_type": "[PAD] REGISTER [PAD] MEMORY MEMORY MEMORY",
        "reg_id": "[PAD] EAX [PAD] NONE NONE NONE",
        "reg_r": "[PAD] 0 [PAD] 1 1 1",
        "reg_w": "[PAD] 1 [PAD] 0 0 0",
        "eflags": "NULL NULL NULL NULL NULL NULL",
    }


@pytest.mark.parametrize(
    ("code", "token"),
    [
        ("4883ec20", "sub rsp , const"),
        ("4883ec08", "sub rsp , 8"),
        ("428b4c8310", "mov ecx , dword ptr [rbx+r8*4+const]"),
        ("64488b042528000000", "mov rax , qword ptr fs:[const]"),
        ("e820000000", "call const"),
        ("f0480fb10f", "lock cmpxchg qword ptr [rdi] , rcx"),
        ("c3", "ret"),
        ("62f17c5858c1", "vaddps zmm0{ru-sae} , zmm0 , zmm1"),
    ],
)
def test_ktrans_text(code: str, token: str) -> None:
    found = streams(code)
    assert found["token"] == token
    assert list(found) == list(KTRANS)
    assert {len(values.split()) for values in found.values()} == {len(token.split())}


def test_ktrans_commas_and_prefixes_are_no_operands() -> None:
    found = streams("f0480fb10f")
    assert found["opnd_type"] == "[PAD] [PAD] MEMORY MEMORY MEMORY [PAD] REGISTER"
    assert found["reg_w"] == "[PAD] [PAD] 1 1 1 [PAD] 0"
    assert streams("7402")["eflags"] == "READ_ZF READ_ZF"
