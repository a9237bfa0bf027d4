"""Two programs, compiled here: what is found to be the same, changed, deleted and inserted."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.diff import match_blocks as of_blocks
from tokmill.x86.diff.candidates import pairs_of
from tokmill.x86.diff.evidence import FADE, REACH, adjacent
from tokmill.x86.diff.match_functions import assign
from tokmill.x86.diff.output.diff_json import diff_file
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.diff.result import Diff, Reason
from tokmill.x86.diff.same import same_names
from tokmill.x86.graph import Graph
from tokmill.x86.lift.cfg import lift
from x86_graphs import Block, graph_of
from x86_programs import C_SOURCE, CPP_SOURCE, compiles, flat, pe_file, stripped

CHANGED = C_SOURCE.replace("return x * 3 + 1;", "return x * 3 + 2;")
NEWER = 'int newer(int x) { return dispatch(x, 9) ^ walk("new"); }\n\nint older('
MORE = C_SOURCE.replace("int unused(", NEWER)


def graphs(
    built: Path, name: str, source: str, *flags: str, by: str = "gcc"
) -> tuple[Graph, Graph]:
    """A program as it was compiled, and stripped; both know their facts."""
    path = compiles(built, name, source, *flags, by=by)
    return lift(path, facts=True), lift(stripped(path), facts=True)


def named(whole: tuple[Graph, Graph], diff: Diff) -> dict[str, str]:
    """Return name in A → name in B of the matches; `whole`: the graphs with names."""
    a, b = whole
    return {
        a.function_name[i]: b.function_name[j]
        for i, j in zip(diff.function_a.tolist(), diff.function_b.tolist(), strict=True)
    }


def check(a: Graph, b: Graph, diff: Diff) -> None:
    """What every diff promises."""
    for graph, functions, left, blocks, blocks_left in (
        (a, diff.function_a, diff.deleted, diff.block_a, diff.deleted_blocks),
        (b, diff.function_b, diff.inserted, diff.block_b, diff.inserted_blocks),
    ):
        every = np.sort(np.concatenate([functions, left]))
        assert np.array_equal(every, np.arange(len(graph.function_address)))
        owner = np.searchsorted(graph.function_blocks, np.arange(len(graph.block_address)), "right")
        inside = np.flatnonzero(np.isin(owner - 1, functions))
        assert np.array_equal(np.sort(np.concatenate([blocks, blocks_left])), inside)
    assert (np.diff(diff.function_a) > 0).all()
    assert len(diff.match_blocks) == len(diff.function_a) + 1
    assert diff.match_blocks[-1] == len(diff.block_a) == len(diff.block_reason)
    for match in range(len(diff.function_a)):
        pairs = slice(diff.match_blocks[match], diff.match_blocks[match + 1])
        for graph, function, blocks in (
            (a, diff.function_a[match], diff.block_a[pairs]),
            (b, diff.function_b[match], diff.block_b[pairs]),
        ):
            low, high = graph.function_blocks[function : function + 2]
            assert ((blocks >= low) & (blocks < high)).all()
        assert (np.diff(diff.block_a[pairs]) > 0).all()
    for share in (diff.similarity, diff.confidence, diff.block_similarity):
        assert share.dtype == np.float32 and ((share >= 0) & (share <= 1)).all()


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("source", ["C", "C++"])
def test_a_program_is_the_same_as_itself(built: Path, names: bool, source: str) -> None:
    text, by = (C_SOURCE, "gcc") if source == "C" else (CPP_SOURCE, "g++")
    for graph in graphs(built, f"itself-{source}", text, "-O2", by=by):
        diff = diff_graphs(graph, graph, names=names)
        check(graph, graph, diff)
        assert diff.same and np.array_equal(diff.function_a, diff.function_b)
        assert np.array_equal(diff.block_a, diff.block_b)


def test_a_number_that_changed_is_a_change_of_one_function(built: Path) -> None:
    a, b = (graphs(built, name, text, "-O1", "-fcf-protection=none")
            for name, text in (("number", C_SOURCE), ("number-changed", CHANGED)))  # fmt: skip
    diff = diff_graphs(a[1], b[1])
    check(a[1], b[1], diff)
    assert not diff.same and not len(diff.deleted) and not len(diff.inserted)
    changed = [a[0].function_name[i] for i in diff.function_a[diff.changed].tolist()]
    assert changed == ["dispatch"]
    (match,) = np.flatnonzero(diff.changed)
    pairs = slice(diff.match_blocks[match], diff.match_blocks[match + 1])
    assert (diff.block_similarity[pairs] < 1).sum() == 1
    assert 0.9 < diff.similarity[match] < 1


@pytest.mark.parametrize("names", [True, False])
def test_what_is_new_and_what_is_gone(built: Path, names: bool) -> None:
    a, b = (graphs(built, name, text, "-O1") for name, text in (("gone", C_SOURCE), ("new", MORE)))
    one, other = (a[0], b[0]) if names else (a[1], b[1])
    diff = diff_graphs(one, other, names=names)
    check(one, other, diff)
    assert [b[0].function_name[j] for j in diff.inserted.tolist()] == ["newer"]
    pairs = named((a[0], b[0]), diff)
    # It has another name, and is known by what it does.
    assert pairs["unused"] == "older"
    assert all(name == other for name, other in pairs.items() if name != "unused")
    assert not len(diff.deleted)


def right(whole: tuple[Graph, Graph], diff: Diff) -> float:
    """F1 of functions whose names both programs have."""
    pairs = named(whole, diff)
    both = set(whole[0].function_name) & set(whole[1].function_name)
    hits = sum(name == other for name, other in pairs.items())
    return 2 * hits / (len(pairs) + len(both))


@pytest.mark.parametrize(
    ("first", "second", "least"),
    [(("-O0",), ("-O2",), 0.9), (("-O2",), ("-O3",), 0.95), (("-O1",), ("-O1", "-m32"), 0.85)],
)
def test_stripped_programs_of_other_levels_and_bits(
    built: Path, first: tuple[str, ...], second: tuple[str, ...], least: float
) -> None:
    a, b = (
        graphs(built, "".join(("level", *flags)), C_SOURCE, *flags) for flags in (first, second)
    )
    diff = diff_graphs(a[1], b[1], names=False)
    check(a[1], b[1], diff)
    assert right((a[0], b[0]), diff) >= least


def test_another_compiler_and_another_machine(built: Path, tmp_path: Path) -> None:
    gcc, clang = (graphs(built, f"by-{by}", C_SOURCE, "-O2", by=by) for by in ("gcc", "clang"))
    diff = diff_graphs(gcc[1], clang[1])
    assert right((gcc[0], clang[0]), diff) >= 0.9
    # A PE file of one function has next to nothing of it.
    path = tmp_path / "tiny.exe"
    path.write_bytes(pe_file(bytes.fromhex("b805000000c3")))
    windows = lift(path, facts=True)
    check(gcc[1], windows, diff_graphs(gcc[1], windows))


def test_odd_programs() -> None:
    nothing = lift(flat(b"\x06"), facts=True)
    one = lift(flat(bytes.fromhex("31c0c3")), facts=True)
    for a, b in itertools.product((nothing, one), repeat=2):
        diff = diff_graphs(a, b)
        check(a, b, diff)
        assert diff.same == (a is b)
    # A function without blocks, one without edges, and bytes that are not instructions.
    odd = graph_of({0x10: [], 0x20: [Block(0x20, [b"\x06"])], 0x30: [Block(0x30)]})
    check(odd, odd, diff_graphs(odd, odd))
    check(one, odd, diff_graphs(one, odd))


def test_what_is_not_known_is_said(built: Path) -> None:
    path = compiles(built, "itself-C", C_SOURCE, "-O2")
    bare = lift(path)
    diff = diff_graphs(bare, bare)
    assert diff.left_out["programs without imports, strings and constants"] == 2


def test_results_do_not_depend_on_the_run(built: Path) -> None:
    a, b = (graphs(built, f"level{level}", C_SOURCE, level)[1] for level in ("-O0", "-O2"))
    first, second = (diff_graphs(a, b, names=False) for _ in range(2))
    for field in dataclasses.fields(Diff):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if field.name == "references":
            assert all(map(np.array_equal, one, other))
        else:
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    assert diff_file(a, b, first) == diff_file(a, b, second)


def test_names_that_compilers_change() -> None:
    def named(*names: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            if name:
                found.setdefault(name, []).append(number)
        return found

    i, j = same_names(
        named("main", "f.isra.0", "g", "", "twin", "twin", "x.part.0"),
        named("main", "f", "g.constprop.1", "", "twin", "y.part.0", "f.cold"),
    )
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == [(0, 0), (2, 2)]
    i, j = same_names(named("f.isra.0"), named("f"))
    assert (i.tolist(), j.tolist()) == ([0], [0])
    # A function with several names has them all.
    i, j = same_names({"a": [0], "b": [0], "c": [1]}, {"b": [1], "c": [0], "d": [1]})
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == [(0, 1), (1, 0)]


def test_names_decide_and_are_the_reason(built: Path) -> None:
    whole = graphs(built, "itself-C", C_SOURCE, "-O2")[0]
    whole = dataclasses.replace(
        whole, symbol_address=np.zeros(0, np.uint64), symbol_size=np.zeros(0, np.uint64),
        symbol_name=[],
    )  # fmt: skip
    turned = dataclasses.replace(whole, function_name=list(whole.function_name))
    add, sub = (turned.function_name.index(name) for name in ("add", "sub"))
    turned.function_name[add], turned.function_name[sub] = "sub", "add"
    diff = diff_graphs(whole, turned)
    place = diff.function_a.tolist().index(add)
    assert diff.function_b[place] == sub and diff.reason[place] == Reason.NAME


def test_assignments_are_the_best_there_are() -> None:
    numbers = np.random.default_rng(4)
    for _ in range(30):
        rows, columns = numbers.integers(1, 6, 2).tolist()
        table = np.where(numbers.random((rows, columns)) < 0.7,
                         numbers.normal(size=(rows, columns)), -1)  # fmt: skip
        i, j = np.divmod(np.arange(rows * columns), columns)
        chosen = assign(pairs_of(rows, columns, (i, j)), table.reshape(-1))
        assert len(set(i[chosen].tolist())) == len(set(j[chosen].tolist())) == len(chosen)
        best = max(
            sum(
                max(table[row, column], 0)
                for row, column in enumerate(order[:rows])
                if column < columns
            )
            for order in itertools.permutations(range(columns + rows), rows)
        )
        assert np.isclose(table.reshape(-1)[chosen].sum(), best)
    assert len(assign(pairs_of(2, 2, (np.array([0]), np.array([1]))), np.array([-1.0]))) == 0


def test_the_best_pairs_of_blocks_are_taken_first() -> None:
    random = np.random.default_rng(1)
    one, other = np.divmod(np.arange(900), 30)
    for scale in (4, 400):
        # Few different scores: many are equal.
        score = (random.integers(0, 3 * scale, 900) / scale * 4).astype(np.float32)
        taken: set[tuple[str, int]] = set()
        wanted = []
        for pair in sorted(range(900), key=lambda pair: (-score[pair], pair)):
            both = {("a", int(one[pair])), ("b", int(other[pair]))}
            if score[pair] > of_blocks.LEAST and not taken & both:
                taken |= both
                wanted.append(pair)
        assert of_blocks.greedy(one, other, score).tolist() == sorted(wanted)
    assert not len(of_blocks.greedy(one[:0], other[:0], score[:0]))


def test_pairs_beside_are_those_that_are_looked_up() -> None:
    numbers = np.random.default_rng(1)
    pairs = pairs_of(30, 25, (numbers.integers(0, 30, 400), numbers.integers(0, 25, 400)))
    chosen = np.sort(numbers.permutation(len(pairs))[:60])
    known, value = pairs.key[chosen], numbers.random(60).astype(np.float32)
    there = dict(zip(known.tolist(), value.tolist(), strict=True))
    for step_a, step_b in ((-1, -1), (1, 1), (-1, 1), (1, -1)):
        wanted = [
            max(
                there.get((i + far_a * step_a) * 25 + j + far_b * step_b, 0)
                * FADE ** (far_a + far_b - 2)
                if 0 <= i + far_a * step_a < 30 and 0 <= j + far_b * step_b < 25
                else 0
                for far_a in range(1, REACH + 1)
                for far_b in range(1, REACH + 1)
            )
            for i, j in zip(pairs.i.tolist(), pairs.j.tolist(), strict=True)
        ]
        found = adjacent(pairs, known, value, step_a, step_b)
        assert np.allclose(found, wanted, atol=1e-6) and found.max() > 0
