"""Features as sparse matrices: counted, weighed and multiplied as their formulas say."""

from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from tokmill.x86.features.bags import (
    bag,
    grams,
    hash_texts,
    matrices,
    nearest_rows,
    normalized,
    row_products,
    sketch,
    tf_idf,
)
from tokmill.x86.features.function_features import SHAPE, bare_name, functions_of
from tokmill.x86.features.instruction_features import instructions_of
from tokmill.x86.graph import Edge
from tokmill.x86.lift.cfg import lift
from x86_graphs import Block, graph_of
from x86_programs import C_SOURCE, compiles, flat


def test_bags_count_and_matrices_share_their_columns() -> None:
    keys = np.array([7, 9, 7, 5], np.uint64)
    one = bag(3, np.array([2, 0, 2, 2]), keys)
    assert list(zip(one.row.tolist(), one.key.tolist(), one.count.tolist(), strict=True)) == [
        (0, 9, 1.0), (2, 5, 1.0), (2, 7, 2.0)
    ]  # fmt: skip
    other = bag(1, np.array([0]), np.array([8], np.uint64))
    first, second = matrices([one, other])
    assert first.toarray().tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [1, 2, 0, 0]]
    assert second.toarray().tolist() == [[0, 0, 1, 0]]
    empty = bag(2, np.zeros(0, np.int64), np.zeros(0, np.uint64))
    assert matrices([empty])[0].shape == (2, 1)


def test_tf_idf_is_its_formula() -> None:
    counts = [sparse.csr_array(np.array([[3.0, 1], [0, 1]])), sparse.csr_array([[0.0, 2]])]
    first, second = tf_idf(counts)
    rare, frequent = np.log(4 / 2), np.log(4 / 4)
    assert np.allclose(
        first.toarray(), [[(1 + np.log(3)) * rare, frequent], [0, frequent]], atol=1e-6
    )
    assert np.allclose(second.toarray(), [[0, 0]], atol=1e-6)
    lengths = np.linalg.norm(normalized(first).toarray(), axis=1)
    assert np.allclose(lengths, [1, 0])


def test_grams_cross_no_end() -> None:
    values = np.array([1, 2, 3, 4], np.uint64)
    hashed, first = grams(values, 2, np.array([2, 4]))
    assert first.tolist() == [0, 2] and len(set(hashed.tolist())) == 2
    assert grams(values[:2], 2, np.array([2]))[0][0] == hashed[0]
    assert len(grams(values[:1], 2, np.array([1]))[0]) == 0
    assert hash_texts(["a", "\udc80"]).dtype == np.uint64


