"""Marks that cut a program: which are taken, and how intervals are put together of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokmill.bbv import markers
from tokmill.bbv.markers import Command, grouped
from x86_programs import compiles

READS_FIRST = """
#include <stdlib.h>
#include <unistd.h>
#include <fcntl.h>
volatile unsigned sum;
int main(void) {
    int zeros = open("/dev/zero", O_RDONLY);
    char byte;
    for (int i = 0; i < 3000; i++) read(zeros, &byte, 1);
    for (int i = 0; i < 3000; i++) {
        void *volatile block = malloc(100);
        for (unsigned k = 0; k < 20000; k++) sum += k * i;
        free(block);
    }
}
"""


def test_marks_of_a_program_that_reads_all_and_then_computes(tmp_path: Path) -> None:
    """Its reads are many, and cut nothing of what it computes."""
    program = compiles(tmp_path, "reads", READS_FIRST, "-O1")
    found = markers.choose(Command((str(program),)), tmp_path, 100)
    library, kind, every, calls = found
    assert calls["io"] > 2900 and kind == "heap" and library.is_file()
    assert every == calls["heap"] // (markers.FINER * 100)


@pytest.mark.parametrize(
    ("sizes", "begins"),
    [
        ([5.0, 9.0], [0, 1]),
        ([5.0, 1.0, 1.0, 1.0, 1.0, 9.0], [0, 1, 3, 5]),
        # What is little alone goes with its neighbour.
        ([5.0, 1.0, 1.0, 50.0, 1.0, 1.0, 9.0], [0, 1, 6]),
    ],
)
def test_intervals_of_what_lies_between_marks(sizes: list[float], begins: list[int]) -> None:
    assert grouped(sizes, 2)[0] == 0
    assert grouped(sizes, 2) == begins


def test_intervals_of_even_marks_are_as_many_as_are_wanted() -> None:
    draw = np.random.default_rng(0)
    sizes = draw.uniform(0.5, 1.5, 902).tolist()
    begins = grouped(sizes, 300)
    assert 270 <= len(begins) - 2 <= 330 and begins[-1] == 901
    sums = np.add.reduceat(sizes, begins)[1:-1]
    assert sums.min() > np.mean(sums) / 2
