"""Copies of functions: what tells them apart, and how sure a match of them is."""

import numpy as np
from scipy import sparse

from tokmill.x86.diff.candidates import pairs_of
from tokmill.x86.diff.evidence import Inlined, weigh
from tokmill.x86.diff.match_functions import crossed, loss_if_crossed
from tokmill.x86.features.function_features import MEMBERS, Functions, functions_of, members_of
from tokmill.x86.features.tables import tables_of
from tokmill.x86.graph import Edge, Graph
from x86_graphs import Block, graph_of

FRAME = "4889e5"
EIGHT, FIRST = "8b4708", "0fb60e"
"""mov eax, [rdi + 8]; movzx ecx, byte [rsi]."""
OTHERS = (
    "8b45fc",  # mov eax, [rbp - 4]
    "8b442410",  # mov eax, [rsp + 16]
    "8b0500000000",  # mov eax, [rip]
    "0f1f4008",  # nop [rax + 8]
    "488d4708",  # lea rax, [rdi + 8]
    "8b0485000001ff",  # mov eax, [4 * rax - 16711680]
)


def features(graph: Graph) -> Functions:
    found = functions_of(graph)
    found.bags |= members_of(graph, found.instructions)
    return found


def of(*functions: list[str]) -> Graph:
    """Return a graph of functions of one block."""
    code = {
        0x100 * n: [Block(0x100 * n, [bytes.fromhex(one) for one in words])]
        for n, words in enumerate(functions, 1)
    }
    return graph_of(code)


def test_members_are_told_from_other_memory() -> None:
    found = features(of([FRAME, EIGHT, *OTHERS, FIRST], [FIRST, EIGHT], ["8b45fc"])).bags
    single, pair = (found[kind] for kind in MEMBERS)
    assert single.row.tolist() == [0, 0, 1, 1, 2] and single.count.tolist() == [1] * 5
    assert set(single.key[:2].tolist()) == set(single.key[2:4].tolist())
    assert pair.row.tolist() == [0, 1] and len(set(pair.key.tolist())) == 2


def test_members_of_two_blocks_are_no_pair() -> None:
    blocks = [
        Block(0x10, [bytes.fromhex(EIGHT)], [(Edge.FALL, 0x13)]),
        Block(0x13, [bytes.fromhex(FIRST)]),
    ]
    assert not len(features(graph_of({0x10: blocks})).bags["member pairs"].row)


def test_a_function_is_like_the_one_that_it_is_inlined_in() -> None:
    call = Block(0x100, [bytes.fromhex("90")] * 2, [(Edge.CALL, 0x200)])
    small = Block(0x200, [bytes.fromhex(one) for one in (EIGHT, FIRST, "01c8", "f7e1")])
    other = Block(0x300, [bytes.fromhex("0fa2")] * 3)
    whole = Block(0x100, [bytes.fromhex("90")] * 2 + small.instructions)
    a = graph_of({0x100: [call], 0x200: [small], 0x300: [other]})
    b = graph_of({0x100: [whole], 0x300: [other]})
    programs = features(a), features(b)
    sides = weigh(*programs, (tables_of(a), tables_of(b)))
    inlined = Inlined(sides, programs)
    i, j = np.arange(3).repeat(2), np.tile(np.arange(2), 3)
    cosine = inlined.cosine(i, j).reshape(3, 2)
    assert cosine[0, 0] > 0.9 and cosine[2, 1] > 0.99
    assert cosine[0, 1] < 0.5 and cosine[2, 0] < 0.5
    found = inlined.candidates(np.array([0, 2]), np.array([0, 1]))
    assert {(0, 0), (2, 1)} <= {pair for i, j in found for pair in zip(i, j, strict=True)}


def slow_twins(pairs: list[tuple[int, int]], own: list[float], matches: list[int]) -> list[int]:
    """Return what `crossed` does."""
    at = {pair: number for number, pair in enumerate(pairs)}
    best = {}
    for one in matches:
        for other in matches:
            there = (pairs[one][0], pairs[other][1]), (pairs[other][0], pairs[one][1])
            if one != other and all(pair in at for pair in there):
                loss = own[one] + own[other] - sum(own[at[pair]] for pair in there)
                if loss < 2 and (one not in best or loss < best[one][0]):
                    best[one] = loss, other, at[there[0]]
    return [
        best[one][2] if one in best and best.get(best[one][1], (0, -1))[1] == one else one
        for one in matches
    ]


def test_twins_are_matches_that_lose_little_by_crossing() -> None:
    random = np.random.default_rng(2)
    for _ in range(50):
        key = np.flatnonzero(random.random(48) < 0.7)
        pairs = pairs_of(6, 8, np.divmod(key, 8))
        order = random.permutation(len(key))
        free, taken = (set(range(6)), set(range(8))), []
        for number in order.tolist():
            i, j = int(pairs.i[number]), int(pairs.j[number])
            if i in free[0] and j in free[1]:
                free[0].remove(i)
                free[1].remove(j)
                taken.append(number)
        chosen = np.sort(np.asarray(taken))
        own = random.normal(size=len(key)).astype(np.float32) * 2
        wanted = slow_twins(
            list(zip(pairs.i.tolist(), pairs.j.tolist(), strict=True)),
            own.tolist(),
            chosen.tolist(),
        )
        assert crossed(pairs, chosen, own).tolist() == wanted


def test_twins_that_call_each_other_are_crossed_together() -> None:
    # 0 and 1 are twins, and call 4 and 5, twins too; 8 and 9, far away, are others; 12 has none.
    places = [0, 1, 4, 5, 8, 9, 12]
    twins = [1, 0, 5, 4, 9, 8, 12]
    pairs = pairs_of(20, 20, (np.repeat(places, 2), np.column_stack([places, twins]).ravel()))
    key = np.asarray(places) * 20
    chosen = np.searchsorted(pairs.key, key + places)
    instead = np.searchsorted(pairs.key, key + twins)
    calls = sparse.csr_array(([1.0, 1.0], ([0, 1], [4, 5])), shape=(20, 20))
    loss = np.asarray([4, 0, -1, 1, 0, 0, 7], np.float32)
    none = sparse.csr_array((20, 20))
    found = loss_if_crossed((calls, none), pairs, chosen, instead, loss)
    assert found.tolist() == [1, 1, 1, 1, 0, 0, np.inf]
    found = loss_if_crossed((none, none), pairs, chosen, instead, loss)
    assert found.tolist() == [2, 2, 0, 0, 0, 0, np.inf]
