"""Imports, strings and constants of blocks, against what other tools say and what was compiled."""

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

import iced_x86
import numpy as np
import pytest

from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import LONGEST, Section, strings_at
from tokmill.x86.lift.cfg import lift
from x86_programs import (
    C_SOURCE,
    CPP_SOURCE,
    assembled,
    compiler,
    compiles,
    flat,
    run,
    stripped,
    symbols,
    without_sections,
)

FACTS_SOURCE = r"""
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <uchar.h>
struct pair { int key; int value; char name[24]; };
int counter;
__attribute__((noinline)) unsigned hash(const char *text) {
    unsigned sum = 2166136261u;
    while (*text) sum = (sum ^ (unsigned char)*text++) * 16777619u;
    return sum;
}
__attribute__((noinline)) int value_of(const struct pair *pair) { return pair->value ^ 0x1234567; }
__attribute__((noinline)) int fill(char *into) {
    char buffer[400];
    memset(buffer, argument_of(into), sizeof buffer);
    return memcmp(into, buffer, 399);
}
int argument_of(char *text) { return *text; }
__attribute__((noinline)) void take(const void *wide, int n) { counter += n + *(const char *)wide; }
int main(int argc, char **argv) {
    struct pair *pair = malloc(sizeof *pair);
    if (!pair) { fputs("no memory left\n", stderr); abort(); }
    pair->value = argc;
    printf("gr\xc3\xbc\xc3\x9f" "e: %u\n", hash(argv[0]));
    take(u"wide text here", 3);
    take("ab", 2);
    take("\x01\x02 not printable", 1);
    return value_of(pair) + fill(argv[0]);
}
"""
GO_SOURCE = r"""
package main
import "os"
func main() {
    if len(os.Args) > 5 { os.Stderr.WriteString("too many arguments"); os.Exit(3) }
    os.Stdout.WriteString("a greeting\n")
}
"""
WANTED = {"no memory left\n", "gr\u00fc\u00dfe: %u\n", "wide text here"}
AT_ONE_PLACE = ("-fno-pie", "-no-pie")
FORMS = [
    ("-O1",), ("-O0",), ("-O2", *AT_ONE_PLACE), ("-O2", "-fno-plt"), ("-O1", "-m32"),
    ("-O2", "-m32", *AT_ONE_PLACE), ("-O2", "-m32", "-fno-plt"),
    ("-O1", "-mcmodel=large", *AT_ONE_PLACE),
]  # fmt: skip


def facts_of(graph: Graph, function: int) -> tuple[list[str], list[int]]:
    """Return strings and constants of a function, by block."""
    number = graph.function_address.tolist().index(function)
    first, last = graph.function_blocks[number : number + 2].tolist()
    texts = graph.string[graph.block_strings[first] : graph.block_strings[last]]
    numbers = graph.constant[graph.block_constants[first] : graph.block_constants[last]]
    return [graph.strings[at] for at in texts.tolist()], numbers.tolist()


def called(graph: Graph, function: int) -> set[str]:
    """Return the names of the imports that a function calls."""
    number = graph.function_address.tolist().index(function)
    first, last = graph.function_blocks[number : number + 2].tolist()
    ways = slice(*graph.block_edges[[first, last]].tolist())
    names = dict(zip(graph.import_address.tolist(), graph.import_name, strict=True))
    return {names[one] for one in graph.edge_target[ways].tolist() if one in names}


