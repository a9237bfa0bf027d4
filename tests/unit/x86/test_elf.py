"""ELF files as programs: sections or segments, symbols, relocations, imports."""

import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.graph import Edge
from tokmill.x86.image.image import Program
from tokmill.x86.image.program import open_program
from tokmill.x86.lift.cfg import lift
from x86_programs import (
    C_SOURCE,
    assembled,
    blocks_of,
    compiles,
    run,
    stripped,
    symbols,
    true_functions,
    without_sections,
)


def imports(program: Program) -> dict[str, int]:
    """Return the import stubs: name → address."""
    return dict(zip(program.import_name, program.import_address.tolist(), strict=True))


def named(program: Program) -> dict[str, int]:
    """Return the function symbols: name → address."""
    return dict(zip(program.function_name, program.function_address.tolist(), strict=True))


@pytest.mark.parametrize(
    ("flags", "kind", "fixed"),
    [
        ((), "executable", False),
        (("-no-pie",), "executable", True),
        (("-shared", "-fPIC"), "shared", False),
        (("-static-pie",), "executable", False),
        (("-c",), "relocatable", False),
    ],
)
def test_kinds_of_programs(built: Path, flags: tuple[str, ...], kind: str, fixed: bool) -> None:
    path = compiles(built, "kind" + "".join(flags), C_SOURCE, "-O1", *flags)
    program = open_program(path)
    assert (program.form, program.kind, program.bits, program.word) == ("ELF", kind, 64, 8)
    assert program.fixed is fixed
    assert {"main", "dispatch", "walk", "checked"} <= set(named(program))
    assert np.all(np.diff(program.function_address.astype(np.int64)) > 0)
    if kind != "relocatable":
        functions, _ = true_functions(path)
        assert functions <= set(program.function_address.tolist())
        assert named(program)["main"] == symbols(path)["main"]
    else:
        assert min(program.function_address) >= 0x400000


@pytest.mark.parametrize("flags", [(), ("-no-pie",), ("-fcf-protection=full", "-Wl,-z,ibtplt")])
def test_import_stubs_have_the_names_of_what_they_import(
    built: Path, flags: tuple[str, ...]
) -> None:
    path = compiles(built, "imports" + "".join(flags), C_SOURCE, "-O1", *flags)
    for one in (path, stripped(path)):
        found = imports(open_program(one))
        assert {"puts", "printf", "exit", "rand"} <= set(found)
    # objdump makes names of its own for stubs: the second opinion.
    shown = {
        line.split("<")[1].split("@")[0]: int(line.split()[0], 16)
        for line in run("objdump", "-d", "-j", ".plt", "-j", ".plt.sec", str(path)).splitlines()
        if line.endswith("@plt>:")
    }
    found = imports(open_program(path))
    assert shown["puts"] == found["puts"] and shown["exit"] == found["exit"]


MOLD, MOLD_WITHOUT_ENDBR, RETPOLINE = "mold", "mold without ENDBR", "lld's retpoline"


def rewritten(path: Path, form: str, bits: int) -> Path:
    """Return a copy whose stubs are as another linker writes them."""
    out = path.with_name(f"{path.name}-{form}")
    data = bytearray(path.read_bytes())
    (section,) = (one for one in open_program(path).sections if one.name == ".plt.sec")
    begin = data.index(section.data.tobytes())
    for number, at in enumerate(range(begin, begin + len(section.data), 16)):
        entry = data[at : at + 16]
        place = entry.index(b"\xff") + 2
        slot = int.from_bytes(entry[place : place + 4], "little", signed=True)
        counted, jump = struct.pack("<I", number), bytes(entry[place - 2 : place])
        made = {
            MOLD: b"\xf3\x0f\x1e\xfa\x41\xbb" + counted + jump,
            MOLD_WITHOUT_ENDBR: b"\x41\xbb" + counted + jump,
            RETPOLINE: b"\x4c\x8b\x1d",
        }[form] if bits == 64 else b"\xf3\x0f\x1e\xfb\xb9" + counted + jump  # fmt: skip
        if bits == 64:
            slot += place - len(made)
        made += struct.pack("<i", slot) + b"\xe9" * (form == RETPOLINE)
        data[at : at + 16] = made.ljust(16, b"\xcc")
    out.write_bytes(data)
    out.chmod(0o755)
    return out


