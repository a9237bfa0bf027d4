"""Functions, blocks and edges of small programs whose truth is known."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.graph import Graph
from tokmill.x86.image.program import open_program
from tokmill.x86.lift.cfg import lift
from x86_programs import (
    C_SOURCE,
    CPP_SOURCE,
    assembled,
    blocks_of,
    check_graph,
    compiles,
    flat,
    overlapping,
    run,
    stripped,
    symbols,
    true_functions,
)

LEVELS = ("-O0", "-O1", "-O2", "-O3", "-Os")
WAYS: list[tuple[str, tuple[str, ...]]] = [
    ("gcc", ()), ("gcc", ("-m32", "-no-pie")), ("clang", ("-no-pie",)), ("clang", ("-m32",)),
]  # fmt: skip
# What ELF's start-up code calls has no symbol of its own where it reads its own address.
THUNK = bytes.fromhex("8b1c24c3")


def extra(graph: Graph, functions: set[int]) -> set[int]:
    """Return the functions of a graph that are none, get-my-address thunks apart."""
    found = set(graph.function_address.tolist()) - functions
    first = dict(zip(graph.block_address.tolist(), graph.block_bytes.tolist(), strict=False))
    return {a for a in found if graph.code[first[a] : first[a] + 4].tobytes() != THUNK}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("by", "flags"), WAYS)
def test_functions_of_every_level(built: Path, by: str, level: str, flags: tuple[str, ...]) -> None:
    path = compiles(built, f"{by}{level}{''.join(flags)}", C_SOURCE, level, *flags, by=by)
    functions, parts = true_functions(path)
    for one in (path, stripped(path)):
        graph = lift(one)
        check_graph(graph, one)
        assert overlapping(graph) == 0, "a byte of compiled code is in one block of its function"
        assert functions <= set(graph.function_address.tolist())
        assert extra(graph, functions | parts) == set()
    # Without unwind tables pointers, padding and what beginnings look like have to do.
    graph = lift(stripped(path, ".eh_frame", ".eh_frame_hdr"))
    check_graph(graph, path)
    assert len(functions - set(graph.function_address.tolist())) <= 2
    assert len(extra(graph, functions | parts)) <= 1


@pytest.mark.parametrize("flags", [("-static",), ("-static-pie",), ("-shared", "-fPIC")])
def test_functions_of_static_and_shared_programs(built: Path, flags: tuple[str, ...]) -> None:
    path = compiles(built, "linked" + "".join(flags), C_SOURCE, "-O2", *flags)
    functions, parts = true_functions(path)
    graph = lift(stripped(path))
    check_graph(graph, path)
    found = set(graph.function_address.tolist())
    assert len(functions & found) >= 0.99 * len(functions)
    assert len(extra(graph, functions | parts)) <= 0.01 * len(functions)


@pytest.mark.parametrize("by", ["g++", "clang++"])
def test_functions_of_cxx(built: Path, by: str) -> None:
    path = compiles(built, f"{by}-cxx", CPP_SOURCE, "-O2", by=by)
    functions, parts = true_functions(path)
    for one in (path, stripped(path)):
        graph = lift(one)
        check_graph(graph, one)
        assert functions <= set(graph.function_address.tolist())
        assert extra(graph, functions | parts) == set()


def test_blocks_end_at_calls_branches_and_where_others_begin(built: Path) -> None:
    source = r"""
    .globl _start
    _start: xor eax, eax
    loop:   inc eax
            call leaf
            cmp eax, 9
            jb loop
            jmp leave
    leave:  mov edi, eax
            ret
    leaf:   ret
    """
    path = assembled(built, "blocks", source)
    at = symbols(path)
    graph = lift(path)
    check_graph(graph, path)
    call = at["loop"] + 7
    assert blocks_of(graph, at["_start"]) == {
        at["_start"]: (2, [("FALL", at["loop"])]),
        at["loop"]: (7, [("CALL", at["leaf"]), ("FALL", call)]),
        call: (5, [("BRANCH", at["loop"]), ("FALL", call + 5)]),
        call + 5: (2, [("JUMP", at["leave"])]),
        at["leave"]: (3, [("RETURN", 0)]),
    }
    assert graph.function_name == ["_start", ""] and graph.unresolved == []


def test_names_are_those_of_symbols_and_of_imports(built: Path) -> None:
    path = compiles(built, "names", C_SOURCE, "-O1", "-fno-plt")
    graph = lift(path)
    assert {"main", "dispatch", "_start"} <= set(graph.function_name)
    assert graph.program == "names"
    assert set(lift(stripped(path)).function_name) <= {"", "__cxa_finalize", "__libc_start_main"}


@pytest.mark.parametrize("by", ["gcc", "clang"])
def test_padding_is_no_code(built: Path, by: str) -> None:
    source = "int f(int x) { return x + 1; }\nint g(int x) { return x ^ 3; }\n"
    source += "int main(void) { return f(1) + g(2); }"
    path = compiles(built, f"padded-{by}", source, "-O1", "-falign-functions=64", by=by)
    at = symbols(path)
    for one in (path, stripped(path)):
        graph = lift(one)
        for name in ("f", "g"):
            (block,) = blocks_of(graph, at[name]).values()
            assert block[0] < 16, "the block ends at its return"
        covered = sum(size for size, _ in blocks_of(graph, at["main"]).values())
        assert covered < 64


@pytest.mark.parametrize("place", ["behind", "before"])
def test_random_bytes_between_functions_are_no_functions(built: Path, place: str) -> None:
    generator = random.Random(7)
    functions = [f"int f{i}(int x) {{ return x * {2 * i + 3} + (x >> 3); }}" for i in range(12)]
    calls = " + ".join(f"f{i}({i})" for i in range(12))
    source = "\n".join(functions) + f"\nint main(void) {{ return {calls}; }}"
    (built / "junk.c").write_text(source)
    text = run("gcc", "-O0", "-S", "-o", "-", str(built / "junk.c"))
    lines = []
    for line in text.splitlines():
        junk = ",".join(str(byte) for byte in generator.randbytes(generator.randrange(1, 33)))
        if place == "before" and re.fullmatch(r"(f\d+|main):", line):
            # The function begins in the middle of what the bytes decode to.
            lines.append(f"\t.p2align 4\n\t.byte {junk}")
        lines.append(line)
        if place == "behind" and line.startswith("\t.size\tf"):
            lines.append(f"\t.byte {junk}\n\t.p2align 4,0xcc")
    path = compiles(built, f"junk-{place}.s", "\n".join(lines) + "\n")
    known, parts = true_functions(path)
    for one in (path, stripped(path)):
        found = set(lift(one).function_address.tolist())
        assert known <= found <= known | parts
    assert known <= set(
        lift(stripped(path, ".eh_frame", ".eh_frame_hdr")).function_address.tolist()
    )


def test_a_tail_that_functions_share_stands_under_each(built: Path) -> None:
    source = r"""
    .globl _start, one, two
    .type one, @function
    .type two, @function
    _start: call one
            call two
            ret
    one:    mov eax, 1
            test edi, edi
            jz tail
            ret
    two:    mov eax, 2
            jmp tail
            nop
    tail:   add eax, 7
            ret
    """
    path = assembled(built, "shared-tail", source)
    at = symbols(path)
    graph = lift(path)
    check_graph(graph, path)
    tail = {at["tail"]: (4, [("RETURN", 0)])}
    assert tail.items() <= blocks_of(graph, at["one"]).items()
    assert tail.items() <= blocks_of(graph, at["two"]).items()
    assert len(graph.function_address) == 3


def test_two_streams_of_instructions_that_overlap_are_both_there() -> None:
    # jz +1 into: mov eax, 0xc3909090 → nop; nop; nop; ret. Both go on to ret.
    graph = lift(flat(bytes.fromhex("7401 b8909090c3 c3")))
    blocks = blocks_of(graph, 0x401000)
    assert blocks == {
        0x401000: (2, [("BRANCH", 0x401003), ("FALL", 0x401002)]),
        0x401002: (5, [("FALL", 0x401007)]),
        0x401003: (4, [("RETURN", 0)]),
        0x401007: (1, [("RETURN", 0)]),
    }


def test_what_cannot_be_followed_is_told(built: Path) -> None:
    source = r"""
    .globl _start, broken, out
    _start: call rax
            call broken
            call out
            jmp rcx
    broken: nop
            .byte 0x06
    out:    jmp 0x10
    """
    path = assembled(built, "lost", source)
    at = symbols(path)
    graph = lift(path)
    reasons = [reason for _, reason in graph.unresolved]
    assert reasons == ["indirect call", "indirect jump", "no instruction", "leads out of the code"]
    addresses = [address for address, _ in graph.unresolved]
    assert addresses == sorted(addresses) and addresses[2:] == [at["broken"] + 1, at["out"]]


def test_a_program_is_not_changed_by_lifting(built: Path) -> None:
    path = compiles(built, "kept", C_SOURCE, "-O2")
    program = open_program(path)
    before = [section.linked.tobytes() for section in program.sections]
    a = lift(program)
    b = lift(program)
    assert [section.linked.tobytes() for section in program.sections] == before
    assert np.array_equal(a.edge_target, b.edge_target)


def test_the_label_of_an_end_is_no_function(built: Path) -> None:
    """OCaml has global labels without a type where the code of a module begins and ends."""
    text = """
        .globl _start, code_begin, code_end, next
        code_begin: _start: mov eax, 60
        syscall
        ret
        code_end: .p2align 5
        .type next, @function
        next: nop
        ret
    """
    path = assembled(built, "ends", text)
    graph = lift(path)
    where = symbols(path)
    assert where["code_end"] < where["next"] and where["code_begin"] == where["_start"]
    assert graph.function_address.tolist() == [where["_start"], where["next"]]


@pytest.mark.parametrize("before", [b"\x48\xb8", b"\x81\xc0", b"\x0f", b"\xe8\x01"])
def test_data_before_a_function_cuts_no_blocks_into_it(built: Path, before: bytes) -> None:
    data = ", ".join(str(byte) for byte in b"\7" * (8 - len(before)) + before)
    source = f"""
    .globl _start
    .type _start,@function
    _start: mov rax, [rip + table]; ret
    .size _start,.-_start
    .p2align 3
    table: .byte {data}
    .type second,@function
    second: .cfi_startproc; lea eax, [rdi + 5]; xor eax, 0x1234; ret; .cfi_endproc
    .size second,.-second
    """
    path = assembled(built, f"after-data-{before.hex()}", source)
    for one in (path, stripped(path)):
        graph = lift(one)
        assert len(blocks_of(graph, symbols(path)["second"])) == 1