@pytest.mark.parametrize(
    ("by", "flags"), [*(("gcc", one) for one in FORMS), *(("clang", one) for one in FORMS[::2])]
)
def test_facts_of_every_form(built: Path, by: str, flags: tuple[str, ...]) -> None:
    path = compiles(built, f"facts-{by}{''.join(flags)}", FACTS_SOURCE, *flags, by=by)
    at = symbols(path)
    for one in (path, stripped(path)):
        graph = lift(one, facts=True)
        assert graph.facts and graph.block_strings.dtype == np.int64
        strings, constants = facts_of(graph, at["main"])
        assert set(strings) >= WANTED, "strings of main"
        assert not any("printable" in text or text == "ab" for text in graph.strings)
        assert len(set(graph.strings)) == len(graph.strings)
        wanted = {"malloc", "abort", "printf"}
        assert called(graph, at["main"]) >= wanted - {"printf"}
        assert called(graph, at["main"]) & {"printf", "__printf_chk"}
        _, constants = facts_of(graph, at["hash"])
        assert {16777619, 2166136261 - (1 << 32)} <= set(constants)
        _, constants = facts_of(graph, at["value_of"])
        # In 64-bit code the argument lies in a register; no offset in the stack is a constant.
        assert set(constants) == {4, 0x1234567}
        _, constants = facts_of(graph, at["fill"])
        assert 399 in constants and min(constants) >= 0, "places in a frame lie below its pointer"


@pytest.mark.parametrize("flags", [("-O2",), ("-O2", "-m32")])
def test_relocations_of_an_object_file_name_imports(built: Path, flags: tuple[str, ...]) -> None:
    path = compiles(built, f"facts{''.join(flags)}.o", FACTS_SOURCE, "-c", *flags)
    graph = lift(path, facts=True)
    names = dict(zip(graph.function_name, graph.function_address.tolist(), strict=True))
    assert called(graph, names["main"]) >= {"malloc", "abort"}
    assert set(facts_of(graph, names["main"])[0]) >= WANTED
    assert set(facts_of(graph, names["value_of"])[1]) == {4, 0x1234567}


def test_what_a_program_imports_is_what_readelf_says(built: Path) -> None:
    path = compiles(built, "facts-readelf", CPP_SOURCE, "-O2", by="g++")
    graph = lift(stripped(path), facts=True)
    # The slots of lazily bound functions.
    lines = re.findall(r"R_X86_64_JUMP_SLO\w*\s+\S+\s+(\w+)", run("readelf", "-rW", str(path)))
    assert lines and set(lines) <= set(graph.import_name)
    # Calls by objdump: `call 1040 <printf@plt>`.
    text = run(compiler("objdump"), "-d", str(path))
    wanted = re.findall(r"\tcall\s+([0-9a-f]+) <(\w+)@plt>", text)
    named = dict(zip(graph.import_address.tolist(), graph.import_name, strict=True))
    assert len(wanted) > 5
    assert all(named[int(address, 16)] == name for address, name in wanted)
    calls = graph.edge_target[graph.edge_kind == Edge.CALL]
    known = np.isin(calls, graph.function_address) | np.isin(calls, graph.import_address)
    assert known.all()


@pytest.mark.parametrize("program", ["ls", "gzip"])
def test_calls_of_programs_of_the_system(program: str) -> None:
    graph = lift(compiler(program), facts=True)
    calls = graph.edge_target[graph.edge_kind == Edge.CALL]
    leave = ~np.isin(calls, graph.function_address)
    assert leave.mean() > 0.2
    assert np.isin(calls[leave], graph.import_address).mean() > 0.99
    assert any("--help" in text or "Usage" in text for text in graph.strings)


def test_a_static_and_a_headless_program(built: Path) -> None:
    static = compiles(built, "facts-static", FACTS_SOURCE, "-O1", "-static")
    at = symbols(static)
    graph = lift(stripped(static), facts=True)
    assert set(facts_of(graph, at["main"])[0]) >= WANTED
    path = compiles(built, "facts-O1", FACTS_SOURCE, "-O1", by="gcc")
    headless = lift(without_sections(stripped(path)), facts=True)
    main = symbols(path)["main"]
    assert set(facts_of(headless, main)[0]) >= WANTED
    assert called(headless, main) >= {"malloc", "abort"}


