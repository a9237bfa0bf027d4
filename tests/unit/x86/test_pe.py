"""PE files as programs: sections, imports, exports, unwind ranges, moved pointers."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.graph import Edge
from tokmill.x86.image.program import open_program
from tokmill.x86.lift.cfg import lift
from x86_programs import C_SOURCE, blocks_of, compiles, pe_file, run, table_targets

MINGW = "x86_64-w64-mingw32-gcc"
LIBRARY = r"""
__declspec(dllexport) int twice(int x) { return 2 * x; }
__declspec(dllexport) int thrice(int x) { return 3 * x; }
static int hidden(int x) { return x - 1; }
int (*pointer)(int) = hidden;
"""

# call [rip + slot 0]; xor eax, eax; ret (16 bytes); jmp [rip + slot 1]; ret
CODE = bytes.fromhex("ff15fa0f0000 31c0 c3") + b"\xcc" * 7 + bytes.fromhex("ff25f20f0000 c3")


def test_a_small_file_made_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "small.exe"
    path.write_bytes(pe_file(CODE, ("GetTickCount", "ExitProcess"), ((0x1000, 0x1009),)))
    program = open_program(path)
    assert (program.form, program.kind, program.bits) == ("PE", "executable", 64)
    assert program.entry == 0x140001000
    assert program.slot_name == ["GetTickCount", "ExitProcess"]
    assert program.slot_address.tolist() == [0x140002000, 0x140002008]
    assert program.unwind.start.tolist() == [0x140001000]
    assert program.unwind.stop.tolist() == [0x140001009]
    graph = lift(program)
    assert blocks_of(graph, 0x140001000) == {
        0x140001000: (6, [("CALL", 0x140002000), ("FALL", 0x140001006)]),
        0x140001006: (3, [("RETURN", 0)]),
    }
    # A call of an import is followed: its slot says which.
    assert graph.unresolved == []


def test_a_section_without_a_place_in_the_file_holds_nothing(tmp_path: Path) -> None:
    data = bytearray(pe_file(CODE, ("GetTickCount",)))
    headers = data.index(b".text")
    second = headers + 40
    struct.pack_into("<I", data, second + 20, 0)
    path = tmp_path / "nowhere.exe"
    path.write_bytes(data)
    assert [section.address for section in open_program(path).sections] == [0x140001000]


def test_a_call_that_ends_the_process_ends_the_block(tmp_path: Path) -> None:
    path = tmp_path / "exits.exe"
    path.write_bytes(pe_file(CODE, ("ExitProcess",)))
    assert blocks_of(lift(path), 0x140001000) == {0x140001000: (6, [("CALL", 0x140002000)])}


@pytest.mark.parametrize(
    ("code", "slot"),
    [
        ("488b05f90f0000 ffd0", 0x140002000),
        ("4c8b1d01100000 41ffd3", 0x140002008),
        ("488b05f90f0000 89d9 ffd0", 0x140002000),
        ("488b1df90f0000 90 90 ffe3", 0x140002000),
        # Another register, another value in it, a place that is no slot, a branch between the two.
        ("488b05f90f0000 ffd1", 0),
        ("488b05f90f0000 89c8 ffd0", 0),
        ("488b05f10f0000 ffd0", 0),
        ("488b05f90f0000 7400 ffd0", 0),
    ],
)
def test_calls_through_a_register_of_a_slot(tmp_path: Path, code: str, slot: int) -> None:
    path = tmp_path / "register.exe"
    raw = bytes.fromhex(code)
    path.write_bytes(pe_file(raw + b"\xc3", ("GetTickCount", "Sleep"), ((0x1000, 0x1020),)))
    graph = lift(path, facts=True)
    edges = dict(zip(graph.edge_target.tolist(), graph.edge_kind.tolist(), strict=True))
    if slot:
        assert edges[slot] == (Edge.JUMP if code.endswith("ffe3") else Edge.CALL)
        assert graph.unresolved == []
        names = dict(zip(graph.import_address.tolist(), graph.import_name, strict=True))
        assert names[slot] == f"KERNEL32.dll!{'Sleep' if slot & 8 else 'GetTickCount'}"
    else:
        assert [why for _, why in graph.unresolved] == ["indirect call"]
        assert not graph.import_name


def test_chained_unwind_ranges_are_parts_of_functions(tmp_path: Path) -> None:
    # jmp 0x1010; int3 …; 0x1010: ret
    code = bytes.fromhex("eb0e") + b"\xcc" * 14 + b"\xc3"
    ranges = ((0x1000, 0x1002), (0x1010, 0x1011))
    plain = pe_file(code, (), ranges)
    path = tmp_path / "chained.exe"
    path.write_bytes(plain)
    assert len(lift(path).function_address) == 2
    at = 0x1200 + 0x600 + 12 + 8
    data = bytearray(plain)
    data[at : at + 4] = (0x2710).to_bytes(4, "little")
    data[0x1200 + 0x710] = 1 | 4 << 3
    path.write_bytes(data)
    assert open_program(path).unwind.fragment.tolist() == [False, True]
    assert len(lift(path).function_address) == 1
    # A word with the low bit set is the place of another row.
    data[at : at + 4] = (0x2600 | 1).to_bytes(4, "little")
    path.write_bytes(data)
    assert open_program(path).unwind.fragment.tolist() == [False, True]
    assert len(lift(path).function_address) == 1


def coff_functions(path: Path) -> dict[str, int]:
    """Return the functions that the COFF symbols name, by objdump: name → address."""
    shown = run("x86_64-w64-mingw32-objdump", "-t", "-h", str(path))
    starts = [int(one, 16) for one in re.findall(r"^ +\d+ \.\S+ +\S+  (\S+)", shown, re.M)]
    found = {}
    for section, value, name in re.findall(
        r"\(sec +(\d+)\)\(fl 0x\w+\)\(ty +20\).*? (0x\w+) (\S+)$", shown, re.M
    ):
        found[name] = starts[int(section) - 1] + int(value, 16)
    return found


def test_what_mingw_builds(built: Path) -> None:
    path = compiles(built, "built.exe", C_SOURCE, "-O2", by=MINGW)
    program, known = open_program(path), coff_functions(path)
    found = dict(zip(program.function_name, program.function_address.tolist(), strict=True))
    assert len(known) > 30
    assert {name: found.get(name) for name in ("main", "dispatch", "walk", "checked")} == {
        name: known[name] for name in ("main", "dispatch", "walk", "checked")
    }
    assert {"rand", "puts"} <= set(program.slot_name)
    graph = lift(program)
    starts = set(graph.function_address.tolist())
    assert set(known.values()) <= starts | set(program.import_address.tolist())
    assert len(table_targets(graph, known["dispatch"])[0]) == 9
    bare = built / "built-stripped.exe"
    run("x86_64-w64-mingw32-strip", "-o", str(bare), str(path))
    again = set(lift(bare).function_address.tolist())
    assert len(starts & again) >= 0.99 * len(starts)
    assert len(again - starts) <= 0.01 * len(starts)


def test_exports_and_moved_pointers_of_a_library(built: Path) -> None:
    path = compiles(built, "library.dll", LIBRARY, "-O2", "-shared", "-s", by=MINGW)
    program = open_program(path)
    assert program.kind == "shared"
    assert sorted(program.function_name) == ["thrice", "twice"]
    assert set(program.function_address.tolist()) <= set(program.starts.tolist())
    graph = lift(program)
    # lea eax, [rcx - 1]; ret: nothing calls it, a pointer that the loader moves leads to it.
    code = bytes.fromhex("8d41ff c3")
    blocks = [
        int(address)
        for address, begin in zip(graph.block_address, graph.block_bytes, strict=False)
        if graph.code[begin : begin + 4].tobytes() == code
    ]
    assert len(blocks) == 1 and blocks[0] in graph.function_address.tolist()
    assert blocks[0] in program.pointers.tolist()


def test_every_call_of_a_program_by_mingw_leads_to_a_function_or_an_import(built: Path) -> None:
    path = compiles(built, "calls.exe", C_SOURCE, "-O1", by=MINGW)
    graph = lift(path, facts=True)
    called = graph.edge_target[graph.edge_kind == Edge.CALL]
    imports = np.isin(called, graph.import_address)
    assert (imports | np.isin(called, graph.function_address)).all()
    names = [name for name in graph.import_name if name.startswith("KERNEL32.dll!")]
    assert "KERNEL32.dll!VirtualQuery" in names
    # What the C library has is called through a function that only jumps there.
    at = graph.import_name.index("msvcrt.dll!puts")
    assert int(graph.import_address[at]) in graph.function_address.tolist() + called.tolist()
    at = [name for name in graph.import_name if name == "msvcrt.dll!puts"]
    assert len(at) == 2, "the slot and the function that jumps through it"
