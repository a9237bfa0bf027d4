"""Switches: where their tables lie and where they lead, for what compilers make of them."""

import itertools
from pathlib import Path

import pytest

from tokmill.x86.lift.cfg import lift
from x86_programs import (
    C_SOURCE,
    assembled,
    blocks_of,
    compiles,
    flat,
    stripped,
    symbols,
    table_targets,
)

# Each case calls a function of its own, so a target of a table can be told by its call.
SWITCH = r"""
extern volatile int out;
volatile int out;
#define CASE(n) __attribute__((noinline)) void case_##n(void) { out = n; }
CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9)
__attribute__((noinline)) void other(void) { out = -1; }
__attribute__((noinline)) int choose(%(type)s which) {
    switch (which %(mask)s) {
    case %(low)s + 0: case_0(); break;
    case %(low)s + 1: case_1(); out = 4; break;
    case %(low)s + 2: case_2(); break;
    case %(low)s + 3: case_3(); out = 7; break;
    case %(low)s + 5: case_5(); break;
    case %(low)s + 6: case_6(); out = 2; break;
    case %(low)s + 7: case_7(); break;
    case %(low)s + 9: case_9(); out = 1; break;
    %(default)s
    }
    return out + 1;
}
int main(int argc, char **argv) { return choose(argc); }
"""
CASES = {f"case_{number}" for number in (0, 1, 2, 3, 5, 6, 7, 9)}
LEVELS = ("-O0", "-O2", "-Os")
FLAGS = [
    (), ("-no-pie", "-fno-pic"), ("-fPIC",), ("-fcf-protection=full",), ("-c",),
    ("-m32", "-no-pie", "-fno-pic"), ("-m32", "-fPIC", "-pie"),
]  # fmt: skip
# Each of the flags with both compilers, and the levels in turns.
FORMS = [
    (by, LEVELS[(number + place) % 3], flags)
    for place, by in enumerate(("gcc", "clang"))
    for number, flags in enumerate(FLAGS)
]


def reached_calls(path: Path, name: str) -> tuple[set[str], int]:
    """Return what the targets of a function's tables call first, and how many tables it has."""
    graph = lift(path)
    names = dict(zip(graph.function_address.tolist(), graph.function_name, strict=True))
    at = next(address for address, one in names.items() if one == name)
    blocks = blocks_of(graph, at)
    tables = table_targets(graph, at)
    found = set()
    for target in {target for targets in tables for target in targets}:
        for kind, where in blocks[target][1]:
            if kind in ("CALL", "JUMP") and where in names:
                found.add(names[where])
    return found, len(tables)


@pytest.mark.parametrize(("by", "level", "flags"), FORMS)
def test_every_case_of_a_switch(built: Path, by: str, level: str, flags: tuple[str, ...]) -> None:
    source = SWITCH % {"type": "int", "mask": "", "low": "20", "default": "default: other();"}
    path = compiles(built, f"switch-{by}{level}{''.join(flags)}", source, level, *flags, by=by)
    found, tables = reached_calls(path, "choose")
    assert tables == 1 and found - {"other"} == CASES


@pytest.mark.parametrize("by", ["gcc", "clang"])
@pytest.mark.parametrize(
    ("kind", "mask", "low", "default"),
    [
        ("unsigned char", "", "0", "default: other();"),
        ("int", "& 15", "0", "default: other();"),
        ("long", "", "-4", "default: other();"),
        ("unsigned", "", "1000000", "default: other();"),
        ("short", "", "-200", ""),
    ],
)
def test_indices_of_all_kinds(
    built: Path, by: str, kind: str, mask: str, low: str, default: str
) -> None:
    source = SWITCH % {"type": kind, "mask": mask, "low": low, "default": default}
    name = f"index-{by}-{kind}-{low}".replace(" ", "-")
    path = compiles(built, name, source, "-O2", by=by)
    found, tables = reached_calls(path, "choose")
    assert tables == 1 and found - {"other"} == CASES


