"""What operands refer to is part of a function: by what it is, and not by where it lies."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.diff.content.other_references import compare_slots
from tokmill.x86.diff.output.diff_json import diff_file
from tokmill.x86.diff.output.summary import counts_of, references_of
from tokmill.x86.diff.program_diff import UNVERIFIED, diff_graphs
from tokmill.x86.diff.result import Diff, Reason
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.lift.cfg import lift
from x86_graphs import Block, graph_of
from x86_programs import compiles, stripped

HEAD = """#include <stdio.h>
#include <stdlib.h>
#include <ctype.h>
volatile int sink; int g1 = 4, g2 = 9; __thread int t1 = 3, t2 = 8;
#define KEPT __attribute__((noinline))
KEPT int up(const void *a, const void *b) { return *(int *)a - *(int *)b; }
KEPT int down(const void *a, const void *b) { return *(int *)b - *(int *)a; }
KEPT void fill(char *p, int n) { for (int i = 0; i < n; i++) p[i] = i * 7; }
struct ops { int (*a)(const void *, const void *); int x, y, z; };
KEPT int test(int a, int b, int *v, struct ops *o) { BODY }
int main(int n, char **v) { int w[4] = {n, 3, 2, 1}; struct ops o = {up, 1, 2, 3};
  sink = up(w, w + 1) + down(w, w + 1) + g1 + g2 + t1 + t2; return test(n, sink, w, &o); }
