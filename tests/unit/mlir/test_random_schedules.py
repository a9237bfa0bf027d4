"""Random schedules over all generators: right results or clean refusals, and nothing else."""

import pytest

import random_schedules
from random_schedules import ALONE, CHAINS, QUICK
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators, problem

FINE = {"ok", "refused"}
REFUSED, REFUSED_OF_ONE = 0.01, 0.1
"""The largest share of all schedules that MLIR may refuse, and of those of one operation."""


def check(counts: random_schedules.Counts) -> None:
    for name, found in counts.items():
        assert found.keys() <= FINE, (name, counts)
        assert found["refused"] <= REFUSED_OF_ONE * found.total(), (name, counts)
    found = random_schedules.total(counts)
    assert found["refused"] <= REFUSED * found.total(), counts


def test_every_generator_has_lines_of_odd_sizes_and_strides() -> None:
    assert ALONE.keys() == generators.GENERATORS.keys()
    for name, kind in generators.GENERATORS.items():
        given = [[int(size) for size in sizes.split()] for sizes in ALONE[name]]
        odd = [one for one in given if any(size % 2 and size > 1 for size in one[-3:])]
        assert len(odd) > 1, name
        if "[STRIDE]" in kind.sizes:
            strides = {one[-1] if len(one) == kind.most else 1 for one in given}
            assert {1} < strides, name


def test_chains_have_two_to_five_operations_of_every_generator() -> None:
    parts = [[part.split()[0] for part in line.split(",")] for line in CHAINS]
    assert {len(one) for one in parts} == set(range(2, generators.LONGEST + 1))
    assert {name for one in parts for name in one} == generators.GENERATORS.keys()


def test_a_schedule_is_drawn_the_same_every_time() -> None:
    line = CHAINS[0]
    given = problem.of_line(line)
    drawn = [random_schedules.drawn(given, line, number) for number in (0, 1, 2, 0)]
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3


def test_a_random_schedule_of_each_chain() -> None:
    """They have operations of every generator."""
    with Measurements(QUICK) as child:
        counts = random_schedules.fuzzed(CHAINS, 1, child)
    found = random_schedules.total(counts)
    assert found.total() == len(CHAINS)
    # Of so few one refusal may be a large share.
    assert found.keys() <= FINE and found["ok"] > 0.8 * found.total(), counts


@pytest.mark.long
def test_five_hundred_random_schedules() -> None:
    with Measurements(QUICK) as child:
        counts = random_schedules.fuzzed(random_schedules.lines(), 10, child)
    assert random_schedules.total(counts).total() >= 500
    check(counts)