@pytest.mark.parametrize("at_once", [1, 7, 1 << 22])
def test_products_of_chosen_rows(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Whatever is held at a time, and with rows that are empty."""
    monkeypatch.setattr("tokmill.x86.features.bags.AT_ONCE", at_once)
    numbers = np.random.default_rng(1)
    a = sparse.random_array((30, 50), density=0.2, rng=numbers, format="csr", dtype=np.float32)
    b = sparse.random_array((40, 50), density=0.1, rng=numbers, format="csr", dtype=np.float32)
    b = b.toarray()
    b[7] = 0
    b = sparse.csr_array(b)
    i, j = numbers.integers(0, 30, 200), numbers.integers(0, 40, 200)
    j[:3] = 7
    wanted = (a.toarray()[i] * b.toarray()[j]).sum(1)
    assert np.allclose(row_products(a, b, i, j), wanted, atol=1e-5)
    nothing = np.zeros(0, np.int64)
    assert row_products(a, b, nothing, nothing).shape == (0,)


def test_nearest_rows_are_those_of_the_full_table(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(2)
    a, b = (numbers.normal(size=(n, 8)).astype(np.float32) for n in (20, 33))
    wanted = [set(row) for row in np.argsort(-(a @ b.T), axis=1)[:, :5].tolist()]
    for cells in (1, 100, 1 << 23):
        monkeypatch.setattr("tokmill.x86.features.bags.CELLS", cells)
        i, j = nearest_rows(a, b, 5)
        assert [set(j[i == row].tolist()) for row in range(20)] == wanted
    assert len(nearest_rows(a, b[:3], 5)[0]) == 60
    assert len(nearest_rows(a[:0], b, 5)[0]) == len(nearest_rows(a, b[:0], 5)[0]) == 0


def test_sketches_keep_products_nearly() -> None:
    numbers = np.random.default_rng(3)
    rows = normalized(sparse.random_array((40, 3000), density=0.02, rng=numbers, format="csr"))
    small = sketch(rows, 512, seed=1)
    assert small.shape == (40, 512) and small.dtype == np.float32
    exact = (rows @ rows.T).toarray()
    assert np.abs(small @ small.T - exact).max() < 0.25
    assert np.array_equal(small, sketch(rows, 512, seed=1))


def test_what_instructions_are_apart_from_their_numbers() -> None:
    code = [
        bytes.fromhex("83c005"),  # add eax, 5
        bytes.fromhex("83c007"),  # add eax, 7
        bytes.fromhex("83c107"),  # add ecx, 7
        bytes.fromhex("e800000000"),  # call, forwards
        bytes.fromhex("e8f0ffffff"),  # call, backwards
        bytes.fromhex("06"),  # no instruction
    ]
    found = instructions_of(graph_of({0x10: [Block(0x10, code)]}))
    assert found.code[0] == found.code[1] != found.code[2]
    assert found.form[0] == found.form[2] != found.form[3]
    assert found.code[3] == found.code[4]
    assert found.form[5] == found.mnemonic[5] == 0 and (found.mnemonic[:5] > 0).all()
    assert len(instructions_of(graph_of({})).code) == 0


def test_calls_and_shapes_of_functions() -> None:
    loop = [Block(0x10, edges=[(Edge.CALL, 0x20), (Edge.FALL, 0x11)]),
            Block(0x11, edges=[(Edge.BRANCH, 0x10), (Edge.FALL, 0x12)]),
            Block(0x12, edges=[(Edge.RETURN, 0)])]  # fmt: skip
    leaf = [Block(0x20, edges=[(Edge.JUMP, 0x20)])]
    found = functions_of(graph_of({0x10: loop, 0x20: leaf}))
    assert found.calls.toarray().tolist() == [[0, 1], [0, 0]]
    counts = dict(zip(SHAPE, np.round(np.expm1(found.shape[0])).tolist(), strict=True))
    assert counts == {"blocks": 3, "instructions": 3, "edges": 3, "loops": 1, "calls": 1,
                      "callees": 1, "callers": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("memcpy@GLIBC_2.14", "memcpy"),
        ("KERNEL32.dll!ExitProcess", "ExitProcess"),
        ("USER32.dll!_MessageBoxA@16", "_MessageBoxA"),
        ("MSVCP140.dll!?open@File@@QEAAXXZ", "?open@File@@QEAAXXZ"),
        ("A.dll!@fast@8", "@fast@8"),
    ],
)
def test_bare_names_of_imports(name: str, bare: str) -> None:
    assert bare_name(name) == bare


def test_strings_constants_and_imports_are_features(built: Path) -> None:
    graph = lift(compiles(built, "facts", C_SOURCE, "-O1"), facts=True)
    found = functions_of(graph)
    number = graph.function_name.index("give_up")
    mine = {kind: set(one.key[one.row == number].tolist()) for kind, one in found.bags.items()}
    assert set(hash_texts(["large", "small"]).tolist()) <= mine["strings"]
    assert 100 in mine["constants"]
    printed = graph.function_name.index("die")
    imports = found.bags["imports"]
    assert set(imports.key[imports.row == printed].tolist()) == set(
        hash_texts(["exit", "fprintf"]).tolist()
    )
    assert functions_of(lift(flat(b"\x06"), facts=True)).shape.shape == (0, 7)