"""
SWITCH = (
    "switch (a) {{ case {}: sink = 1; break; case 1: sink = 22; break; case 2: sink = 333; sink = 7"
    "; break; case {}: sink = 4; break; case 4: sink = 5; break; case 5: sink ^= 6;"
    " break; }} return b;"
)
REFERENCES = {
    "local": ("-O0", "int x = a * 3, y = b * 5; sink = x + y; return {};", "x", "y"),
    "argument": ("-m32 -O2", "sink = 5; return {};", "a", "b"),
    "spill": ("-O2", "char p[64], q[64]; fill(p, a); fill(q, b); return {}[3];", "p", "q"),
    "global": ("-O2", "sink = a; return {};", "g1", "g2"),
    "thread": ("-O2", "sink = a; return {};", "t1", "t2"),
    "callback": ("-O2", "qsort(v, 4, 4, {}); return v[0];", "up", "down"),
    "stored": ("-O2", "o->a = {}; return a;", "up", "down"),
    "format": ("-O2", 'printf("{}", a); return b;', "%d", "%u"),
    "mode": ("-O2", 'return fopen("/tmp/x.txt", "{}") != 0;', "r", "w"),
    "string": ("-O2", 'puts("{}"); return b;', "hello", "world"),
    "import": ("-O2", "return {}(a) + b;", "toupper", "tolower"),
    "float": ("-O2", "double d = a * {}; sink = d; return b;", "1.5", "2.5"),
    "pointer": ("-O2", 'static const char *const w[] = {{"r", "{}"}}; puts(w[a & 1]); return b;',
                "a", "w"),
    "array": ("-O0", "static char w[8], u[8]; fill(w, a); fill(u, b); return {}[a & 7];",
              "w", "u"),
    "buffer": ("-O2", "char p[{}]; fill(p, a); return p[3];", "64", "80"),
}  # fmt: skip
"""Changes of what an operand refers to; the instructions stay."""
OTHER_CODE = ("local", "argument", "spill")
"""Those in which clang changes other instructions too."""
CHANGES = {
    "large buffer": ("-O2", "char p[{}]; fill(p, a); return p[3];", "64", "4032"),
    "member": ("-O2", "return o->{} + b;", "x", "y"),
    "signed": ("-O2", "if (({})a < ({})b) sink = 3; return b;", "int", "unsigned"),
    "limit": ("-O2", "if (a {} 64) sink = 3; return b;", "<", "<="),
}  # fmt: skip


def both(
    built: Path, name: str, flags: str, body: str, old: str, new: str, by: str = "gcc"
) -> list[tuple[Path, Path]]:
    """The two programs with symbols, and the two without."""
    made = []
    for side, word in (("old", old), ("new", new)):
        text = HEAD.replace("BODY", body.format(*[word] * body.count("{}")))
        flat = f"references-{name}-{by}-{side}".replace(" ", "-")
        made.append(compiles(built, flat, text, *flags.split(), "-Wl,--build-id=none", by=by))
    return [(made[0], made[1]), (stripped(made[0]), stripped(made[1]))]


def compared(old: Path, new: Path) -> tuple[Graph, Graph, Diff]:
    a, b = (lift(path, facts=True) for path in (old, new))
    return a, b, diff_graphs(a, b)


@pytest.mark.parametrize(
    ("name", "by"),
    [(name, by) for by in ("gcc", "clang") for name in REFERENCES
     if by == "gcc" or name not in OTHER_CODE],
)  # fmt: skip
def test_another_reference_is_a_change_of_one_function(built: Path, name: str, by: str) -> None:
    flags, body, old, new = REFERENCES[name]
    for programs in both(built, name, flags, body, old, new, by):
        a, b, diff = compared(*programs)
        assert not diff.same and not len(diff.deleted) and not len(diff.inserted)
        (match,) = np.flatnonzero(diff.changed)
        (name_a,), (name_b,) = a.names([diff.function_a[match]]), b.names([diff.function_b[match]])
        assert name_a in ("test", name_b)
        counts = counts_of(a, b, diff)
        assert (counts.changed, counts.references_only) == (1, 1)
        assert diff.similarity[match] < 1 and references_of(diff, int(match))
        (one,) = [one for one in diff_file(a, b, diff).matched if one.level != "same"]
        assert one.level == "references" and one.references[0].old != one.references[0].new


@pytest.mark.parametrize("name", CHANGES)
def test_other_instructions_are_no_other_references(built: Path, name: str) -> None:
    flags, body, old, new = CHANGES[name]
    for programs in both(built, name, flags, body, old, new):
        diff = compared(*programs)[2]
        # Of "member" the caller changes, too.
        assert diff.changed.any() and not diff.references_only.any()


THREAD = """
__thread int t1 = FIRST, t2 = 8; static __thread int s1, s2; extern __thread int other;
__attribute__((noinline)) int reads(int a) { WHICH += a; return WHICH * 3; }
__attribute__((noinline)) int statics(int a) { s1 += a; s2 -= a; return s2 * 5; }
__attribute__((noinline)) int *takes(void) { return &t2; }
int *takes_static(void) { return &s2; }
__attribute__((noinline)) int loads(int a) { return other += a; }
"""
FRONT = "__thread long front[5] = {1, 2}, room[3]; long *fronts(void) { return front; }"
MAIN = """
__thread int other = 77; int reads(int), statics(int), *takes(void), loads(int);
int main(int n, char **v) { return reads(n) + statics(n) + *takes() + loads(n); }
"""


@pytest.mark.parametrize(
    ("by", "flags"),
    [
        ("gcc", ("-O0",)),
        ("clang", ("-O2",)),
        ("gcc", ("-O2", "-m32")),
        ("clang", ("-O2", "-fPIC")),
        ("gcc", ("-O2", "-fPIC", "-m32")),
    ],
)
def test_thread_local_data_is_what_it_is_and_not_where(
    built: Path, by: str, flags: tuple[str, ...]
) -> None:
    def made(name: str, source: str, *more: str) -> Path:
        return compiles(built, f"thread{''.join(flags)}{by}-{name}", source, *flags, *more, by=by)

    sources = {
        "old": THREAD.replace("WHICH", "t1").replace("FIRST", "3"),
        "new": THREAD.replace("WHICH", "t2").replace("FIRST", "3"),
        "value": THREAD.replace("WHICH", "t1").replace("FIRST", "4"),
    }
    objects = {name: made(name + ".o", text, "-c") for name, text in sources.items()}
    front, main = made("front.o", FRONT, "-c"), made("main.o", MAIN, "-c")
    link = ["-shared"] * ("-fPIC" in flags)
    old, new, value = (
        made(name, "", *link, str(objects[name]), str(main), str(front)) for name in sources
    )
    moved = made("moved", "", *link, str(front), str(main), str(objects["old"]))
    pairs = [(old, new), (stripped(old), stripped(new)), (objects["old"], objects["new"])]
    for one, other in pairs:
        diff = compared(one, other)[2]
        assert (diff.changed.sum(), diff.references_only.sum()) == (1, 1)
        assert not len(diff.deleted) and not len(diff.inserted)
    assert diff.references.old[0] == "t1" and diff.references.new[0] == "t2"
    for one, other in ((old, moved), (stripped(old), stripped(moved))):
        assert compared(one, other)[2].same
    (data,) = compared(old, value)[2].other.data
    assert (data.name, data.old, data.new) == ("t1", "03000000", "04000000")


def test_unwind_tables_and_places_without_a_name(built: Path) -> None:
    source = """
    __asm__(".pushsection .eh_frame,\\"a\\"\\nframes:\\n.popsection");
    extern const char frames[]; int k; MORE
    const char *test(void) { return frames; }
    int reads(void) { return *(int *)((char *)&k + AT); }
    int main(void) { return reads() + test()[0]; }
    """
    old = compiles(built, "frames-old", source.replace("MORE", "").replace("AT", "0"), "-O2")
    more = source.replace("MORE", "int more(int x) { return x * 33; }").replace("AT", "0")
    diff = compared(old, compiles(built, "frames-more", more, "-O2"))[2]
    assert not diff.changed.any() and len(diff.inserted) == 1 and not diff.other.any
    # What is read has a name in one program, and nothing lies there in the other.
    other = source.replace("MORE", "").replace("AT", "0x10000")
    a, _, diff = compared(old, compiles(built, "frames-other", other, "-O2"))
    names = {a.function_name[one] for one in diff.function_a[diff.changed].tolist()}
    assert "reads" in names and names <= {"reads", "main"}


DEEPER = {
    "order of initialisers": (
        "__attribute__((constructor({}))) static void c1(void) { sink = 5; }"
        "__attribute__((constructor(105))) static void c2(void) { sink *= 7; }"
        "int test(int a) { return a; }", "103", "107",
    ),
    "initialiser": (
        "{} void c1(void) { sink = 5; } int test(int a) { return a; }",
        "__attribute__((constructor))", "",
    ),
    "table of tables": (
        'static const char *const words[] = {{"aa", "{}"}}; static const char *const *const all[] ='
        "{{words, words + 1}}; int test(int a) {{ return all[a & 1][0][a & 1]; }}", "bb", "bc",
    ),
    "numbers like distances": (
        "static const int steps[] = {{0, 4, 8, 12, 0, 4, 8, {}}};"
        "int test(int a) {{ return steps[a & 7]; }}", "12", "16",
    ),
}  # fmt: skip
"""Changes of data that other data leads to."""


@pytest.mark.parametrize("flags", [("-O2", "-fno-pie", "-no-pie"), ("-O0", "-m32")])
@pytest.mark.parametrize("name", DEEPER)
def test_what_other_data_leads_to(built: Path, name: str, flags: tuple[str, ...]) -> None:
    body, old, new = DEEPER[name]
    made = []
    for side, word in (("old", old), ("new", new)):
        text = "volatile int sink;\n" + body.replace("{}", word).replace("{{", "{").replace(
            "}}", "}"
        )
        text += "\nint main(int n, char **v) { return test(n); }"
        flat = f"deeper-{name}{''.join(flags)}-{side}".replace(" ", "-")
        made.append(compiles(built, flat, text, *flags, "-Wl,--build-id=none"))
    for one, other in ((made[0], made[1]), (stripped(made[0]), stripped(made[1]))):
        diff = compared(one, other)[2]
        assert diff.other.data or diff.changed.sum() == 1
        if "init" in name:
            assert diff.other.data[0].name == ".init_array"


def test_a_permuted_switch_is_a_change(built: Path) -> None:
    made = []
    for side, cases in (("old", ("0", "3")), ("new", ("3", "0"))):
        text = HEAD.replace("BODY", SWITCH.format(*cases))
        made.append(stripped(compiles(built, f"references-switch-{side}", text, "-O2")))
    assert compared(*made)[2].changed.sum() == 1


def test_references_are_named(built: Path) -> None:
    for name, words in (
        ("format", '"%d" → "%u"'), ("float", "1.5 at "), ("import", "__ctype_toupper_loc → "),
        ("global", "g1 → g2"), ("callback", "up → down"), ("argument", "argument at +0x4 → "),
        ("buffer", "stack at -0x"),
    ):  # fmt: skip
        diff = compared(*both(built, name, *REFERENCES[name])[0])[2]
        (match,) = np.flatnonzero(diff.changed).tolist()
        assert references_of(diff, match)[0].startswith(words), name


STYLES = {
    "noplt": "-fno-plt", "m32noplt": "-m32 -fno-plt", "m32": "-m32", "now": "-Wl,-z,now",
    "object": "-c", "object-noplt": "-c -fPIC -fno-plt",
    "m32object-noplt": "-m32 -c -fPIC -fno-plt", "large": "-mcmodel=large",
    "largepic": "-mcmodel=large -fPIC -shared", "shared": "-shared -fPIC",
    "nopie": "-no-pie -fno-pie",
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_imports_are_known_in_every_style_of_calls(built: Path, style: str) -> None:
    source = (
        "extern int toupper(int), tolower(int); __attribute__((noinline)) int test(int a, int b)"
        "{ return WORD(a) + b; } int main(int n, char **v) { return test(n, n + 2); }"
    )
    old, new = (
        compiles(built, f"style-{style}-{word}", source.replace("WORD", word), "-O2",
                 *STYLES[style].split())
        for word in ("toupper", "tolower")
    )  # fmt: skip
    a, _, diff = compared(old, new)
    (match,) = np.flatnonzero(diff.changed).tolist()
    assert a.function_name[diff.function_a[match]] == "test" and diff.references_only[match]
    assert "toupper → tolower" in references_of(diff, match)


FRONT = "const double front[] = {1.5, 2.5}; int more[37] = {1, 2}; char room[999];"
LIBRARY = """
#include <stdio.h>
int value = 3; static int calls, also; static double kept = 4.5;
static const char *const names[] = {"a", "of", "three"}; static int (*step)(int);
const char *word(int n) { calls += n; also ^= calls; return names[n % 3]; }
double share(double x) { return x * 0.75 + value + kept; }
int steps(int n) { switch (n) { case 0: return step(3); case 1: return 17; case 2: return calls;
  case 3: return n * 5; case 4: value++; return also; case 5: also++; } return -n; }
