"""Which code may be the entry of a function, and functions behind random bytes."""

from __future__ import annotations

import numpy as np
import pytest

from tokmill.x86.lift.cfg import lift
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.entry_points import NOWHERE, nearest_entries
from x86_programs import flat

USUAL = bytes.fromhex("53 89fb e800000000 5b c3")  # push rbx; mov ebx, edi; call; pop rbx; ret
READS = bytes.fromhex("4c01f0 c3")  # add rax, r14; ret


def entries_of(code: bytes, functions: list[int], offset: int, bits: int = 64) -> int:
    """Return where the function that is looked for at an offset begins."""
    stop = np.asarray([len(code)])
    (found,) = nearest_entries(
        Code(flat(code, bits=bits)), np.asarray(functions), np.asarray([offset]), stop
    ).tolist()
    return int(found)


@pytest.mark.parametrize(
    "code",
    [
        "55 4889e5 c3",  # push rbp; mov rbp, rsp
        "31c0 c3",  # xor eax, eax
        "83c8ff 4885ff 7401 c3",  # or eax, -1; test rdi, rdi; je
        "48895c2408 c3",  # mov [rsp + 8], rbx, as Windows saves it
        "4881ecd8000000 84c0 7401 c3",  # sub rsp, 0xd8; test al, al; je: varargs
        "8d0437 c3",  # lea eax, [rdi + rsi]
        "4157 4156 53 c3",  # push r15; push r14; push rbx
        "2e0f1f840000000000 c3",  # a NOP with a prefix
        "e900000000",  # jmp
        "0f0b",  # ud2
    ],
)
def test_what_may_be_an_entry(code: str) -> None:
    whole = USUAL * 8 + bytes.fromhex(code) + USUAL
    assert entries_of(whole, list(range(0, 80, 10)), 80) == 80


@pytest.mark.parametrize(
    "code",
    [
        "4c01f0",  # add rax, r14
        "7405",  # je: of which flags?
        "11f7",  # adc edi, esi
        "5b",  # pop rbx
        "8903",  # mov [rbx], eax
        "2e8b07",  # mov eax, cs:[rdi]
        "06",  # no instruction
        "cd80",  # int 0x80
    ],
)
def test_what_is_none_is_moved_to_what_begins_as_usual(code: str) -> None:
    data = bytes.fromhex(code)
    whole = USUAL * 8 + data + USUAL
    assert entries_of(whole, list(range(0, 80, 10)), 80) == 80 + len(data)


def test_where_nothing_begins_as_usual_there_is_no_entry() -> None:
    whole = USUAL * 8 + READS * 8
    known = list(range(0, 80, 10))
    assert entries_of(whole, known, 80) == NOWHERE
    # Too far away, and too few to tell what is usual.
    assert entries_of(USUAL * 8 + READS[:3] * 11 + USUAL, known, 80) == NOWHERE
    assert entries_of(USUAL * 8 + READS[:3] + USUAL, known[:2], 80) == NOWHERE


def test_programs_of_another_convention_are_left_alone() -> None:
    whole = READS * 8 + READS + USUAL
    assert entries_of(whole, list(range(0, 32, 4)), 32) == 32
    assert entries_of(USUAL * 8 + READS, [], 80) == 80
    assert entries_of(USUAL * 8 + READS, list(range(0, 80, 10)), 80, bits=32) == 80


def test_functions_behind_random_bytes() -> None:
    """Nothing leads to the last one, and the bytes before it decode to something, too."""
    body = bytes.fromhex("8d4701") * 30  # lea eax, [rdi + 1]
    calls = [0x20 + 16 * number for number in range(6)]
    main = b"".join(
        b"\xe8" + (target - 5 * number - 5).to_bytes(4, "little")
        for number, target in enumerate(calls)
    )
    known = b"".join((USUAL + b"\x90" * 6) for _ in calls)
    junk = bytes.fromhex("de3a3261a61c")
    hidden = b"\x53" + body + b"\x5b\xc3"
    start = (main + b"\xc3").ljust(0x20, b"\x90") + known
    graph = lift(flat(start + junk + hidden))
    places = [*calls, len(start) + len(junk)]
    found = set((graph.function_address - np.uint64(0x401000)).tolist())
    assert set(places) <= found
    assert len(start) not in found
