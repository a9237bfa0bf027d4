"""Go's own table of functions: every layout of it, wherever it lies, and damaged in any way."""

import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.graph import Edge
from tokmill.x86.image.gopclntab import name_go_functions, read_table
from tokmill.x86.image.image import Program, Section
from tokmill.x86.lift.cfg import lift
from x86_programs import flat, stripped, true_functions

BASE, TABLE, MODULE = 0x401000, 0x480000, 0x4C0000
MAGICS = {"1.18": 0xFFFFFFF0, "1.20": 0xFFFFFFF1}
# fib: call more; ret. more: ret, as a function may begin with NOP. last: jmp to itself.
CODE = bytes.fromhex("e80b000000 c3") + b"\xcc" * 10 + b"\x90\xc3" + b"\xcc" * 14 + b"\xeb\xfe"
NAMES = ["main.fib", "main.(*Stack[...]).Püsh·f", "main.last"]
STARTS = [0, 16, 32]
ENDS = [6, 18, 34]


def table_of(version: str, bits: int, text: int = BASE) -> bytes:
    """Return a table of the three functions in `CODE`, in the layout of a version of Go."""
    word = {64: "<Q", 32: "<I"}[bits]
    size = bits // 8
    names, places = b"\0", []
    for name in NAMES:
        places.append(len(names))
        names += name.encode() + b"\0"
    head = struct.pack("<IHBB", MAGICS[version], 0, 1, size)
    names_at = len(head) + size * 8
    before = -(-(names_at + len(names)) // 8) * 8
    numbers = [len(STARTS), 0, text, names_at, names_at, names_at, names_at, before]
    table = (head + struct.pack("<" + word[1] * 8, *numbers) + names).ljust(before, b"\0")
    records = (2 * len(STARTS) + 1) * 4 + 4
    for number, row in enumerate(STARTS):
        table += struct.pack("<II", row, records + 16 * number)
    table += struct.pack("<I", len(CODE)) + bytes(4)
    for row, place in zip(STARTS, places, strict=True):
        table += struct.pack("<Ii", row, place).ljust(16, b"\0")
    return table


def program_of(table: bytes, bits: int = 64, name: str = "", before: int = 0) -> Program:
    """Return a program of `CODE` and a section that holds a table, behind some bytes."""
    program = flat(CODE, bits=bits)
    program.starts = np.zeros(0, np.uint64)
    data = np.frombuffer(b"\xff" * before + table, np.uint8)
    program.sections.append(Section(name, TABLE, data, data, False))
    return program


@pytest.mark.parametrize("version", MAGICS)
@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("name", ["", ".rdata", ".gopclntab", ".data.rel.ro.gopclntab"])
def test_every_layout(version: str, bits: int, name: str) -> None:
    before = 0 if name.endswith("gopclntab") else 4 * 9
    table = read_table(program_of(table_of(version, bits), bits, name, before))
    assert table is not None
    assert table.start.tolist() == [BASE + start for start in STARTS]
    # INT3 between functions belongs to none of them.
    assert table.stop.tolist() == [BASE + end for end in ENDS]
    assert table.name == NAMES


@pytest.mark.parametrize("bits", [64, 32])
def test_the_beginning_of_code_may_stand_elsewhere(bits: int) -> None:
    program = program_of(table_of("1.20", bits, text=0), bits)
    assert read_table(program) is None
    word = bits // 8
    words = [7, TABLE, 1, 2, 3, BASE, BASE + len(CODE), 0]
    module = np.asarray(words, f"<u{word}").view(np.uint8)
    program.sections.append(Section("", MODULE, module, module, False))
    table = read_table(program)
    assert table is not None and table.start.tolist() == [BASE + start for start in STARTS]


def test_names_and_starts_of_a_graph() -> None:
    program = program_of(table_of("1.18", 64))
    name_go_functions(program)
    graph = lift(program)
    assert dict(zip(graph.function_address.tolist(), graph.function_name, strict=True)) == {
        BASE + start: name for start, name in zip(STARTS, NAMES, strict=True)
    }


def test_symbols_come_before_the_table() -> None:
    program = program_of(table_of("1.18", 64))
    program.function_address = np.asarray([BASE + 16], np.uint64)
    program.function_size = np.asarray([2], np.uint64)
    program.function_name = ["known"]
    name_go_functions(program)
    assert program.function_name == [NAMES[0], "known", NAMES[2]]
    assert program.function_size.tolist() == [6, 2, 2]


@pytest.mark.parametrize("version", MAGICS)
def test_damaged_tables_are_empty_or_right(version: str) -> None:
    whole = table_of(version, 64)
    truth = {BASE + start for start in STARTS}
    generator = random.Random(version)
    read = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            value = generator.choice((0, 0xFF, 0x7F, 0x80, generator.randrange(256)))
            data[generator.randrange(len(data))] = value
        if generator.random() < 0.2:
            del data[generator.randrange(len(data)) :]
        table = read_table(program_of(bytes(data)))
        if table is not None:
            assert len(table.start) == len(table.stop) == len(table.name)
            assert (table.start < table.stop).all() and (np.diff(table.start) > 0).all()
            assert (table.start >= BASE).all() and (table.stop <= BASE + len(CODE)).all()
            # Every beginning stands there twice.
            assert set(table.start.tolist()) <= truth
            read += 1
    assert 200 < read < 1800


def test_a_count_that_no_file_could_hold() -> None:
    for version, place in (("1.18", 8), ("1.20", 8)):
        for count in (0, 4, 1 << 31, (1 << 63) - 1, (1 << 64) - 1):
            data = bytearray(table_of(version, 64))
            data[place : place + 8] = struct.pack("<Q", count)
            assert read_table(program_of(bytes(data))) is None


def test_names_without_an_end_take_no_memory() -> None:
    # Every record of a large table names the same long run of letters, a byte further each.
    count = 40_000
    head = struct.pack("<IHBB8Q", MAGICS["1.20"], 0, 1, 8, count, 0, BASE, 72, 72, 72, 72, 72)
    rows = np.zeros((count, 2), "<u4")
    rows[:, 0] = np.arange(count)
    rows[:, 1] = 8 * count + 8 + 8 * np.arange(count)
    records = np.zeros((count, 2), "<u4")
    records[:, 0] = np.arange(count)
    records[:, 1] = 16 * count + 8 + np.arange(count) // 8
    table = head + rows.tobytes() + struct.pack("<II", count, 0) + records.tobytes()
    program = flat(b"\x90" * count)
    data = np.frombuffer(table + b"x" * 20_000, np.uint8)
    program.sections.append(Section("", TABLE, data, data, False))
    found = read_table(program)
    assert found is not None and len(found.name) == count
    assert sum(map(len, found.name)) <= 4 * len(data)


GO = r"""
package main

import "fmt"

type shape interface{ area() int }
type square struct{ side int }

func (s *square) area() int { return s.side * s.side }

//go:noinline
func choose(n int) string {
	switch n {
	case 1: return "a"
	case 2: return "b"
	case 3: return "c"
	case 4: return "d"
	case 5: return "e"
	case 6: return "f"
	case 7: return "g"
	case 8: return "h"
	case 9: return "i"
	}
	return "?"
}

func main() {
	var one shape = &square{3}
	fmt.Println(one.area(), choose(one.area()))
}
"""


HERE = shutil.which("go") is not None
"""Go's compiler is not asked for by `make test`: the tables above are."""


@pytest.mark.long
@pytest.mark.parametrize("mode", ["exe", "pie", "386", "windows"] if HERE else ["none"])
def test_what_go_builds(built: Path, tmp_path: Path, mode: str) -> None:
    if mode == "none":
        return
    source, path = tmp_path / "one.go", tmp_path / "one"
    source.write_text(GO)
    system = "windows" if mode == "windows" else "linux"
    flags = ["-buildmode=pie"] if mode == "pie" else []
    wanted = {"GOOS": system, "GOARCH": "386" if mode == "386" else "amd64", "GO111MODULE": "off"}
    wanted |= {"CGO_ENABLED": "0", "GOCACHE": str(built / "go"), "PATH": os.environ["PATH"]}
    subprocess.run(["go", "build", *flags, "-o", str(path), str(source)], check=True, env=wanted)
    bare = path if mode == "windows" else stripped(path)
    graph = lift(bare)
    names = dict(zip(graph.function_name, graph.function_address.tolist(), strict=False))
    assert {"main.main", "main.choose", "main.(*square).area", "runtime.mcall"} <= names.keys()
    if mode != "windows":
        functions, parts = true_functions(path)
        found = set(graph.function_address.tolist())
        assert len(found & functions) >= 0.995 * max(len(functions), len(found - parts))
    # A function whose stack must grow goes on behind the call that does it.
    more = {address for name, address in names.items() if name.startswith("runtime.morestack")}
    more -= {names.get("runtime.morestackc", 0)}
    calls = falls = 0
    for block in range(len(graph.block_address)):
        ways = slice(graph.block_edges[block], graph.block_edges[block + 1])
        kinds = graph.edge_kind[ways].tolist()
        if Edge.CALL in kinds and graph.edge_target[ways].tolist()[0] in more:
            calls += 1
            falls += Edge.FALL in kinds
    assert calls == falls > 500