void set(int (*f)(int)) { step = f ? f : steps; printf("%d", calls); puts("r"); }
"""


@pytest.mark.parametrize("flags", ["-O0 -fPIC", "-m32 -O2 -fPIC", "-O2 -fno-pie"])
def test_what_moves_is_no_change(tmp_path: Path, flags: str) -> None:
    """Other padding, order and place of objects and data, another folder: nothing differs."""
    objects: dict[str, Path] = {}
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name, text in (("front", FRONT), ("library", LIBRARY), ("second", SECOND)):
            (tmp_path / folder / f"{name}.c").write_text(text)
            for more in ("", "-falign-functions=64") if folder == "one" else ("",):
                out = f"{name}{more}.o"
                words = ["gcc", "-g", "-w", *flags.split(), *more.split(), "-c", f"{name}.c"]
                subprocess.run([*words, "-o", out], cwd=tmp_path / folder, check=True)
                objects[f"{folder}/{out}"] = tmp_path / folder / out
    kind = ["-shared"] if "PIC" in flags else ["-static", "-no-pie", "-Wl,-e,0"]
    kind += ["-Wl,--unresolved-symbols=ignore-all"]
    first = "0x90000" if "PIC" in flags else "0x490000"

    def link(name: str, *parts: str) -> list[Graph]:
        files = [str(objects.get(part, part)) for part in parts]
        bits = [word for word in flags.split() if word == "-m32"]
        subprocess.run(
            ["gcc", *bits, *kind, "-nostdlib", *files, "-o", tmp_path / name], check=True
        )
        return [lift(path, facts=True) for path in (tmp_path / name, stripped(tmp_path / name))]

    whole = link("whole", "one/library.o", "one/second.o")
    for name, parts in {
        "elsewhere": ("two/library.o", "two/second.o"),
        "padded": ("one/library-falign-functions=64.o", "one/second-falign-functions=64.o"),
        "turned": ("one/second.o", "one/library.o"),
        "behind": ("one/front.o", "one/library.o", "one/second.o"),
        "moved": ("one/library.o", "one/second.o", f"-Wl,--section-start=.rodata={first}"),
    }.items():
        for a, b in zip(whole, link(name, *parts), strict=True):
            diff = diff_graphs(a, b)
            assert diff.same and not diff.other.data, (name, diff.references.old)


SECOND = """
int second_value = 3; static const short table[] = {1, 2, 3, 5, 8}; static int seen[4];
int look(int n) { seen[n & 3]++; return table[n % 5] + second_value; }
int looked(int n) { return seen[n & 3]; }
"""


def test_code_that_moves_leaves_distances_in_tables(built: Path) -> None:
    """clang makes tables of distances to strings of a switch."""
    body = """const char *s; switch (a) { case 0: s = "zero"; break; case 1: s = "one"; break;
      case 2: s = "two"; break; case 3: s = "three"; break; default: s = "more"; }
      puts(s); return b;"""
    text = HEAD.replace("BODY", body)
    made = [
        stripped(compiles(built, f"distances-{name}", more, "-O2", "-fPIC", by="clang"))
        for name, more in (
            ("old", text), ("new", "const char front[] = \"in front\";\n" + text),
            ("other", text.replace('"two"', '"deux"')),
        )
    ]  # fmt: skip
    assert not compared(made[0], made[1])[2].changed.any()
    assert compared(made[0], made[2])[2].changed.sum() == 1


def test_a_moved_place_on_the_stack_is_no_change() -> None:
    """The numbers of places do not count, but which is which does."""
    random = np.random.default_rng(3)
    for _ in range(200):
        used = random.integers(1, 4, 6) * -8
        moves = dict(zip((-8, -16, -24), random.permutation([-32, -48, -64]).tolist(), strict=True))
        there = np.asarray([moves[one] for one in used.tolist()])
        if random.random() < 0.5:
            there[random.integers(6)] = random.choice([-32, -48, -64])
        graphs = [slots_of(one) for one in (used, there)]
        zero = np.zeros(1, np.int64)
        found = compare_slots(graphs[0], graphs[1], zero, zero, zero, zero)
        pairs = set(zip(used.tolist(), there.tolist(), strict=True))
        one_to_one = len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
        assert found.same.all() == one_to_one


def slots_of(places: np.ndarray) -> Graph:
    nops = [b"\x90"] * len(places)
    graph = graph_of({0x10: [Block(0x10, nops, [(Edge.RETURN, 0)])]})
    graph.slot = places.astype(np.int64)
    graph.slot_place = np.arange(len(places))
    graph.slot_size = np.zeros(len(places), np.int64)
    return graph


def test_arguments_are_told_by_their_place() -> None:
    zero = np.zeros(1, np.int64)
    for one, other, same in (
        ([8, 16], [8, 16], True),
        ([8, 16], [16, 8], False),
        ([8], [16], False),
    ):
        graphs = slots_of(np.asarray(one)), slots_of(np.asarray(other))
        assert compare_slots(*graphs, zero, zero, zero, zero).same.all() == same


def test_functions_with_several_names(built: Path) -> None:
    code = ("lea 3(%rdi),%eax\nret\n", "xor %eax,%eax\nrep movsb\ncpuid\nret\n")
    made = []
    for side, names in (("old", ["compress_data"]), ("new", ["compress_data", "cdata"])):
        text = "".join(f".globl {one}\n.type {one},@function\n{one}:\n" for one in names)
        text += code[side == "new"] + "".join(f".size {one},.-{one}\n" for one in names)
        made.append(compiles(built, f"aliases-{side}.s", text, "-shared", "-nostdlib"))
    a, b, diff = compared(*made)
    assert diff.reason.tolist() == [Reason.NAME] and diff.changed.all()
    assert (a.function_name, b.function_name) == (["compress_data"], ["cdata"])
    assert diff.other.exports_inserted == ["cdata"] and not diff.other.exports_deleted


def test_data_imports_and_exports_are_listed(built: Path) -> None:
    text = "const int table[4] = {1, 2, 3, 4}; int start = 5; int f(int i) { return table[i & 3]; }"
    old = compiles(built, "listed-old", text, "-O2", "-shared", "-fPIC")
    new = compiles(built, "listed-new", text.replace("3, 4", "3, 9").replace("= 5", "= 6")
                   + "int toupper(int); int g(int i) { return toupper(i); }",
                   "-O2", "-shared", "-fPIC")  # fmt: skip
    diff = compared(old, new)[2]
    assert [(one.name, one.size_a, one.first, one.old, one.new) for one in diff.other.data] == [
        ("start", 4, 0, "05000000", "06000000"), ("table", 16, 12, "04000000", "09000000"),
    ]  # fmt: skip
    assert diff.other.imports_inserted == ["toupper"] and diff.other.exports_inserted == ["g"]
    assert diff.references_only.tolist().count(True) == 1


@pytest.mark.parametrize("width", ["-m64", "-m32"])
def test_a_pointer_to_another_variable_is_a_change_of_data(built: Path, width: str) -> None:
    text = "int a[4] = {1}, b = 2; int *p = WORD; int f(void) { return *p + a[1] * b; }"
    words, flags = ("a + 1", "a + 2", "&b"), (width, "-O2", "-shared", "-fPIC", "-nostdlib")
    made = [
        compiles(built, f"kept{width}{number}", text.replace("WORD", word), *flags)
        for number, word in enumerate(words)
    ]
    for one, other in ((0, 1), (0, 2), (1, 2), (2, 2)):
        names = [change.name for change in compared(made[one], made[other])[2].other.data]
        assert names == ["p"] * (one != other)


def test_variables_that_nothing_tells_apart_are_counted(built: Path) -> None:
    """The one user that could tell changed in all that it does."""
    text = "int sum(int *, int *); static int one, two; int f(int n) { return WORD; } int g(int n)"
    old = "{ return sum(&one, &two); }"
    new = "{ for (int i = 0; i < n; i++) two ^= one * i; return sum(&two, &one) / 7 + n; }"
    flags = ("-O1", "-shared", "-fPIC")
    a = compiles(built, "counted-old", text.replace("WORD", "one") + old, *flags)
    b = compiles(built, "counted-new", text.replace("WORD", "two") + new, *flags)
    diff = compared(stripped(a), stripped(b))[2]
    assert diff.left_out[UNVERIFIED] == 1 or diff.changed.sum() == 2


@pytest.mark.parametrize("flags", ["-O2 -fPIC", "-O2 -m32"])
def test_static_variables_of_object_files(built: Path, flags: str) -> None:
    """They lie behind data in one file and before all data in the other."""
    text = """static int seen[64], total; int *const all[] = {seen, &total};
    int note(int n) { seen[n & 63]++; total += n; return seen[n & 31]; }
    int sum(void) { return WORD; }"""
    made = [
        compiles(built, f"statics-{name}{flags}.o", more, *flags.split(), "-c")
        for name, more in (
            ("old", text.replace("WORD", "total")),
            ("new", "int level = 9;" + text.replace("WORD", "total")),
            ("other", "int level = 9;" + text.replace("WORD", "seen[0]")),
        )
    ]
    assert not compared(made[0], made[1])[2].changed.any()
    assert compared(made[0], made[2])[2].changed.sum() == 1


@pytest.mark.parametrize("flags", [("-O2", "-c"), ("-O1", "-shared", "-fPIC")])
@pytest.mark.parametrize("kind", ["int", "static int", "__thread int"])
def test_data_that_begins_with_zeros_is_data(built: Path, kind: str, flags: tuple) -> None:
    """It lies in no file, and what begins with another value does."""
    text = f"{kind} level = FIRST, all[9]; int f(int x) {{ level += x; return all[x] += x; }}"
    three, zero, kept = (
        compiles(built, f"zeros-{kind}{flags[0]}-{name}.o", text.replace("FIRST", first), *flags)
        for name, first in (("three", "3"), ("zero", "0"), ("kept", "0, more = 4"))
    )
    for a, b, shown in ((three, zero, ("03000000", "0" * 8)), (zero, three, ("0" * 8, "03000000"))):
        changes = compared(a, b)[2].other.data
        assert [(one.name, one.old, one.new) for one in changes] == [("level", *shown)]
    assert not compared(zero, kept)[2].other.data
    text = text.replace("FIRST", "0").replace("all[9]", "all[99]")
    (larger,) = compared(zero, compiles(built, zero.name + "-larger.o", text, *flags))[2].other.data
    assert (larger.name, larger.size_a, larger.size_b) == ("all", 36, 396)


def test_variables_of_one_name_are_compared_where_they_have_values(built: Path) -> None:
    text = "static int state = FIRST; int f(int x) { return state += x; }"
    (built / "namesake.c").write_text("static int state; int g(int x) { return state -= x; }")
    flags = ("-O1", "-shared", "-fPIC", str(built / "namesake.c"))
    made = [compiles(built, f"one-name-{n}", text.replace("FIRST", n), *flags) for n in "46"]
    assert [one.name for one in compared(*made)[2].other.data] == ["state"]


def test_zeros_that_grew_out_of_a_file_and_tables_among_code(built: Path) -> None:
    use = "int f(int n) { return x[n]; }"
    made = [
        compiles(built, f"grown-{number}.o", text + use, "-O1", "-shared", "-fPIC")
        for number, text in enumerate(("const volatile int x[2] = {0};", "volatile int x[3];"))
    ]
    (grown,) = compared(*made)[2].other.data
    assert (grown.name, grown.size_a, grown.size_b, grown.old, grown.new) == (
        "x",
        8,
        12,
        "",
        "0" * 8,
    )
    table = """__asm__(".section SECTION\\n.type x,@object\\n.globl x\\n.size x,8\\nx: .long 1,2\\n"
        ".text"); int g(int n) { return n + 1; } extern int x[];"""
    made = [
        compiles(built, f"table-{number}", table.replace("SECTION", section) + use, "-O1",
                 "-shared", "-fPIC", "-Wl,-z,notext")
        for number, section in enumerate((".text", ".rodata"))
    ]  # fmt: skip
    assert not compared(*made)[2].other.data