@pytest.mark.parametrize("form", [MOLD, MOLD_WITHOUT_ENDBR, RETPOLINE])
def test_stubs_of_mold_and_retpolines(built: Path, form: str) -> None:
    flags = ("-O1", "-fcf-protection=full", "-Wl,-z,ibtplt")
    path = compiles(built, "ibt", C_SOURCE, *flags)
    found = imports(open_program(path))
    made = rewritten(path, form, 64)
    assert imports(open_program(made)) == found
    a, b = lift(path), lift(made)
    assert a.function_address.tolist() == b.function_address.tolist()
    assert a.edge_target.tolist() == b.edge_target.tolist()
    if form != RETPOLINE:
        ran = [subprocess.run([one], capture_output=True, check=False) for one in (path, made)]
        assert ran[0].stdout == ran[1].stdout
        assert imports(open_program(without_sections(stripped(made)))) == found


def test_32_bit_stubs_of_mold(built: Path) -> None:
    source = "int far(int); int near(int x) { return far(x) + far(x + 1); }"
    flags = ("-m32", "-O1", "-fPIC", "-shared", "-nostdlib", "-fcf-protection", "-Wl,-z,ibtplt")
    path = compiles(built, "ibt32", source, *flags)
    found = imports(open_program(path))
    assert "far" in found and imports(open_program(rewritten(path, MOLD, 32))) == found


def test_a_byte_of_the_entry_before_is_no_number_of_mold(built: Path) -> None:
    names = ("ea", "eb", "ec", "ed")
    source = "".join(f"int {one}(int);" for one in names)
    source += "typedef int (*Far)(int); volatile Far all[4]; int _start(void) {"
    source += "".join(f"all[{i}] = {one};" for i, one in enumerate(names))
    source += "return " + " + ".join(f"{one}(1)" for one in names) + "; }"
    library = "".join(f"int {one}(int a) {{ return a; }}" for one in names)
    far = compiles(built, "libfar.so", library, "-m32", "-nostdlib", "-shared", "-fPIC")
    path = compiles(built, "got", source, "-m32", "-nostdlib", "-fpie", "-no-pie", "-O1",
                    "-Wl,-z,norelro", "-Wl,--section-start=.got=0x0804b9c0",
                    "-Wl,--no-as-needed", str(far))  # fmt: skip
    shown = run("objdump", "-d", "-M", "intel", "-j", ".plt.got", str(path))
    entries = re.findall(r"^ *([0-9a-f]+):.*jmp +DWORD PTR", shown, re.MULTILINE)
    program = open_program(path)
    assert len(entries) == 4 and set(program.import_name) == set(names)
    assert [f"{at:x}" for at in program.import_address.tolist()] == entries


def test_an_argument_of_an_import_that_is_called_last_is_no_number_of_mold(built: Path) -> None:
    source = (
        "int __attribute__((fastcall)) far(int); int wrap(void) { return far(5); }"
        "int _start(void) { return wrap() + 1; }"
    )
    library = "int __attribute__((fastcall)) far(int a) { return a; }"
    flags = ("-m32", "-nostdlib", "-O2")
    fast = compiles(built, "libfast.so", library, *flags, "-shared", "-fPIC")
    path = compiles(built, "fast", source, *flags, "-fno-pic", "-no-pie", "-fno-plt",
                    "-fcf-protection", "-fno-inline", "-Wl,--no-as-needed", str(fast))  # fmt: skip
    assert symbols(path)["wrap"] not in open_program(path).import_address.tolist()


