"""Blocks of a producer that go on through several records: which, and what each gets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokmill.bbv.join import follow, spread
from tokmill.bbv.store_blocks import Program, ends_flow


def program(instructions: list[int], falls: list[int]) -> Program:
    n = len(instructions)
    return Program(
        "a", np.arange(n) * 10, np.arange(n) + 100, np.array(instructions),
        np.zeros(n, bool), np.isin(np.arange(n), falls),
    )  # fmt: skip


def parts(chains: object) -> list[list[tuple[int, int]]]:
    offsets, records, weights = chains  # type: ignore[misc]
    pairs = list(zip((records - 100).tolist(), weights.tolist(), strict=True))
    return [pairs[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def test_a_block_goes_on_to_the_next_jump() -> None:
    here = program([3, 4, 5, 2], falls=[0, 1])
    rows = np.array([0, 1, 2, 0])
    begun = np.array([True, True, True, False])
    assert parts(follow(here, rows, begun, None)) == [
        [(0, 3), (1, 4), (2, 5)],
        [(1, 4), (2, 5)],
        [(2, 5)],
        # It begins in the middle, and how much of it ran is not known.
        [(0, 1)],
    ]
    # Where blocks do not overlap, it ends where another one of the producer begins.
    taken = np.array([True, False, True, False])
    assert parts(follow(here, rows[:2], begun[:2], taken)) == [[(0, 3), (1, 4)], [(1, 4)]]


def test_a_block_of_valgrind_has_50_instructions() -> None:
    here = program([30, 15, 90, 1], falls=[0, 1, 2])
    every = np.ones(3, bool)
    found = parts(follow(here, np.arange(3), every, None))
    assert found == [[(0, 30), (1, 15), (2, 5)], [(1, 15), (2, 35)], [(2, 50)]]
    apart = follow(here, np.arange(3), every, np.zeros(4, bool))
    assert [len(one) for one in parts(apart)] == [4, 3, 2]
    assert parts(follow(here, np.zeros(0, np.int64), np.zeros(0, bool), None)) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, (1 << 64) - 1), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=5)
        )
    )
)
def test_nothing_is_lost_when_counts_are_divided(rows: list[tuple[int, list[int]]]) -> None:
    counts = np.array([count for count, _ in rows], np.uint64)
    offsets = np.cumsum([0, *(len(weights) for _, weights in rows)])
    weights = np.array([weight for _, some in rows for weight in some], np.int64)
    found = spread(counts, offsets, weights).tolist()
    for (count, some), begin in zip(rows, offsets.tolist(), strict=False):
        mine = found[begin : begin + len(some)]
        assert sum(mine) == count
        for share, weight in zip(mine[1:], some[1:], strict=True):
            assert share == count * weight // sum(some) or abs(
                share - count * weight / sum(some)
            ) <= max(2, count * 1e-9)


def test_which_mnemonics_end_a_block() -> None:
    ending = ["JMP", "JE", "JRCXZ", "CALL", "RET", "LOOPNE", "SYSCALL"]
    others = ["MOV", "[UNK]", "RETX", "INTO"]
    assert ends_flow(ending + others).tolist() == [True] * 7 + [False] * 4
