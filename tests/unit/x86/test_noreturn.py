"""Calls that do not come back: blocks end there, and nothing behind them is followed."""

from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.lift.cfg import lift
from tokmill.x86.lift.reach import NoReturn
from x86_programs import C_SOURCE, assembled, blocks_of, compiles, flat, stripped, symbols

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


def test_symbols_of_win32_have_an_underscore_and_names_of_imports_have_none() -> None:
    program = flat(b"\xc3", bits=32)
    program.form = "PE"
    program.slot_name = ["exit", "puts", "_CxxThrowException", "xexit"]
    program.slot_address = program.slot_target = np.arange(16, 20, dtype=np.uint64)
    program.function_name = ["_abort", "__exit", "abort"]
    program.function_address = np.arange(32, 35, dtype=np.uint64)
    assert NoReturn(program).named.tolist() == [16, 18, 32, 33]


STATUS = r"""
#include <errno.h>
extern void error(int, int, const char *, ...);
volatile int seen;
__attribute__((noinline)) int maybe(int hard, int other) {
    error(hard ? 2 : other, 0, "bad %d", other); seen = 77; return other * 9; }
__attribute__((noinline)) int status(int value, int n) {
    error(value, EINVAL, "bad %d", n); seen = 78; return n * 9; }
__attribute__((noinline)) int either(int hard, int n) {
    error(hard ? 0 : 3, 0, "bad %d", n); seen = 81; return n * 7; }
__attribute__((noinline)) int fatal(int n) {
    if (n == 5) { error(3, 0, "n %d", n); seen = 79; } return n * 11; }
__attribute__((noinline)) int warn(int n) {
    if (n == 5) { error(0, 7, "n %d", n); seen = 80; } return n * 13; }
int main(int n, char **v) {
    return maybe(n, n + 1) + status(n, n) + fatal(n) + warn(n) + either(n, n); }
"""


@pytest.mark.parametrize(("by", "bits"), [("gcc", "-m32"), ("clang", "-m64")])
@pytest.mark.parametrize("level", ["-O0", "-O1", "-O2", "-Os", "-Oz"])
def test_error_returns_unless_its_status_is_a_number(
    built: Path, by: str, bits: str, level: str
) -> None:
    path = compiles(built, f"status-{by}{bits}{level}", STATUS, level, bits, by=by)
    at = symbols(path)
    silent = {name: silent_calls(path, at[name]) for name in ("maybe", "status", "either", "warn")}
    # A tail call has no block behind it, with or without a return.
    assert silent == dict.fromkeys(silent, 0)
    assert silent_calls(path, at["fatal"]) == 1


RETURNS = """
.globl user, kernel, supervisor, management
user: inc eax; uiret
supervisor: inc eax; .byte 0xf2, 0x0f, 0x01, 0xca # erets
kernel: inc eax; .byte 0xf3, 0x0f, 0x01, 0xca # eretu
management: inc eax; rsm
last: inc eax; ret
"""


def test_rare_returns_end_a_function(built: Path) -> None:
    path = assembled(built, "rare-returns", RETURNS)
    graph, at = lift(path), symbols(path)
    for name in ("user", "supervisor", "kernel", "management"):
        edges = [kind for _, edges in blocks_of(graph, at[name]).values() for kind, _ in edges]
        assert edges == ["RETURN"], name


KERNEL = """
#define TRAP(flags) asm volatile("1: ud2\\n.pushsection __bug_table,\\"aw\\"\\n2: " ENTRY \
    "\\n.org 2b + " SIZE "\\n.popsection" : : "i"(flags))
__attribute__((noinline)) int warns(int x) { if (x == 5) TRAP(0x901); return x * 7; }
__attribute__((noinline)) int once(int x) { if (x == 6) TRAP(0x903); return x * 9; }
__attribute__((noinline)) int dies(int x) {
    if (x == 7) { TRAP(0); __builtin_unreachable(); } return x * 11; }
int _start(int x) { return warns(x) + once(x) + dies(x); }
"""


@pytest.mark.parametrize("link", [("-c",), ("-nostdlib", "-static", "-no-pie")])
@pytest.mark.parametrize(
    ("bits", "entry", "size"),
    [
        ("-m64", ".long 1b - .\\n.long 0\\n.word 9, %c0", 12),
        ("-m64", ".long 1b - .\\n.word %c0", 8),
        ("-m64", ".long 1b - .\\n.long 0, 0\\n.word 9, %c0", 16),
        ("-m32", ".long 1b, 0\\n.word 9, %c0", 12),
        ("-m32", ".long 1b\\n.word %c0", 8),
    ],
)
def test_behind_a_warning_of_linux_control_goes_on(
    built: Path, link: tuple[str, ...], bits: str, entry: str, size: int
) -> None:
    source = f'#define ENTRY "{entry}"\n#define SIZE "{size}"\n{KERNEL}'
    name = f"bugs{bits}-{size}{link[0]}"
    path = compiles(built, name, source, "-O1", "-fno-pic", bits, *link)
    graph = lift(path)
    at = dict(zip(graph.function_name, graph.function_address.tolist(), strict=True))
    stops = {
        one: sum(not edges for _, edges in blocks_of(graph, at[one]).values())
        for one in ("warns", "once", "dies")
    }
    assert stops == {"warns": 0, "once": 0, "dies": 1}
    assert len(blocks_of(graph, at["warns"])) == 3


FAMILIES = {
    "__ubsan_handle_add_overflow_abort": True, "__ubsan_handle_add_overflow": False,
    "__asan_report_load8": True, "__asan_report_load8_noabort": False,
    "__asan_report_store_n": True, "_gfortran_stop_string": True,
    "_gfortran_error_stop_numeric": True, "_gfortran_st_write": False,
    "__gnat_rcheck_CE_Overflow_Check": True, "errc": True, "warnc": False,
}  # fmt: skip
"""Name of an import → whether it never returns."""


def test_families_of_names(built: Path) -> None:
    source = "".join(
        f"void {name}(void); int f{i}(int x) {{ if (x) {{ {name}(); x = 9; }} return x + {i}; }}"
        for i, name in enumerate(FAMILIES)
    )
    path = compiles(built, "families", source, "-O1", "-shared", "-fPIC", "-nostdlib")
    at = symbols(path)
    found = {name: silent_calls(path, at[f"f{i}"]) for i, name in enumerate(FAMILIES)}
    assert found == FAMILIES


def test_what_calls_only_such_functions_is_one_itself(built: Path) -> None:
    for level in ("-O0", "-O2"):
        path = compiles(built, "propagated" + level, C_SOURCE, level)
        at = symbols(path)
        for one in (path, stripped(path)):
            assert silent_calls(one, at["checked"]) == 1
            assert silent_calls(one, at["die"]) == 1
            assert silent_calls(one, at["give_up"]) >= 1


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


@pytest.mark.parametrize(
    ("name", "code", "silent"),
    [
        ("endless", "f: nop; call f; ret", 1),
        ("recursion", "f: dec edi; jz done; call f; ret\ndone: ret", 0),
        # What jumps to where nobody knows may come back.
        ("unknown", "f: jmp [rdi]", 0),
    ],
)
def test_what_a_function_calls_says_whether_it_returns(
    built: Path, name: str, code: str, silent: int
) -> None:
    path = assembled(built, name, f".globl _start, f\n_start: call f; ret\n{code}\n")
    assert silent_calls(path, symbols(path)["_start"]) == silent


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