def test_a_program_without_section_headers_is_read_by_its_segments(built: Path) -> None:
    path = compiles(built, "headless", C_SOURCE, "-O1")
    bare = without_sections(stripped(path))
    whole, cut = open_program(stripped(path)), open_program(bare)
    assert not any(section.name for section in cut.sections)
    assert cut.kind == "executable" and cut.entry == whole.entry
    assert imports(cut) == imports(whole)
    assert cut.unwind.start.tolist() == whole.unwind.start.tolist()
    a, b = lift(whole), lift(cut)
    starts = set(a.function_address.tolist())
    assert len(starts & set(b.function_address.tolist())) >= 0.95 * len(starts)


def test_relocations_of_an_object_file_are_applied(built: Path) -> None:
    path = compiles(built, "object", C_SOURCE, "-O2", "-c", "-ffunction-sections")
    program = open_program(path)
    graph = lift(program)
    names = dict(zip(graph.function_address.tolist(), graph.function_name, strict=True))
    assert {"puts", "printf", "exit"} <= set(program.import_name)
    calls = graph.edge_target[np.isin(graph.edge_kind, (Edge.CALL, Edge.JUMP))].tolist()
    stubs = dict(zip(program.import_address.tolist(), program.import_name, strict=True))
    called = {stubs.get(target) or names.get(target) for target in calls}
    assert {"puts", "printf", "dispatch", "walk", "checked"} <= called
    # What the relocations change is not what the file holds, and the graph holds the file's bytes.
    main = named(program)["main"]
    assert names[main] == "main"
    section = program.section_at(main)
    assert section is not None and section.linked is not section.data
    raw = section.data[main - section.address :][:64].tobytes()
    block = graph.block_address.tolist().index(main)
    code = graph.code[graph.block_bytes[block] : graph.block_bytes[block + 1]].tobytes()
    assert raw.startswith(code[:64])


@pytest.mark.parametrize("width", ["-m64", "-m32"])
def test_a_short_jump_into_another_section_of_an_object(built: Path, width: str) -> None:
    source = r"""
    .globl f, g
    .type f, @function
    .type g, @function
    f: je g
    ret
    .section .text.b, "ax"
    g: xor %eax, %eax
    ret
    """
    # The assembler takes the long form of a jump; this one has none.
    source = source.replace("je", "jrcxz" if width == "-m64" else "jecxz")
    path = compiles(built, f"short{width}.s", source, width, "-c")
    program, graph = open_program(path), lift(path)
    assert graph.edge_target[graph.edge_kind == Edge.BRANCH].tolist() == [named(program)["g"]]


def test_a_partly_linked_object_is_laid_out_section_by_section(built: Path) -> None:
    one = compiles(built, "one.o", "int g(int); int f(int x) { return g(x) + 1; }", "-O1", "-c")
    two = compiles(built, "two.o", "int g(int x) { return x * 3; }", "-O1", "-c")
    path = built / "both.o"
    run("ld", "-r", "-o", str(path), str(one), str(two))
    program = open_program(path)
    graph = lift(program)
    calls = graph.edge_target[graph.edge_kind == Edge.CALL].tolist()
    assert calls == [named(program)["g"]]


def test_symbols_of_one_address_give_one_function(built: Path) -> None:
    source = r"""
    .globl longer_name, name, weak_a
    .weak weak_a
    .type longer_name, @function
    .type name, @function
    .type weak_a, @function
    .type local_a, @function
    .globl _start
    _start: ret
    local_a:
    weak_a:
    longer_name:
    name: ret
    .globl label
    label: ret
    local_label: ret
    """
    program = open_program(assembled(built, "aliases", source))
    # Global before weak before local, then the shortest; an untyped label counts if it is global.
    assert program.function_name == ["_start", "name", "label"]


