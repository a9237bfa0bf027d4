"""Unwind tables: the ranges of functions and parts, and landing pads."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from elftools.dwarf.callframe import FDE
from elftools.elf.elffile import ELFFile

from tokmill.x86.graph import Edge
from tokmill.x86.image.eh_frame import read_unwind
from tokmill.x86.image.image import Program, Section
from tokmill.x86.image.program import open_program
from tokmill.x86.lift.cfg import lift
from x86_programs import CPP_SOURCE, compiles, run, stripped, symbols

BASE, CODE, TABLE = 0x5000, 0x1000, 0x7000


def entry(body: bytes, wide: bool = False) -> bytes:
    """Return a record of the frame table with its length before it."""
    body = body.ljust((len(body) + 3) // 4 * 4, b"\0")
    size = struct.pack("<IQ", 0xFFFFFFFF, len(body)) if wide else struct.pack("<I", len(body))
    return size + body


def common(letters: bytes, facts: bytes, version: int = 1) -> bytes:
    """Return a common information entry; alignments 1 and -8, return address 16."""
    return entry(
        struct.pack("<IB", 0, version) + letters + b"\0\x01\x78\x10" + facts + b"\x0c\7\x08"
    )


def frames(*records: bytes) -> Program:
    """Return a program whose frame table, at `BASE`, holds some records."""
    data = np.frombuffer(b"".join(records) + bytes(4), np.uint8)
    code = np.full(0x1000, 0x90, np.uint8)
    # Exception table: no base, no types, call sites in LEB128, two of them, the first has a pad.
    table = np.frombuffer(b"\xff\xff\x01\x08" + b"\0\x05\x80\x01\0" + b"\5\5\0\0", np.uint8)
    sections = [
        Section(".text", CODE, code, code, True),
        Section(".eh_frame", BASE, data, data, False),
        Section(".gcc_except_table", TABLE, table, table, False),
    ]
    program = Program("x", "ELF", "executable", 64, 8, sections)
    program.unwind = read_unwind(program, [sections[1]])
    return program


def relative(place: int, target: int) -> bytes:
    """Return a pointer of 4 bytes at a place of the table, counted from there."""
    return struct.pack("<i", target - (BASE + place))


def test_ranges_with_pointers_relative_to_their_place() -> None:
    head = common(b"zR", b"\1\x1b")
    at = len(head)
    one = entry(struct.pack("<I", at + 4) + relative(at + 8, CODE + 0x40) + b"\x20\0\0\0\0\x41")
    two = at + len(one)
    other = entry(struct.pack("<I", two + 4) + relative(two + 8, CODE) + b"\x10\0\0\0\0\x0e\x10")
    unwind = frames(head, one, other).unwind
    assert unwind.start.tolist() == [CODE, CODE + 0x40]
    assert unwind.stop.tolist() == [CODE + 0x10, CODE + 0x60]
    # The one whose rules begin with a frame that is there already is a part of a function.
    assert unwind.fragment.tolist() == [True, False]


@pytest.mark.parametrize("version", [1, 3])
def test_ranges_with_plain_pointers_and_wide_lengths(version: int) -> None:
    head = common(b"", b"", version)
    body = struct.pack("<IQQ", len(head) + 12, CODE + 8, 24)
    unwind = frames(head, entry(body, wide=True)).unwind
    assert (unwind.start.tolist(), unwind.stop.tolist()) == ([CODE + 8], [CODE + 32])


def test_landing_pads_of_an_exception_table() -> None:
    head = common(b"zPLR", b"\6\x03" + struct.pack("<I", 0x1234) + b"\x03\x03")
    body = struct.pack("<III", len(head) + 4, CODE + 0x100, 0x200)
    program = frames(head, entry(body + b"\4" + struct.pack("<I", TABLE)))
    assert program.unwind.start.tolist() == [CODE + 0x100]
    assert program.unwind.pad.tolist() == [CODE + 0x180]
    assert program.unwind.pad_range.tolist() == [0]


def test_the_signal_frame_begins_a_byte_early() -> None:
    head = common(b"zRS", b"\1\x03")
    body = struct.pack("<III", len(head) + 4, CODE + 0x1F, 0x21) + b"\0\x0f"
    unwind = frames(head, entry(body)).unwind
    assert unwind.start.tolist() == [CODE + 0x20] and not unwind.fragment.any()


@pytest.mark.parametrize(
    "head",
    [
        common(b"zQ", b"\1\x1b"),
        common(b"eh", b""),
        common(b"zR", b"\1\x1b", version=9),
        common(b"zR", b"\1\x50"),
        common(b"zR", b"\1\x0f"),
    ],
)
def test_what_is_not_known_gives_no_ranges(head: bytes) -> None:
    body = struct.pack("<III", len(head) + 4, CODE, 0x20) + b"\0"
    assert len(frames(head, entry(body)).unwind.start) == 0


def test_a_table_that_is_cut_off_gives_what_is_whole() -> None:
    head = common(b"zR", b"\1\x03")
    one = entry(struct.pack("<III", len(head) + 4, CODE, 0x20) + b"\0")
    two = entry(struct.pack("<III", len(head) + len(one) + 4, CODE + 0x20, 0x20) + b"\0")
    for size in range(len(two) - 4):
        assert frames(head, one, two[:size]).unwind.start.tolist() == [CODE]
    assert frames(head, one, two).unwind.start.tolist() == [CODE, CODE + 0x20]


@pytest.mark.parametrize("path", ["/bin/bash", "/lib/x86_64-linux-gnu/libm.so.6"])
def test_ranges_are_those_of_pyelftools(path: str) -> None:
    with open(path, "rb") as file:
        dwarf = ELFFile(file).get_dwarf_info()
        known = {
            (one["initial_location"], one["initial_location"] + one["address_range"])
            for one in dwarf.EH_CFI_entries()
            if isinstance(one, FDE)
        }
    unwind = open_program(path).unwind
    assert len(known) > 5
    assert set(zip(unwind.start.tolist(), unwind.stop.tolist(), strict=True)) == known


@pytest.mark.parametrize("by", ["g++", "clang++"])
def test_code_behind_an_exception_belongs_to_its_function(built: Path, by: str) -> None:
    path = compiles(built, f"exceptions-{by}", CPP_SOURCE, "-O1", by=by)
    program = open_program(stripped(path))
    assert len(program.unwind.pad) > 2
    graph = lift(program)
    stubs = dict(zip(program.import_address.tolist(), program.import_name, strict=True))
    catching = [
        block
        for block in range(len(graph.block_address))
        for way in range(graph.block_edges[block], graph.block_edges[block + 1])
        if graph.edge_kind[way] == Edge.CALL
        and stubs.get(int(graph.edge_target[way])) == "__cxa_begin_catch"
    ]
    owner = np.searchsorted(graph.function_blocks, catching, side="right") - 1
    assert symbols(path)["_Z7measureRKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIc"
                         "EEESaIS5_EE"] in graph.function_address[owner].tolist()  # fmt: skip
    assert set(program.unwind.pad.tolist()) <= set(graph.block_address.tolist())


THROWS = r"""
struct Kept { ~Kept(); int x; };
int g(int);
int f(int a) { Kept kept; try { return g(a); } catch (int e) { return e; } }
"""


def test_a_personality_of_the_size_of_an_address_in_32_bits(built: Path) -> None:
    path = compiles(built, "throws.s", THROWS, "-m32", "-O2", "-fno-pic", "-x", "c++", "-c")
    shown = run("readelf", "--debug-dump=frames", str(path))
    sizes = {int(b, 16) - int(a, 16) for a, b in re.findall(r"pc=(\w+)\.\.(\w+)", shown)}
    unwind = open_program(path).unwind
    assert set((unwind.stop - unwind.start).tolist()) == sizes and len(sizes) == 2
    assert len(unwind.pad) == 1
