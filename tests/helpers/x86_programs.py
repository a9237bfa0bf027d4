"""Small programs for tests of the lifter, made here by the compilers that there are."""

import functools
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from iced_x86 import Decoder, FlowControl

from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import Program, Section
from tokmill.x86.image.program import open_program

C_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>

typedef int (*operation)(int, int);

static int add(int a, int b) { return a + b; }
static int sub(int a, int b) { return a - b; }
static int mul(int a, int b) { return a * b; }
operation table[] = {add, sub, mul};

__attribute__((noinline)) static void die(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(3);
}

__attribute__((noinline)) static void give_up(int code) {
    if (code > 100)
        die("large");
    die("small");
}

__attribute__((noinline)) int dispatch(int which, int x) {
    switch (which) {
    case 10: return printf("ten %d\n", x);
    case 11: return x * 3 + 1;
    case 12: return abs(x) - 7;
    case 13: return putchar('d');
    case 14: return x ^ 0x55;
    case 16: return rand();
    case 17: return x << 3;
    case 19: errno = x; return -1;
    default: return 0;
    }
}

__attribute__((noinline)) int walk(const char *text) {
    int state = 0;
    for (; *text; text++) {
        switch (*text & 7) {
        case 0: state += 1; break;
        case 1: state ^= 3; break;
        case 2: state *= 5; break;
        case 3: puts("three"); break;
        case 4: state -= 9; break;
        case 5: state |= 64; break;
        case 6: state = ~state; break;
        default: state >>= 1;
        }
    }
    return state;
}

__attribute__((noinline)) int interpret(const unsigned char *code) {
    static const void *const labels[] = {&&op_add, &&op_sub, &&op_twice, &&op_stop};
    int sum = 0;
    goto *labels[*code++ & 3];
op_add: sum += *code++; goto *labels[*code++ & 3];
op_sub: sum -= *code++; goto *labels[*code++ & 3];
op_twice: sum *= 2; goto *labels[*code++ & 3];
op_stop: return sum;
}

__attribute__((noinline)) static int even(unsigned n);
__attribute__((noinline)) static int odd(unsigned n) { return n == 0 ? 0 : even(n - 1); }
static int even(unsigned n) { return n == 0 ? 1 : odd(n - 1); }

__attribute__((noinline)) int checked(int x) {
    if (x < 0)
        give_up(x);
    return x + 1;
}

int unused(int x) { return x * 17 + checked(x); }

int main(int argc, char **argv) {
    int total = dispatch(argc + 9, 4) + walk(argv[0]) + checked(argc);
    total += table[argc % 3](total, 2) + odd(total & 15);
    return interpret((const unsigned char *)argv[0]) + total;
}
"""

CPP_SOURCE = r"""
#include <stdexcept>
#include <string>
#include <vector>

struct Thing {
    std::string name;
    explicit Thing(const std::string &n) : name(n) {
        if (n.empty()) throw std::invalid_argument("no");
    }
    virtual ~Thing() {}
    virtual int size() const { return static_cast<int>(name.size()); }
};

struct Twice : Thing {
    using Thing::Thing;
    int size() const override { return 2 * Thing::size(); }
};

__attribute__((noinline)) int measure(const std::vector<std::string> &names) {
    int total = 0;
    for (const auto &name : names) {
        try {
            Twice one(name);
            total += one.size();
        } catch (const std::invalid_argument &) {
            total -= 1;
        }
    }
    return total;
}

int main(int argc, char **argv) { return measure({argv, argv + argc}); }
"""


def compiler(name: str) -> str:
    """Return a compiler's path; the test is skipped where it is not there."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


