"""Calls through registers whose number is known: the large code model."""

from pathlib import Path

import pytest

from tokmill.x86.lift.cfg import lift
from x86_programs import (
    C_SOURCE,
    assembled,
    blocks_of,
    check_graph,
    compiles,
    stripped,
    symbols,
    true_functions,
)


@pytest.mark.parametrize("by", ["gcc", "clang"])
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_functions_of_the_large_code_model(built: Path, by: str, level: str) -> None:
    flags = (level, "-mcmodel=large", "-no-pie", "-fno-pic")
    path = compiles(built, f"far-{by}{level}", C_SOURCE, *flags, by=by)
    functions, parts = true_functions(path)
    for one in (path, stripped(path), stripped(path, ".eh_frame", ".eh_frame_hdr")):
        graph = lift(one)
        check_graph(graph, one)
        found = set(graph.function_address.tolist())
        assert functions - found == set()
        # Without unwind tables a label whose address is taken may look like a function.
        assert len(found - functions - parts) <= one.name.endswith("hdr")


def test_only_a_number_that_is_still_there_counts(built: Path) -> None:
    source = r"""
    .globl _start
    _start: movabs rax, offset one
            mov edi, 1
            call rax
            movabs rbx, offset two
            jmp over
    over:   call rbx
            movabs r11, offset data
            mov r11, [r11]
            call r11
            movabs r9, offset two
            jmp r9
    .balign 16
    one:    ret
    .balign 16
    two:    ret
    .data
    data:   .quad one
    """
    path = assembled(built, "register-calls", source)
    at = symbols(path)
    ways = [edge for _, edges in blocks_of(lift(path), at["_start"]).values() for edge in edges]
    assert [edge for edge in ways if edge[0] != "FALL"] == [
        ("CALL", at["one"]), ("JUMP", at["over"]), ("INDIRECT", 0), ("INDIRECT", 0),
        ("JUMP", at["two"]),
    ]  # fmt: skip


@pytest.mark.parametrize("by", ["gcc", "clang"])
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_undefined_symbols_of_the_large_code_model(built: Path, by: str, level: str) -> None:
    source = """
    #include <stdlib.h>
    int f(int a) { if (a > 3) abort(); return a + rand(); }
    """
    flags = (level, "-c", "-mcmodel=large", "-fno-pic")
    path = compiles(built, f"far-{by}{level}.o", source, *flags, by=by)
    graph = lift(path, facts=True)
    where = dict(zip(graph.import_name, graph.import_address.tolist(), strict=True))
    ends = [edges for _, edges in blocks_of(graph, int(graph.function_address[0])).values()]
    assert [("CALL", where["abort"])] in ends
    assert any(("CALL", where["rand"]) in edges and len(edges) == 2 for edges in ends)
    assert not graph.unresolved
