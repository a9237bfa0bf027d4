"""Calls that nobody returns to, or that ask where they are: retpolines, data behind a call."""

from pathlib import Path

import pytest

from tokmill.x86.lift.cfg import lift
from x86_programs import (
    C_SOURCE,
    CPP_SOURCE,
    assembled,
    blocks_of,
    check_graph,
    compiles,
    stripped,
    symbols,
    table_targets,
    true_functions,
)

GCC = [
    ("-mindirect-branch=thunk",),
    ("-mindirect-branch=thunk-inline",),
    ("-mindirect-branch=thunk", "-mfunction-return=thunk"),
    ("-mindirect-branch=thunk-inline", "-mfunction-return=thunk-inline"),
]
UNWIND = (".eh_frame", ".eh_frame_hdr")


def named(flags: tuple[str, ...]) -> str:
    return "".join(flags).replace("=", "-")


@pytest.mark.parametrize("bits", ["-m64", "-m32"])
@pytest.mark.parametrize("flags", [*GCC, ("-mretpoline",), ()], ids=named)
def test_functions_of_programs_against_speculation(
    built: Path, flags: tuple[str, ...], bits: str
) -> None:
    by = "clang" if flags == ("-mretpoline",) else "gcc"
    path = compiles(built, f"{by}{bits}{named(flags)}", C_SOURCE, "-O2", bits, *flags, by=by)
    functions, parts = true_functions(path)
    for one in (path, stripped(path), stripped(path, *UNWIND)):
        graph = lift(one)
        check_graph(graph, one)
        found = set(graph.function_address.tolist())
        assert found - functions - parts == set()
        assert len(functions - found) <= (one.name.endswith("hdr"))


@pytest.mark.parametrize("flags", [*GCC[:2], ("-mretpoline",)], ids=named)
def test_functions_of_cxx_against_speculation(built: Path, flags: tuple[str, ...]) -> None:
    by = "clang++" if flags == ("-mretpoline",) else "g++"
    path = compiles(built, f"cxx{by}{named(flags)}", CPP_SOURCE, "-O2", *flags, by=by)
    functions, parts = true_functions(path)
    for one in (path, stripped(path)):
        found = set(lift(one).function_address.tolist())
        assert functions <= found <= functions | parts


@pytest.mark.parametrize(("flags", "place"), [*zip(GCC, ("-no-pie", "-pie") * 2, strict=True)])
def test_labels_as_values_through_retpolines(
    built: Path, flags: tuple[str, ...], place: str
) -> None:
    path = compiles(built, f"go{place}{named(flags)}", C_SOURCE, "-O2", place, *flags)
    at = symbols(path)["interpret"]
    for one in (path, stripped(path), stripped(path, *UNWIND)):
        tables = table_targets(lift(one), at)
        assert tables and all(len(targets) == 4 for targets in tables)


def test_an_inline_retpoline_is_a_part_of_its_function(built: Path) -> None:
    source = r"""
    .globl _start
    _start: jmp three
    four:   call one
    two:    pause
            lfence
            jmp two
    one:    mov [rsp], rax
            ret
    three:  call four
    back:   ret
    """
    path = assembled(built, "inline-retpoline", source)
    at = symbols(path)
    for one in (path, stripped(path)):
        graph = lift(one)
        check_graph(graph, one)
        assert graph.function_address.tolist() == [at["_start"]]
        edges = {begin: ways for begin, (_, ways) in blocks_of(graph, at["_start"]).items()}
        assert edges == {
            at["_start"]: [("JUMP", at["three"])],
            at["four"]: [("FALL", at["two"]), ("JUMP", at["one"])],
            at["two"]: [("JUMP", at["two"])],
            at["one"]: [("INDIRECT", 0)],
            at["three"]: [("FALL", at["back"]), ("JUMP", at["four"])],
            at["back"]: [("RETURN", 0)],
        }
        assert graph.unresolved == [(at["one"] + 4, "indirect jump")]


def test_a_call_over_data_is_a_jump(built: Path) -> None:
    source = r"""
    .globl _start
    _start: call behind
            .asciz "and \x06\x06 this is text that decodes like code"
    behind: pop rsi
            mov eax, 1
            syscall
            ret
    """
    path = assembled(built, "over-data", source)
    at = symbols(path)
    for one in (path, stripped(path)):
        graph = lift(one)
        assert graph.function_address.tolist() == [at["_start"]] and graph.unresolved == []
        blocks = blocks_of(graph, at["_start"])
        assert blocks.pop(at["_start"]) == (5, [("JUMP", at["behind"])])
        assert min(blocks) == at["behind"], "text is no code"


def test_a_function_that_pops_its_return_address_is_one_where_others_call_it(built: Path) -> None:
    source = r"""
    .globl _start
    _start: call takes
            call takes
            ret
    .skip 1024, 0x90
    takes:  pop rcx
            push rcx
            ret
    """
    path = assembled(built, "takes", source)
    at = symbols(path)
    assert lift(path).function_address.tolist() == [at["_start"], at["takes"]]


def test_start_up_code_asks_where_it_is(built: Path) -> None:
    source = r"""
    .globl _start
    _start: call asks
            add ebx, 5
            call ends
            hlt
    asks:   mov ebx, [esp]
            ret
    .balign 16
    ends:   mov eax, 1
            int 0x80
            ret
    """
    path = assembled(built, "asks", source, bits=32)
    at = symbols(path)
    graph = lift(stripped(path))
    assert graph.function_address.tolist() == [at["_start"], at["ends"]]
    assert blocks_of(graph, at["_start"])[at["_start"]][1] == [
        ("FALL", at["_start"] + 5), ("JUMP", at["asks"])
    ]  # fmt: skip
