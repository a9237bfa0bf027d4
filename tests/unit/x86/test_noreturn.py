"""Calls that do not come back: blocks end there, and nothing behind them is followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokmill.x86.lift.cfg import lift
from tokmill.x86.lift.noreturn import BY_STATUS, NAMES, ORDINARY
from x86_programs import C_SOURCE, assembled, blocks_of, compiles, stripped, symbols

NAMED = r"""
#include <stdlib.h>
#include <setjmp.h>
#include <assert.h>
#include <err.h>
#include <error.h>
jmp_buf place;
__attribute__((noinline)) int with_abort(int x) { if (x) abort(); return 1; }
__attribute__((noinline)) int with_exit(int x) { if (x) exit(x); return 2; }
__attribute__((noinline)) int with_assert(int x) { assert(x != 5); return 3; }
__attribute__((noinline)) int with_jump(int x) { if (x) longjmp(place, 1); return 4; }
__attribute__((noinline)) int with_err(int x) { if (x) err(1, "no"); return 5; }
__attribute__((noinline)) int with_error(int x) { if (x) error(2, 0, "no"); return 6; }
__attribute__((noinline)) int with_warning(int x) { if (x) error(0, 0, "well"); return 7; }
int main(int argc, char **argv) {
    return with_abort(argc) + with_exit(argc) + with_assert(argc) + with_jump(argc)
        + with_err(argc) + with_error(argc) + with_warning(argc);
}
"""


def silent_calls(path: Path, function: int) -> int:
    """Return how many blocks of a function end in a call and go on nowhere."""
    kinds = [[kind for kind, _ in edges] for _, edges in blocks_of(lift(path), function).values()]
    return sum(found in (["CALL"], ["INDIRECT"]) for found in kinds)


@pytest.mark.parametrize("flags", [("-O0",), ("-O1",), ("-O1", "-fno-plt"), ("-O1", "-m32")])
def test_functions_that_are_known_by_name(built: Path, flags: tuple[str, ...]) -> None:
    # err and error are declared so; without that the compiler writes on behind their calls.
    source = NAMED.replace("#include <err.h>", "void err(int, const char *, ...);")
    source = source.replace("#include <error.h>", "void error(int, int, const char *, ...);")
    path = compiles(built, "named" + "".join(flags), source, *flags)
    at = symbols(path)
    for one in (path, stripped(path)):
        for name in ("abort", "exit", "assert", "jump", "err", "error"):
            assert silent_calls(one, at["with_" + name]) == 1, name
        assert silent_calls(one, at["with_warning"]) == 0


def test_what_calls_only_such_functions_is_one_itself(built: Path) -> None:
    for level in ("-O0", "-O2"):
        path = compiles(built, "propagated" + level, C_SOURCE, level)
        at = symbols(path)
        for one in (path, stripped(path)):
            assert silent_calls(one, at["checked"]) == 1
            assert silent_calls(one, at["die"]) == 1
            assert silent_calls(one, at["give_up"]) >= 1


def test_names_that_may_be_a_programs_own_are_names() -> None:
    assert ORDINARY < NAMES and not BY_STATUS & NAMES


def test_a_name_that_a_program_gives_to_something_else(built: Path) -> None:
    source = r"""
    #include <stdio.h>
    __attribute__((noinline)) int err(int x) { puts("well"); return x; }
    int main(int argc, char **argv) { return err(argc) + 1; }
    """
    path = compiles(built, "own-err", source, "-O1", "-fno-builtin", "-static-libgcc")
    assert silent_calls(path, symbols(path)["main"]) == 0


def test_what_lies_behind_such_a_call_is_not_followed(built: Path) -> None:
    source = r"""
    .globl _start, stops, deep
    _start: call deep
            .byte 0x06, 0x06
    deep:   call stops
            .byte 0x06
    stops:  mov eax, 60
            syscall
            ud2
    """
    path = assembled(built, "deep", source)
    graph = lift(path)
    assert graph.unresolved == []
    assert blocks_of(graph, symbols(path)["_start"]) == {
        symbols(path)["_start"]: (5, [("CALL", symbols(path)["deep"])])
    }


def test_a_function_that_only_calls_itself_never_returns(built: Path) -> None:
    source = r"""
    .globl _start, endless
    _start:  call endless
             ret
    endless: nop
             call endless
             ret
    """
    path = assembled(built, "endless", source)
    at = symbols(path)
    assert silent_calls(path, at["_start"]) == 1


def test_a_recursion_that_ends_comes_back(built: Path) -> None:
    source = r"""
    .globl _start, count
    _start: call count
            ret
    count:  dec edi
            jz done
            call count
            ret
    done:   ret
    """
    path = assembled(built, "recursion", source)
    at = symbols(path)
    assert silent_calls(path, at["_start"]) == silent_calls(path, at["count"]) == 0


def test_what_jumps_to_where_nobody_knows_may_come_back(built: Path) -> None:
    source = ".globl _start, f\n_start: call f\nret\nf: jmp [rdi]\n"
    path = assembled(built, "unknown", source)
    assert silent_calls(path, symbols(path)["_start"]) == 0


def test_code_that_goes_on_with_another_stack_comes_back(built: Path) -> None:
    source = r"""
    .globl _start, work, runtime.morestack
    _start: call work
            ret
    work:   cmp rsp, rdi
            jbe more
            call other
            ret
    more:   call runtime.morestack
            jmp work
    other:  ret
    runtime.morestack:
            mov rsp, rdi
            call stops
            ud2
    stops:  hlt
    .size runtime.morestack, . - runtime.morestack
    """
    path = assembled(built, "switching", source)
    at = symbols(path)
    blocks = blocks_of(lift(path), at["work"])
    behind = blocks[at["more"]][1][1]
    assert behind[0] == "FALL" and blocks[behind[1]][1] == [("JUMP", at["work"])]