def test_jumps_through_slots_name_imports(built: Path) -> None:
    source = "#include <stdlib.h>\nvoid leave(int x) { exit(x + 5); }\n"
    source += "char *last(char *x) { return getenv(x); }"
    path = compiles(built, "tails.so", source, "-O2", "-fno-plt", "-shared", "-fPIC")
    graph = lift(path, facts=True)
    names = dict(zip(graph.function_name, graph.function_address.tolist(), strict=True))
    assert called(graph, names["last"]) == {"getenv"}
    assert Edge.INDIRECT not in graph.edge_kind[graph.edge_target > 0]


def test_a_pointer_is_no_constant_and_a_mask_is_one(built: Path) -> None:
    source = r"""
    .globl _start
    _start: mov edi, offset text
            cmp rax, offset text
            and eax, 0x401008
            mov ecx, 0x401008
            mov rdx, [text + rbx*8]
            mov rdx, [rbx*8 + 24]
            add rsp, 0x18
            mov r8, [rsp + 0x40]
            mov r9, [rbp - 8]
            mov r9, [r12 + 0x28]
            jmp ended
    ended:  ret
    text:   .asciz "text of the program"
    """
    graph = lift(assembled(built, "pointers", source), facts=True)
    assert graph.strings == ["text of the program"] and len(graph.string) == 3
    # RBP is not a frame pointer where nothing sets it so.
    assert graph.constant.tolist() == [0x401008, 24, -8, 0x28]


def test_strings_of_difficult_places() -> None:
    data = b"\x00abc\x00" + b"a\x00b\x00c\x00d\x00\x00\x00" + b"\xff\xfeabc\x00" + "naïve".encode()
    data += b"\x00tab\tbell\a\x00" + b"x" * (LONGEST + 9) + b"\x00no end"
    program = flat(b"\xc3")
    array = np.frombuffer(data, np.uint8)
    program.sections.append(Section("", 0x10, array, array, False))
    places = {name: 0x10 + data.index(name) for name in (b"abc", b"a\x00b", b"\xff", b"na", b"tab")}
    wanted = {places[b"abc"]: "abc", places[b"a\x00b"]: "abcd", places[b"na"]: "naïve"}
    wanted[places[b"tab"]] = "tab\tbell\a"
    addresses = np.arange(0x10, 0x10 + len(data) + 5, dtype=np.uint64)
    found = strings_at(program, addresses)
    assert {at: text for at, text in found.items() if at in places.values()} == wanted
    long = 0x10 + data.index(b"xxx")
    assert long not in found and long + 10 in found
    assert 0x10 + data.index(b"no end") not in found, "it does not end"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("go") is None, reason="needs go, which `make bench` installs")
def test_strings_of_go_have_a_length(tmp_path: Path) -> None:
    (tmp_path / "main.go").write_text(GO_SOURCE)
    env = {"HOME": str(tmp_path), "GOFLAGS": "-mod=mod"}
    command = [compiler("go"), "build", "-ldflags", "-s -w", "-o", "made", "main.go"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | env, check=True)
    graph = lift(tmp_path / "made", facts=True)
    at = graph.function_address[graph.function_name.index("main.main")]
    assert {"too many arguments", "a greeting\n"} <= set(facts_of(graph, int(at))[0])
    assert np.median([len(text) for text in graph.strings]) < 40, "one string each"


def test_strings_beside_numbers_that_are_no_lengths() -> None:
    # lea rdi, [rip + 9]; mov esi, 5; ret; then the strings, of C: the number says nothing.
    code = bytes.fromhex("488d3d09000000 be05000000 c3 000000")
    program = flat(code + b"hello world\0")
    assert lift(program, facts=True).strings == ["hello world"]
    program = flat(code + b"hello world\0/rustc/" + b"0" * 40 + b"/library\0")
    program.sections.append(
        dataclasses.replace(program.sections[0], address=0x500000, execute=False)
    )
    assert lift(program, facts=True).strings == ["hello"]


