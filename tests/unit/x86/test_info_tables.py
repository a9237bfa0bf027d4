"""Programs in the shape of GHC's: tables next to code, closures in data, no frames, no calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.graph import Graph
from tokmill.x86.image.program import open_program
from tokmill.x86.lift import cfg
from tokmill.x86.lift.cfg import lift
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.data.info_tables import find_info_tables
from x86_programs import assembled, blocks_of, check_graph, compiles, stripped, symbols

FUNCTION, THUNK_1, STATIC_THUNK, RETURN, CONSTRUCTOR = 14, 16, 21, 30, 2
COUNT = 6
PIC = ("-nostdlib", "-shared", "-Wl,--build-id=none")


def table(name: str, kind: int, layout: int = 0, more: str = "", refers: str = "0") -> str:
    """Return the info table of code that follows."""
    return f"""
        .p2align 3
        {more}
        .quad {layout}
        .long {kind}, {refers}
        {name}:
    """


def program(fixed: bool) -> tuple[str, set[str]]:
    """Return assembler text (Intel syntax) and the names of its functions."""
    take = "mov {0}, offset {1}" if fixed else "lea {0}, [rip + {1}]"
    text, data = "", '.data\n.p2align 3\nname: .asciz "Just"\n.p2align 3\n'
    names: set[str] = set()
    for i in range(COUNT):
        # A static function that evaluates its argument and goes on at a return point, which
        # chooses by the argument's tag; 0 is a tag that nothing has.
        text += table(f"fun{i}", FUNCTION, more=".long 5, 1")
        text += f"""
            lea rax, [rbp - 16]
            cmp rax, r15
            jb full{i}
            {take.format("rax", f"back{i}")}
            mov [rbp - 16], rax
            mov rbx, r14
            add rbp, -16
            test bl, 7
            jne back{i}
            jmp [rbx]
            full{i}:
            {take.format("rbx", f"closure{i}")}
            jmp [r13 - 8]
            before{i}:
            mov rax, [rbp + 8]
            jmp shared{i}
        """
        text += table(f"back{i}", RETURN, 1, refers=f"closure{i} - back{i}")
        text += "mov rcx, rbx\nand ecx, 7\n"
        if fixed:
            text += f"jmp [8 * rcx + cases{i}]\n"
        else:
            text += f"lea rdx, [rip + cases{i}]\nmovsxd rcx, dword ptr [rdx + 8 * rcx]\n"
            text += "add rdx, rcx\njmp rdx\n"
        cases = [f"one{i}", f"two{i}", f"one{i}", f"three{i}", *[f"one{i}"] * 3]
        text += f"""
            one{i}:
            add r12, 16
            cmp r12, [r13 + 856]
            ja before{i}
            shared{i}:
            mov rbx, [rbx + 6]
            {take.format("rax", f"thunk{i}")}
            mov [r12 - 8], rax
            add rbp, 16
            jmp [rbp]
            two{i}:
            add rbp, 16
            jmp fun{(i + 1) % COUNT}
            three{i}:
            {take.format("rax", "frame")}
            mov [rbp], rax
            jmp [rbx]
        """
        text += table(f"thunk{i}", THUNK_1, 1)
        text += "mov rbx, [rbx + 16]\njmp [rbx]\n"
        text += table(f"constant{i}", STATIC_THUNK, refers=f"closure{i} - constant{i}")
        text += f"{take.format('rax', 'frame')}\nmov [rbp - 16], rax\njmp fun{i}\n"
        text += table(f"just{i}", CONSTRUCTOR, 1, f".quad name - just{i}", str(i))
        text += "inc rbx\njmp [rbp]\n"
        # Arguments of no usual kind, taken from the stack by code without a table.
        text += f".p2align 3\nslow{i}: mov r14, [rbp]\nadd rbp, 8\njmp wide{i}\n"
        more = f".quad slow{i} - wide{i}, 1\n.long 0, 1"
        text += table(f"wide{i}", FUNCTION, more=more) + "mov rbx, r14\njmp [rbp]\n"
        data += f"closure{i}: .quad fun{i}, 0, constant{i}, 0, wide{i}, just{i}\n"
        data += f"cases{i}: .quad 0\n"
        for case in cases:
            data += f".quad {case}\n" if fixed else f".quad {case} - cases{i}\n"
        names |= {f"{name}{i}" for name in ("fun", "thunk", "constant", "just", "slow", "wide")}
    # A return point of the runtime, which many put on the stack: a function of its own.
    text += table("frame", RETURN, 1) + "add rbp, 16\njmp [rbp]\n"
    # Of it what data alone leads to stays: strings and numbers in data are no functions.
    text += ".globl _start\n_start: jmp fun0\n"
    return text + data, names | {"frame", "_start"}


def built_as(folder: Path, fixed: bool) -> tuple[Path, set[str]]:
    source, names = program(fixed)
    if fixed:
        return assembled(folder, "haskell", source), names
    source = ".intel_syntax noprefix\n.text\n" + source
    return compiles(folder, "haskell-pic.s", source, *PIC), names


@pytest.mark.parametrize("fixed", [True, False])
def test_functions_of_tables_next_to_code(built: Path, fixed: bool) -> None:
    path, names = built_as(built, fixed)
    where = symbols(path)
    graph = lift(stripped(path))
    check_graph(graph, path)
    found = set(graph.function_address.tolist())
    lost = {name for name in names if where[name] not in found}
    assert lost == (set() if fixed else {"_start"} & lost), "all, but what is not exported"
    assert found <= {where[name] for name in names}
    for i in range(COUNT):
        blocks = blocks_of(graph, where[f"fun{i}"])
        inner = {f"{name}{i}" for name in ("fun", "back", "one", "two", "three", "full", "shared")}
        assert {where[name] for name in inner} <= set(blocks), "return points are in their function"
        edges = blocks[where[f"back{i}"]][1]
        cases = {where[f"{name}{i}"] for name in ("one", "two", "three")}
        assert set(edges) == {("INDIRECT", case) for case in cases}, "0 is no case"


@pytest.mark.parametrize("fixed", [True, False])
def test_tables_are_no_code(built: Path, fixed: bool) -> None:
    path, _ = built_as(built, fixed)
    tables = find_info_tables(opened := open_program(stripped(path)), Code(opened))
    assert len(tables.end) == 6 * COUNT + 1
    size = {"back": 16, "thunk": 16, "constant": 16, "fun": 24, "just": 24, "wide": 40}
    where = symbols(path)
    code = Code(opened)
    wanted = {(where[f"{n}{i}"] - s, where[f"{n}{i}"]) for n, s in size.items() for i in range(6)}
    wanted |= {(where["frame"] - 16, where["frame"])}
    begin, end = code.address(tables.begin).tolist(), code.address(tables.end).tolist()
    assert set(zip(begin, end, strict=True)) == wanted
    graph = lift(stripped(path))
    assert not _inside(graph, begin, end)


def _inside(graph: Graph, begin: list[int], end: list[int]) -> list[int]:
    """Return the addresses of blocks that share bytes with some ranges."""
    first = graph.block_address.astype(np.int64)
    last = first + np.diff(graph.block_bytes)
    found = []
    for low, high in zip(begin, end, strict=True):
        found += first[(first < high) & (last > low)].tolist()
    return found


def test_other_programs_have_none(built: Path) -> None:
    # The same bytes, but nothing in data that points to static functions.
    source, _ = program(True)
    code, data = source.split(".data\n")
    lines = [line for line in data.splitlines() if not line.startswith("closure")]
    lines += [f"closure{i}: .quad 0, {i}, 14, 30, 21, 0" for i in range(COUNT)]
    path = assembled(built, "no-haskell", code + ".data\n" + "\n".join(lines))
    opened = open_program(path)
    assert not len(find_info_tables(opened, Code(opened)).end)


def test_rounds_do_not_grow_with_what_data_points_to(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, names = built_as(built, True)
    monkeypatch.setattr(cfg, "ROUNDS", 4)
    assert len(lift(stripped(path)).function_address) == len(names)