def test_thirty_two_bits(built: Path) -> None:
    source = ".globl _start\n_start: call f\nmov eax, 1\nint 0x80\nf: ret\n"
    program = open_program(assembled(built, "narrow", source, bits=32))
    assert (program.bits, program.word, program.kind) == (32, 4, "executable")
    assert program.entry == program.function_address[0] == symbols(built / "narrow.s")["_start"]


def test_small_pointers_and_wide_instructions(built: Path) -> None:
    source = ".intel_syntax noprefix\n.globl _start\n_start: mov rax, rbx\nret\n"
    (built / "x32.s").write_text(source)
    run("as", "--x32", "-o", str(built / "x32.o"), str(built / "x32.s"))
    run("ld", "-m", "elf32_x86_64", "-o", str(built / "x32"), str(built / "x32.o"))
    program = open_program(built / "x32")
    assert (program.bits, program.word) == (64, 4)
    assert lift(program).lengths.tolist() == [3, 1]


def test_what_tables_call_without_a_symbol_is_known(built: Path) -> None:
    source = r"""
    static int n;
    static void __attribute__((constructor)) before(void) { n = 1; }
    static void __attribute__((destructor)) after(void) { n = 2; }
    int main(void) { return n; }
    """
    path = compiles(built, "constructors", source, "-O1")
    program = open_program(stripped(path))
    assert {symbols(path)["before"], symbols(path)["after"]} <= set(program.starts.tolist())
    assert len(program.function_address) == 0


def test_damaged_tables_are_empty_not_fatal(built: Path) -> None:
    path = compiles(built, "damaged", C_SOURCE, "-O1")
    data = bytearray(stripped(path).read_bytes())
    place, entry, count = (
        *struct.unpack_from("<Q", data, 40),
        *struct.unpack_from("<HH", data, 58),
    )
    for number in range(count):
        at = place + number * entry
        if struct.unpack_from("<I", data, at + 4)[0] in (4, 5, 6, 11):
            struct.pack_into("<QQ", data, at + 24, 1 << 60, 1 << 61)
    broken = built / "damaged-tables"
    broken.write_bytes(data)
    program = open_program(broken)
    assert program.entry and program.import_name == []
    assert len(lift(program).function_address) > 5


POINTED = r"""
__attribute__((noinline)) static int add(int a) { return a + 3; }
__attribute__((noinline)) static int mul(int a) { return a * 7; }
__attribute__((noinline)) static int neg(int a) { return ~a + 11; }
typedef int (*step)(int);
step steps[] = {add, mul, neg, add, 0, 0, mul};
static step more[80] = {[0] = neg, [1] = add, [70] = mul, [79] = neg};
int run(int n, int a) { return steps[n & 3](a) + more[n & 79](a); }
"""


@pytest.mark.parametrize("width", ["-m64", "-m32"])
@pytest.mark.parametrize("sections", [True, False])
def test_packed_relocations_are_as_the_others(built: Path, width: str, sections: bool) -> None:
    flags = (width, "-O1", "-shared", "-fPIC", "-nostdlib", "-fcf-protection=none")
    plain = compiles(built, "relr-plain" + width, POINTED, *flags)
    packed = compiles(built, "relr-packed" + width, POINTED, *flags, "-Wl,-z,pack-relative-relocs")
    functions = {symbols(packed)[name] for name in ("add", "mul", "neg")}
    if not sections and width == "-m64":
        plain, packed = without_sections(plain), without_sections(packed)
    values = [np.sort(open_program(path).pointers) for path in (plain, packed)]
    assert len(values[0]) == len(values[1]) >= 8
    assert functions <= set(values[1].tolist())