def test_a_graph_without_facts_has_empty_columns(built: Path) -> None:
    graph = lift(compiles(built, "facts-none", C_SOURCE, "-O1"))
    assert not graph.facts and not graph.import_name and not graph.strings
    assert graph.block_strings.tolist() == [0] * (len(graph.block_address) + 1)
    assert graph.block_constants.tolist() == [0] * (len(graph.block_address) + 1)
    empty = lift(flat(b"\x06"), facts=True)
    assert empty.facts and len(empty.block_strings) == 1


@pytest.mark.parametrize("code", ["a100904000 ffd0", "8b0d00904000 ffd1", "8b8b00100000 ffd1"])
def test_registers_of_slots_in_32_bit_code(code: str) -> None:
    program = flat(bytes.fromhex(code) + b"\xc3", bits=32)
    program.slot_address, program.slot_name = np.array([0x409000], np.uint64), ["GetVersion"]
    program.slot_target = np.zeros(1, np.uint64)
    # What EBX holds in the last of them.
    program.global_offset_table = 0x408000
    graph = lift(program, facts=True)
    assert graph.import_name == ["GetVersion"] and graph.unresolved == []
    assert graph.edge_kind[graph.edge_target == 0x409000].tolist() == [Edge.CALL]


@pytest.mark.parametrize("flags", [(), ("-m32", "-O2"), ("-m32", "-Os")])
def test_places_on_the_stack_are_those_of_a_walk(built: Path, flags: tuple[str, ...]) -> None:
    """Block by block in Python, with the growth of the stack by iced-x86."""
    path = compiles(built, f"slots{''.join(flags)}", FACTS_SOURCE, *flags)
    graph = lift(path if flags else Path("/bin/true"), facts=True)
    wanted: dict[int, int] = {}
    for function in range(len(graph.function_address)):
        wanted |= walked(graph, function)
    found = dict(zip(graph.slot_place.tolist(), graph.slot.tolist(), strict=True))
    assert len(wanted) > (5 if flags else 200)
    assert {row: found.get(row) for row in wanted} == wanted


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def walked(graph: Graph, function: int) -> dict[int, int]:
    """Row of an instruction with a memory operand at ESP or RSP → its place."""
    low, high = graph.function_blocks[function : function + 2].tolist()
    numbers = {int(graph.block_address[block]): block for block in range(low, high)}
    first = numbers.get(int(graph.function_address[function]))
    depths = {} if first is None else {first: 0}
    todo = list(depths)
    places: dict[int, int] = {}
    while todo:
        block = todo.pop()
        depth, row = depths[block], int(graph.block_instructions[block])
        code = graph.code[graph.block_bytes[block] : graph.block_bytes[block + 1]].tobytes()
        for one in iced_x86.Decoder(graph.bits, code):
            stack = (iced_x86.Register.RSP, iced_x86.Register.ESP)
            if one.memory_base in stack and one.mnemonic != iced_x86.Mnemonic.NOP:
                places[row] = signed(one.memory_displacement, graph.bits) - depth
            moves = one.op_count == 2 and one.op0_register in stack
            if one.mnemonic in (iced_x86.Mnemonic.PUSH, iced_x86.Mnemonic.POP):
                depth -= one.stack_pointer_increment
            elif moves and one.mnemonic == iced_x86.Mnemonic.SUB:
                depth += signed(one.immediate(1), graph.bits)
            elif moves and one.mnemonic == iced_x86.Mnemonic.ADD:
                depth -= signed(one.immediate(1), graph.bits)
            elif moves and one.mnemonic == iced_x86.Mnemonic.LEA and one.memory_base in stack:
                depth -= signed(one.memory_displacement, graph.bits)
            row += 1
        ways = slice(int(graph.block_edges[block]), int(graph.block_edges[block + 1]))
        for target, kind in zip(
            graph.edge_target[ways].tolist(), graph.edge_kind[ways].tolist(), strict=True
        ):
            after = numbers.get(target)
            if kind != Edge.CALL and after is not None and after not in depths:
                depths[after] = depth
                todo.append(after)
    return places