TWO_SWITCHES = r"""
volatile int out;
void between(void);
int both(TYPE x, TYPE *p) {
    switch (x) { FIRST default: out = 99; }
    between();
    switch (*p) { SECOND default: out = 98; }
    return out;
}
"""
NUMBERS = {
    "negative": range(-10, 0), "around zero": range(-4, 7), "least of a byte": range(-120, -107),
    "zero": range(10), "largest of a byte": range(115, 128),
}  # fmt: skip


@pytest.mark.parametrize(
    ("by", "pic"), [("gcc", "-fPIC"), ("clang", "-fno-pic")], ids=["gcc", "clang"]
)
@pytest.mark.parametrize("flags", [("-O0",), ("-O2",), ("-Os",), ("-O3", "-m32")], ids="".join)
def test_a_table_ends_where_its_switch_does(
    built: Path, by: str, flags: tuple[str, ...], pic: str
) -> None:
    # The second table follows the first, so a bound that is not understood takes both.
    sources, sizes = [], {}
    kinds = ("signed char", "unsigned char", "short", "int", "unsigned", "long long")
    for kind, (which, numbers) in itertools.product(kinds, NUMBERS.items()):
        if kind.startswith("unsigned") and numbers[0] < 0:
            continue
        name = f"{kind}_{which}".replace(" ", "_")
        first, second = (
            " ".join(
                f"case {n}: out = {i + n * n}; out ^= {i}; break;" for i, n in enumerate(cases)
            )
            for cases in (numbers, numbers[:-1])
        )
        one = TWO_SWITCHES.replace("TYPE", kind).replace("both", name).replace("FIRST", first)
        sources.append(one.replace("SECOND", second))
        sizes[name] = {len(numbers), len(numbers) - 1}
    link = ("-shared",) if pic == "-fPIC" else ("-no-pie", "-static", "-Wl,-e,0")
    flags = (*flags, pic, *link, "-nostdlib", "-Wl,--unresolved-symbols=ignore-all")
    path = compiles(built, f"two-{by}{''.join(flags)}", "\n".join(sources), *flags, by=by)
    graph, places = lift(path), symbols(path)
    for name, expected in sizes.items():
        found = [len(targets) for targets in table_targets(graph, places[name])]
        assert len(found) >= 2 and set(found) == expected, name


@pytest.mark.parametrize("by", ["gcc", "clang"])
@pytest.mark.parametrize(
    ("level", "flags"), [("-O0", ("-m32",)), ("-O2", ()), ("-O2", ("-no-pie",)), ("-Os", ())]
)
def test_labels_as_values(built: Path, by: str, level: str, flags: tuple[str, ...]) -> None:
    path = compiles(built, f"labels-{by}{level}{''.join(flags)}", C_SOURCE, level, *flags, by=by)
    at = symbols(path)["interpret"]
    tables = table_targets(lift(path), at)
    assert tables and all(len(targets) == 4 for targets in tables)


DISTANCES = r"""
#include <stdio.h>
int out;
__attribute__((noinline)) int interpret(const unsigned char *code) {
    static const %(type)s L[] = {&&a - &&base, &&b - &&base, &&c - &&base, &&d - &&base};
    int acc = 0;
    for (;;) {
        goto *(&&base + L[*code++ & 3]);
    base: acc ^= 5; puts("base");
    a: acc += out; continue;
    b: acc -= 3; puts("b"); continue;
    c: acc *= 7; continue;
    d: return acc ^ out;
    }
}
int main(int argc, char **argv) { return interpret((const unsigned char *)argv[0]); }
"""


@pytest.mark.parametrize("by", ["gcc", "clang"])
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("int", ("-O1",)),
        ("short", ("-O2",)),
        ("int", ("-Os",)),
        ("short", ("-O2", "-no-pie", "-fno-pic")),
    ],
)
def test_distances_from_a_label(built: Path, by: str, kind: str, flags: tuple[str, ...]) -> None:
    name = f"distances-{by}-{kind}{''.join(flags)}"
    path = compiles(built, name, DISTANCES % {"type": kind}, *flags, by=by)
    at = symbols(path)["interpret"]
    for one in (path, stripped(path)):
        tables = table_targets(lift(one), at)
        assert tables and all(len(targets) == 4 for targets in tables)