@pytest.mark.parametrize("width", ["-m64", "-m32"])
@pytest.mark.parametrize("kind", ["-shared", "-c"])
def test_pointers_into_the_middle_of_a_symbol(built: Path, width: str, kind: str) -> None:
    """The distance lies beside the relocation in 64 bits, at its place in 32."""
    source = "int all[9] = {1}, none[9], more[9]; int f(void) { return none[1]; }"
    source += "int *one = &all[3], *two = all + 4, *last = more;"
    flags = (width, kind, "-fPIC", "-nostdlib", "-fcommon")
    program = open_program(compiles(built, f"middle{width}{kind}", source, *flags))
    at = dict(zip(program.symbol_name, program.symbol_address, strict=True))
    named_at = np.asarray([at["one"], at["two"], at["last"]], np.uint64)
    expected = [at["all"] + 12, at["all"] + 16, at["more"]]
    assert program.load(named_at).tolist() == expected
    assert kind == "-c" or set(expected) <= set(program.pointers.tolist())
    # Common symbols, which no section holds yet, lie apart from each other and from all else.
    assert abs(int(at["more"]) - int(at["none"])) >= 36 and min(program.symbol_address) > 0x100


def test_symbols_end_where_the_next_table_begins(built: Path) -> None:
    """lld writes versions and hashes between the symbols and their strings."""
    path = compiles(built, "ends", "int f(void) { return 1; } int g = 2;", "-shared", "-nostdlib")
    bare = without_sections(path)
    program, data = open_program(bare), bytearray(bare.read_bytes())
    assert program.exports == ["f", "g"]
    dynamic = next(one for one in open_program(path).sections if one.name == ".dynamic")
    tags = dict(dynamic.data.view("<u8").reshape(-1, 2).tolist())
    begin = data.index(dynamic.data.tobytes())
    # Now the hashes seem to be where the second of the symbols was.
    at = begin + 16 * [*tags].index(0x6FFFFEF5) + 8
    struct.pack_into("<Q", data, at, tags[6] + 2 * 24)
    bare.write_bytes(data)
    assert len(open_program(bare).exports) == 1


@pytest.mark.parametrize("base", [0, 0x1000])
def test_code_at_address_0(built: Path, base: int) -> None:
    source = (
        ".globl _start\n_start: lea eax, [rdi+3]; ret\n.type last,@function\nlast: inc eax; ret"
    )
    path = compiles(
        built, f"based-{base}.s", ".intel_syntax noprefix\n.text\n" + source,
        "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", f"-Wl,-Ttext={base}",
    )  # fmt: skip
    at = symbols(path)
    assert set(lift(path).function_address.tolist()) == {at["_start"], at["last"]}


GOT = r"""
#include <stdlib.h>
extern int helper(int);
static int counted;
__attribute__((noinline)) int up(int a) { return helper(a) + 1; }
void stop(int a) { if (a > 3) { exit(a); } helper(a + 2); counted++; }
int own(int a) { return up(a) * 3; }
"""


@pytest.mark.parametrize(
    ("by", "width"), [("gcc", "-m64"), ("gcc", "-m32"), ("clang", "-m64"), ("clang", "-m32")]
)
@pytest.mark.parametrize("level", ["-O0", "-Os"])
def test_calls_through_the_offset_table_of_an_object(
    built: Path, by: str, width: str, level: str
) -> None:
    path = compiles(
        built, f"got-{by}{width}{level}", GOT, level, width, "-fPIC", "-fno-plt", "-c", by=by
    )
    graph = lift(path, facts=True)
    imports = dict(zip(graph.import_address.tolist(), graph.import_name, strict=True))
    names = dict(zip(graph.function_address.tolist(), graph.function_name, strict=True))
    called: dict[str, set[str]] = {}
    for address, name in names.items():
        for _, edges in blocks_of(graph, address).values():
            targets = [target for kind, target in edges if kind in ("CALL", "JUMP")]
            called.setdefault(name, set()).update(
                imports.get(target, names.get(target, "")) for target in targets
            )
    assert "helper" in called["up"] and {"exit", "helper"} <= called["stop"]
    assert "up" in called["own"]
    assert not {"helper", "exit"} & called["own"]