@functools.cache
def has_small_library() -> bool:
    """Return whether 32-bit programs can be linked (Debian's gcc-multilib)."""
    done = subprocess.run(
        ["gcc", "-m32", "-x", "c", "-o", os.devnull, "-"],
        input='#include <stdio.h>\nint main(void) { return puts(""); }',
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0


def compiles(folder: Path, name: str, source: str, *flags: str, by: str = "gcc") -> Path:
    """Compile C, C++ (by g++, clang++) or, with a name that ends in .s, assembler."""
    path = folder / name
    if "-m32" in flags and not name.endswith(".s") and not has_small_library():
        pytest.skip("needs a 32-bit C library (gcc-multilib)")
    if not path.exists():
        suffix = ".s" if name.endswith(".s") else ".cc" if by.endswith("++") else ".c"
        text = folder / f"{name}-source{suffix}"
        text.write_text(source)
        run(compiler(by), *flags, "-w", "-o", str(path), str(text))
    return path


def assembled(folder: Path, name: str, source: str, bits: int = 64) -> Path:
    """Return a program of assembler alone (Intel syntax), at 0x401000 or 0x8049000 on."""
    flags = ["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", f"-m{bits}"]
    return compiles(folder, f"{name}.s", ".intel_syntax noprefix\n.text\n" + source, *flags)


def stripped(path: Path, *sections: str) -> Path:
    """Return a copy without symbols and without some sections."""
    out = path.with_name(path.name + "-stripped" + "".join(sections))
    if not out.exists():
        remove = [word for section in sections for word in ("-R", section)]
        run(compiler("objcopy"), "--strip-all", *remove, str(path), str(out))
    return out


def without_sections(path: Path) -> Path:
    """Return a copy of an ELF file for x86-64 that has segments only."""
    out = path.with_name(path.name + "-headless")
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 40, 0)
    struct.pack_into("<3H", data, 58, 0, 0, 0)
    out.write_bytes(data)
    return out