@pytest.mark.parametrize("far", [True, False])
def test_distances_of_a_label_near_its_table(built: Path, far: bool) -> None:
    source = DISTANCES % {"type": "int"}
    if far:
        source += '__asm__(".section .text.zz,\\"ax\\",@progbits\\n.skip 9000, 0xcc\\n.text\\n");'
    path = compiles(built, f"near-{far}", source, "-O2", "-fPIE", "-pie")
    tables = table_targets(lift(path), symbols(path)["interpret"])
    assert tables and all(len(targets) == 4 for targets in tables)


@pytest.mark.parametrize("by", ["gcc", "clang"])
def test_tables_of_the_large_code_model(built: Path, by: str) -> None:
    source = SWITCH % {"type": "int", "mask": "", "low": "20", "default": "default: other();"}
    flags = ("-O2", "-mcmodel=large", "-no-pie", "-fno-pic")
    path = compiles(built, f"large-{by}", source, *flags, by=by)
    at = symbols(path)
    assert len(table_targets(lift(path), at["choose"])[0]) == 9
    labels = compiles(built, f"large-labels-{by}", C_SOURCE, *flags, by=by)
    tables = table_targets(lift(labels), symbols(labels)["interpret"])
    assert tables and all(len(targets) == 4 for targets in tables)


def test_the_same_tables_without_symbols(built: Path) -> None:
    source = SWITCH % {"type": "int", "mask": "", "low": "20", "default": "default: other();"}
    for flags in ((), ("-no-pie", "-fno-pic")):
        path = compiles(built, "bare" + "".join(flags), source, "-O2", *flags)
        at = symbols(path)["choose"]
        known = table_targets(lift(path), at)
        for one in (stripped(path), stripped(path, ".eh_frame", ".eh_frame_hdr")):
            assert table_targets(lift(one), at) == known and len(known[0]) == 9


BY_HAND = {
    # A table of bytes names the rows of the table of targets.
    "rows": (
        """cmp edi, 7; ja none; mov eax, edi; movzx eax, byte ptr [rows + rax]
        jmp [table + rax * 8]""",
        "rows: .byte 0, 1, 0, 2, 2, 2, 0, 1; table: .quad one, two, three, never, never",
        ("one", "two", "three"),
    ),
    "limit": (
        "cmp edi, 2; ja none; mov edi, edi; jmp [table + rdi * 8]",
        "table: .quad one, two, three, four, four",
        ("one", "two", "three"),
    ),
    # Of two comparisons the one nearer to the jump counts.
    "twice compared": (
        """cmp edi, 1; ja more; mov esi, 1
        more: cmp edi, 3; ja none; mov eax, edi; jmp [table + rax * 8]""",
        "table: .quad one, two, three, four, none",
        ("one", "two", "three", "four"),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_table_ends_where_its_limit_says(built: Path, name: str) -> None:
    code, tables, targets = BY_HAND[name]
    source = f"""
    .globl _start
    _start: {code}
    one: mov eax, 1; ret
    two: mov eax, 2; ret
    three: mov eax, 3; ret
    four: mov eax, 4; ret
    none: xor eax, eax; ret
    .section .rodata
    {tables}
    .text
    never: ret
    """
    path = assembled(built, f"table-{name.replace(' ', '-')}", source)
    at = symbols(path)
    assert table_targets(lift(path), at["_start"]) == [sorted(at[one] for one in targets)]


def test_a_call_through_a_pointer_is_no_table() -> None:
    # mov rax, [rdi + 8]; jmp rax
    graph = lift(flat(bytes.fromhex("488b4708 ffe0")))
    assert graph.unresolved == [(0x401004, "indirect jump")]
    assert graph.edge_target.tolist() == [0]


def test_a_table_that_leads_out_of_the_code_is_not_believed(built: Path) -> None:
    source = r"""
    .globl _start
    _start:  cmp edi, 3
             ja none
             mov edi, edi
             jmp [table + rdi * 8]
    none:    ret
    .section .rodata
    table:   .quad 5, 6, 7, 8
    """
    graph = lift(assembled(built, "nonsense", source))
    assert [reason for _, reason in graph.unresolved] == ["indirect jump"]