@pytest.mark.parametrize("flags", ["", "-static", "-shared -fPIC -nostdlib", "-Wl,-z,now"])
def test_where_the_offset_table_of_32_bit_code_is(built: Path, flags: str) -> None:
    """Static programs and those without stubs do not say it among what a loader reads."""
    source = "double f(double a) { return a * 1.5; } int main(void) { return f(2); }"
    path = compiles(built, f"table{flags.replace(' ', '')}", source, "-m32", "-O1", *flags.split())
    program, at = open_program(stripped(path)), symbols(path)
    assert program.global_offset_table == at["_GLOBAL_OFFSET_TABLE_"]
    graph = lift(path, facts=True)
    block = graph.function_blocks[graph.function_address.tolist().index(at["f"])]
    inside = graph.block_instructions[[block, block + 2]]
    rows = graph.reference_place // 8
    (place,) = graph.reference[(rows >= inside[0]) & (rows < inside[1])].tolist()
    assert program.read(place, 4).tobytes() == struct.pack("<f", 1.5)


def test_more_sections_than_a_symbol_can_number(built: Path) -> None:
    count = 65_300
    lines = [f'.section .t{n},"ax"\n.globl f{n}\n.type f{n},@function\nf{n}: ret' for n in range(3)]
    lines += [f'.section .d{n},"a"\n.byte 1' for n in range(count)]
    lines += ['.section .last,"ax"\n.globl last\n.type last,@function\nlast: inc %eax\nret']
    path = compiles(built, "sections.s", "\n".join(lines), "-c")
    program = open_program(path)
    assert {"f0", "f1", "f2", "last"} == set(program.function_name)
    at = named(program)["last"]
    assert program.read(at, 3).tobytes() == b"\xff\xc0\xc3"


def test_sections_of_their_own_change_no_function(built: Path) -> None:
    source = "\n".join(
        f"int g{n}(int); int f{n}(int x) {{ return g{n}(x) * {n + 3} + x; }}" for n in range(40)
    )
    graphs = [
        lift(compiles(built, f"own-{flag}", source, "-O2", "-c", f"-f{flag}function-sections"))
        for flag in ("", "no-")
    ]
    codes = []
    for graph in graphs:
        blocks = graph.block_bytes[graph.function_blocks]
        assert not graph.unresolved
        codes.append(
            {
                name: int(stop - start)
                for name, start, stop in zip(
                    graph.function_name, blocks[:-1], blocks[1:], strict=True
                )
            }
        )
    assert codes[0] == codes[1] and len(codes[0]) == 40


NO_TABLE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
__attribute__((noinline)) void drop(char *text) { free(text); }
__attribute__((noinline)) long find(char *text, int c) {
    if (c > 3) return (long)strchr(text, c);
    puts(text);
    return strlen(text);
}
__attribute__((noinline)) int last(char *text) { return puts(text); }
int main(int argc, char **argv) { drop(malloc(argc)); return find(*argv, argc) + last(*argv); }
"""


@pytest.mark.parametrize("flags", [("-fno-plt",), ("-fplt",), ("-fno-plt", "-Wl,-z,lazy")])
@pytest.mark.parametrize("cet", ["none", "full"])
@pytest.mark.parametrize("layout", ["separate-code", "noseparate-code"])
def test_without_sections_functions_keep_their_ends(
    built: Path, flags: tuple[str, ...], cet: str, layout: str
) -> None:
    name = f"slots{''.join(flags)}{cet}{layout}".replace(",", "")
    flags = (*flags, "-O2", f"-fcf-protection={cet}", f"-Wl,-z,{layout}")
    path = compiles(built, name, NO_TABLE, *flags)
    whole, segments = (lift(one) for one in (path, without_sections(path)))
    mine = [symbols(path)[name] for name in ("drop", "find", "last", "main")]
    for address in mine:
        assert blocks_of(segments, address) == blocks_of(whole, address)
    # Neither the header of the file nor what jumps to the loader is a function.
    first = set(segments.function_address.tolist()) - set(whole.function_address.tolist())
    assert not {0} & first