def run(*command: str) -> str:
    """Run a tool and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def symbols(path: Path) -> dict[str, int]:
    """Return all named symbols of an ELF file: name → address."""
    return {name: address for name, address, _ in _symbols(path)}


def true_functions(path: Path) -> tuple[set[int], set[int]]:
    """Return the addresses of function symbols, and those of parts of functions."""
    functions, parts = set(), set()
    for name, address, kind in _symbols(path):
        if kind in ("STT_FUNC", "STT_GNU_IFUNC"):
            (parts if re.search(r"\.(cold|part)\b", name) else functions).add(address)
    return functions, parts - functions


def _symbols(path: Path) -> Iterable[tuple[str, int, str]]:
    with open(path, "rb") as file:
        table = ELFFile(file).get_section_by_name(".symtab")
        return [
            (symbol.name, symbol["st_value"], symbol["st_info"]["type"])
            for symbol in table.iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF"
        ]


def blocks_of(graph: Graph, function: int) -> dict[int, tuple[int, list[tuple[str, int]]]]:
    """Return the blocks of the function at an address: address → (bytes, edges by kind)."""
    number = graph.function_address.tolist().index(function)
    found = {}
    for block in range(graph.function_blocks[number], graph.function_blocks[number + 1]):
        ways = slice(graph.block_edges[block], graph.block_edges[block + 1])
        kinds = [Edge(kind).name for kind in graph.edge_kind[ways].tolist()]
        edges = sorted(zip(kinds, graph.edge_target[ways].tolist(), strict=True))
        size = int(graph.block_bytes[block + 1] - graph.block_bytes[block])
        found[int(graph.block_address[block])] = (size, edges)
    return found


def check_graph(graph: Graph, path: Path | None, whole: bool = True) -> None:
    """Check all that a graph promises, against itself and the bytes of the program.

    Not `whole`: it was lifted in windows, and jumps lead from one into the middle of another.
    """
    functions, blocks = len(graph.function_address), len(graph.block_address)
    for bounds, count in (
        (graph.function_blocks, blocks),
        (graph.block_bytes, len(graph.code)),
        (graph.block_instructions, len(graph.lengths)),
        (graph.block_edges, len(graph.edge_target)),
    ):
        assert bounds.dtype == np.int64 and bounds[0] == 0 and bounds[-1] == count
        assert (np.diff(bounds) >= (0 if bounds is graph.block_edges else 1)).all()
    assert len(graph.function_blocks) == functions + 1 == len(graph.function_name) + 1
    assert len(graph.edge_kind) == len(graph.edge_target)
    assert (graph.function_address[1:] > graph.function_address[:-1]).all()
    assert graph.function_address.all(), "0 means nowhere"
    owner = np.repeat(np.arange(functions), np.diff(graph.function_blocks))
    # Under each function its beginning, what lies behind it, what lies before it: each once.
    pairs = list(zip(owner.tolist(), graph.block_address.tolist(), strict=True))
    begins = graph.function_address.tolist()
    known = set(pairs)
    assert pairs == sorted(known, key=lambda one: (one[0], one[1] < begins[one[0]], one[1]))
    assert graph.block_address[graph.function_blocks[:-1]].tolist() == begins
    if blocks:
        _check_instructions(graph)
    strange = _check_edges(graph, owner, known)
    assert strange <= (0 if whole else len(graph.edge_target) // 50)
    if path is not None:
        _check_bytes(graph, path)


def overlapping(graph: Graph) -> int:
    """Return how many blocks reach into the next one of their function."""
    owner = np.repeat(np.arange(len(graph.function_address)), np.diff(graph.function_blocks))
    end = graph.block_address + np.diff(graph.block_bytes).astype(np.uint64)
    begin = graph.block_address
    inside = (owner[1:] == owner[:-1]) & (begin[1:] > begin[:-1])
    return int((inside & (end[:-1] > begin[1:])).sum())


def _check_instructions(graph: Graph) -> None:
    """Each block decodes into instructions of the lengths that the graph gives."""
    sizes = np.add.reduceat(graph.lengths.astype(np.int64), graph.block_instructions[:-1])
    assert (sizes == np.diff(graph.block_bytes)).all()
    code = graph.code.tobytes()
    for block, address in enumerate(graph.block_address.tolist()):
        begin, end = graph.block_bytes[block : block + 2].tolist()
        first, last = graph.block_instructions[block : block + 2].tolist()
        found = list(Decoder(graph.bits, code[begin:end], ip=address))
        assert [len(one) for one in found] == graph.lengths[first:last].tolist()
        assert all(found), "no invalid instruction"
        # Only the last one leads elsewhere.
        inner = {one.flow_control for one in found[:-1]}
        assert inner <= {FlowControl.NEXT, FlowControl.INTERRUPT, FlowControl.XBEGIN_XABORT_XEND,
                         FlowControl.CALL}  # fmt: skip


def _check_edges(graph: Graph, owner: np.ndarray, known: set[tuple[int, int]]) -> int:
    """Edges lead to blocks of the same function, to functions, or out; return how many do not."""
    strange = 0
    functions = set(graph.function_address.tolist())
    everywhere = set(graph.block_address.tolist())
    lost = {address for address, _ in graph.unresolved}
    for block, address in enumerate(graph.block_address.tolist()):
        end = address + int(graph.block_bytes[block + 1] - graph.block_bytes[block])
        ways = slice(graph.block_edges[block], graph.block_edges[block + 1])
        targets, kinds = graph.edge_target[ways].tolist(), graph.edge_kind[ways].tolist()
        for target, kind in zip(targets, kinds, strict=True):
            if kind == Edge.FALL:
                assert target == end
            if kind == Edge.RETURN:
                assert target == 0
            if kind != Edge.CALL and target in everywhere:
                inner = (int(owner[block]), target) in known
                strange += not inner and target not in functions
            if kind == Edge.CALL and target in everywhere:
                assert target in functions or lost
        assert kinds.count(Edge.FALL) <= 1 and (Edge.FALL not in kinds or kinds[-1] == Edge.FALL)
    return strange


def _check_bytes(graph: Graph, path: Path) -> None:
    """The bytes are those of the file."""
    program = open_program(path)
    for block in range(0, len(graph.block_address), 7):
        begin, end = graph.block_bytes[block : block + 2].tolist()
        address = int(graph.block_address[block])
        section = program.section_at(address)
        assert section is not None and section.execute
        place = address - section.address
        assert np.array_equal(graph.code[begin:end], section.data[place : place + end - begin])


def table_targets(graph: Graph, function: int) -> list[list[int]]:
    """Return the targets of the indirect jumps of a function that are known, jump by jump."""
    found = []
    for _, edges in blocks_of(graph, function).values():
        targets = [target for kind, target in edges if kind == "INDIRECT" and target]
        if targets:
            found.append(targets)
    return found


def flat(*codes: bytes, bits: int = 64, base: int = 0x401000) -> Program:
    """Return a program that is nothing but code, each part a section 256 bytes behind the last.

    Functions begin where sections do, the entry is the first.
    """
    sections = []
    for number, code in enumerate(codes):
        data = np.frombuffer(code, np.uint8)
        sections.append(Section("", base + 256 * number, data, data, True))
        assert len(codes) == 1 or len(code) <= 256
    program = Program("flat", "ELF", "executable", bits, bits // 8, sections, base, fixed=True)
    program.starts = np.asarray([section.address for section in sections], np.uint64)
    return program


def pe_file(
    code: bytes, imports: tuple[str, ...] = (), ranges: tuple[tuple[int, int], ...] = ()
) -> bytes:
    """Return a PE file for x86-64 at 0x140000000: code at 0x1000, imports and .pdata at 0x2000.

    The slots of the imports (of KERNEL32.dll) lie at 0x2000, 0x2008, …
    """
    slots = b"".join(struct.pack("<Q", 0x2200 + 32 * i) for i in range(len(imports))) + bytes(8)
    data = bytearray(0x1000)
    data[: len(slots)] = slots
    data[0x80 : 0x80 + len(slots)] = slots
    data[0x100:0x114] = struct.pack("<5I", 0x2080, 0, 0, 0x2180, 0x2000)
    data[0x180:0x18D] = b"KERNEL32.dll\0"
    for i, name in enumerate(imports):
        data[0x202 + 32 * i : 0x202 + 32 * i + len(name)] = name.encode()
    table = b"".join(struct.pack("<3I", begin, end, 0x2700) for begin, end in ranges)
    data[0x600 : 0x600 + len(table)] = table
    data[0x700] = 1
    directories = [(0, 0)] * 16
    directories[1] = (0x2100, 40) if imports else (0, 0)
    directories[3] = (0x2600, len(table)) if ranges else (0, 0)
    optional = struct.pack("<HBBIIIII", 0x20B, 14, 0, 0x1000, 0x1000, 0, 0x1000, 0x1000)
    optional += struct.pack("<QIIHHHHHHIIIIHH", 0x140000000, 0x1000, 0x200, 6, 0, 0, 0, 6, 0, 0,
                            0x3000, 0x200, 0, 3, 0x8160)  # fmt: skip
    optional += struct.pack("<QQQQII", 0x100000, 0x1000, 0x100000, 0x1000, 0, 16)
    optional += b"".join(struct.pack("<II", *one) for one in directories)
    head = b"MZ" + bytes(0x3A) + struct.pack("<I", 0x40) + b"PE\0\0"
    head += struct.pack("<HHIIIHH", 0x8664, 2, 0, 0, 0, len(optional), 0x22) + optional
    for name, address, place, flags in (
        (b".text", 0x1000, 0x200, 0x60000020), (b".rdata", 0x2000, 0x1200, 0x40000040)
    ):  # fmt: skip
        head += struct.pack("<8sIIIIIIHHI", name, 0x1000, address, 0x1000, place, 0, 0, 0, 0, flags)
    return head.ljust(0x200, b"\0") + code.ljust(0x1000, b"\xcc") + bytes(data)
