"""Hand-written code: data between functions, functions that only data names, known indices."""

from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.lift import cfg
from tokmill.x86.lift.cfg import lift
from x86_programs import (
    assembled,
    check_graph,
    compiles,
    stripped,
    symbols,
    table_targets,
    true_functions,
)

# As crypto libraries have it: constants behind code, strings, functions at odd places.
CRYPTO = r"""
.type rounds,@function
.align 16
rounds:
    push rbx
    push rbp
    mov rbp, rdx
    lea rbx, [rip + constants]
    mov eax, [rbx + 4]
1:  add eax, [rdi]
    rol eax, 7
    add rdi, 4
    sub rsi, 1
    jnz 1b
    call step
    pop rbp
    pop rbx
    ret

.align 64
constants:
    .long 0x428a2f98,0x71374491,0xb5c0fbcf,0xe9b5dba5,0x3956c25b,0x59f111f1,0x923f82a4,0xab1c5ed5
    .byte 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15
    .asciz "Rounds for x86_64, by hand <nobody@example.org>"

.type step,@function
.align 16
step:
    mov r10, rdi
    xor r10, [rip + constants + 16]
    mov rax, r10
    ret

.type only_pointed,@function
only_pointed:
    mov rax, rdi
    imul rax, rsi
    ret
    .byte 0x9a, 0x17, 0x33

.type behind_data,@function
behind_data:
    bswap rdi
    lea rax, [rip + only_taken]
    ret
    .asciz "odd"

.type only_taken,@function
only_taken:
    rol rdi, 3
    mov rax, rdi
    ret

.type shuffles,@function
.align 16
shuffles:
    movdqu xmm0, [rdi]
    pshufb xmm0, [rip + shuffle]
    paddd xmm0, [rip + code_like]
    movdqu [rdi], xmm0
    jmp step
.align 64
shuffle:
    .byte 3,2,1,0,7,6,5,4,11,10,9,8,15,14,13,12
.align 16
code_like: # sub rsp, 8; call step; add rsp, 8; ret
    .byte 0x48,0x83,0xec,0x08,0x90,0x90,0x90,0x90,0x90,0x48,0x83,0xc4,0x08,0xc3,0x90,0x90

.globl _start
.type _start,@function
.align 16
_start:
    lea rax, [rip + pointers]
    call rounds
    call [rax + 8]
    hlt

.section .data.rel.ro,"aw"
.align 8
pointers: .quad 1, shuffles, 4, only_pointed, 4, behind_data, 0
"""

# `%s`: how the jump names the entry.
JUMPS = r"""
.globl _start
.type _start,@function
_start:
    call by_number
    call by_place
    call by_distance
    hlt
.type by_number,@function
.align 16
by_number:
    mov ecx, 3
    jmp [numbers + rcx * 8]
number_0: mov eax, 1
    ret
number_1: mov eax, 2
    ret
number_2: mov eax, 4
    ret
number_3: mov eax, 9
    ret
.align 8
numbers: .quad number_0, number_1, number_2, number_3
.type by_place,@function
.align 16
by_place:
    cmp edi, 7
    ja place_end
    jmp [places + 16]
place_0: mov eax, 11
    ret
place_1: mov eax, 12
    ret
place_2: mov eax, 14
place_end:
    ret
.type by_distance,@function
.align 16
by_distance:
    lea r11, [rip + distances]
    and esi, 3
    movsxd rcx, dword ptr [r11 + rsi * 4]
    lea rcx, [r11 + rcx]
    jmp rcx
.align 16
distances: .long far_0 - distances, far_1 - distances, far_2 - distances, far_3 - distances
far_0: mov eax, 21
    ret
far_1: mov eax, 22
    ret
far_2: mov eax, 24
    ret
far_3: mov eax, 28
    ret
.section %s
.align 8
places: .quad place_0, place_1, place_2
"""
LINKED = ("-nostdlib", "-pie", "-Wl,-z,notext")


@pytest.fixture(params=["fixed", "pie"])
def crypto(built: Path, request: pytest.FixtureRequest) -> Path:
    if request.param == "fixed":
        return assembled(built, "by-hand", CRYPTO)
    return compiles(built, "by-hand-pie.s", ".intel_syntax noprefix\n.text\n" + CRYPTO, *LINKED)


def test_functions_between_data(crypto: Path) -> None:
    functions, _ = true_functions(crypto)
    assert len(functions) == 7
    graph = lift(stripped(crypto))
    check_graph(graph, crypto)
    # What a pointer alone leads to, at an odd place behind data, is not found.
    names = symbols(crypto)
    lost = {names["behind_data"], names["only_taken"]}
    assert set(graph.function_address.tolist()) == functions - lost


def test_what_is_read_is_no_code(crypto: Path) -> None:
    graph = lift(stripped(crypto))
    names = symbols(crypto)
    begin = graph.block_address.astype(np.int64)
    end = begin + np.diff(graph.block_bytes)
    for low, high in (("constants", "step"), ("shuffle", "_start")):
        assert not ((begin < names[high]) & (end > names[low])).any(), low


def test_an_operand_of_another_kind_is_no_use(built: Path) -> None:
    """The stack protector's `fs:[0x28]` and NOPs with operands name no place of the code."""
    source = r"""
    .globl _start
    .type _start,@function
    _start: mov rax, fs:[0x28]
        lea rcx, [rip + taken]
        nop word ptr [rcx + rcx]
        push rcx
        hlt
    .align 16
    .type taken,@function
    taken: mov rax, rdi
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        nop
        add rax, 1
        ret
    """
    path = assembled(built, "no-use", source)
    assert set(lift(stripped(path)).function_address.tolist()) == true_functions(path)[0]


def test_jumps_through_one_pointer_are_not_followed(built: Path) -> None:
    """Libraries choose functions for the processor at hand: first a pointer leads to a choice."""
    for section in ('.rodata,"a"', '.data,"aw"'):
        path = assembled(built, f"known-index{section[:4]}", JUMPS % section)
        names = symbols(path)
        graph = lift(path)
        expected = [names[f"far_{number}"] for number in range(4)]
        assert table_targets(graph, names["by_distance"]) == [expected]
        assert table_targets(graph, names["by_number"]) == []
        assert table_targets(graph, names["by_place"]) == []
        assert {reason for _, reason in graph.unresolved} == {"indirect jump"}


def test_tables_between_code_are_data(built: Path) -> None:
    path = assembled(built, "known-index.rod", JUMPS % '.rodata,"a"')
    names = symbols(path)
    lifter = cfg.Lifter(cfg.open_program(path))
    lifter.lift()
    code = lifter.findings.code
    place = int(code.offset(np.asarray([names["distances"]], np.uint64))[0])
    data = zip(code.data_begin.tolist(), code.data_end.tolist(), strict=True)
    assert any(begin <= place and place + 16 <= end for begin, end in data)
