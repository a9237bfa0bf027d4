"""Marks that cut a program: which are taken, what is written at them, how intervals are put
together of them."""

from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.base.progress import Progress
from tokmill.bbv.traces import markers
from tokmill.bbv.traces.markers import Command, grouped
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

TOUCHES = """
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
int main(void) {
    int zeros = open("/dev/zero", O_RDONLY);
    char byte, *pages = mmap(0, 400 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                             -1, 0);
    madvise(pages, 400 * 4096, MADV_NOHUGEPAGE);
    for (int i = 0; i < 800; i++) {
        read(zeros, &byte, 1);
        pages[i % 400 * 4096]++;
    }
}
"""
THREADS = """
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
static void *reads(void *nothing) {
    char byte;
    for (int i = 0; i < 50000000; i++) (fread_unlocked)(&byte, 1, 0, stdin);
    return nothing;
}
int main(void) {
    pthread_t other;
    pthread_create(&other, 0, reads, 0);
    reads(0);
    pthread_join(other, 0);
}
"""
STACK = """
#include <stdio.h>
#include <unistd.h>
int main(int count, char **words) {
    FILE *out = fopen(words[1], "a");
    char byte;
    for (int i = 0; i < 40; i++) read(0, &byte, 1);
    fprintf(out, "%p\\n", (void *)words);
    fclose(out);
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


def test_page_faults_lie_where_pages_are_touched_first(tmp_path: Path) -> None:
    command = Command((str(compiles(tmp_path, "touches", TOUCHES, "-O1")),))
    library = markers.make_library(tmp_path, "io")
    faults = markers.count_faults(command, library, tmp_path, 1, 802)
    assert len(faults) == 801
    assert (faults[1:400] == 1).all() and faults[401:800].sum() <= 1
    with pytest.raises(TokmillError, match=r"counts page faults passes 800 marks, and the first 9"):
        markers.count_faults(command, library, tmp_path, 1, 11)


def test_marks_of_threads_are_all_counted_with_page_faults(tmp_path: Path) -> None:
    """In runs that are timed they may be lost, as nothing there is atomic."""
    command = Command((str(compiles(tmp_path, "threads", THREADS, "-O1", "-pthread")),))
    library = markers.make_library(tmp_path, "io")
    faults = markers.count_faults(command, library, tmp_path, 10_000, 10_002)
    assert (faults >= 0).all()


def test_all_runs_have_the_same_stack(tmp_path: Path) -> None:
    """What is asked for at marks stands in the environment, above the stack."""
    places = tmp_path / "places"
    command = Command((str(compiles(tmp_path, "stack", STACK, "-O1")), str(places)))
    library = markers.make_library(tmp_path, "io")
    for every in (1, 10**17):
        with Progress("runs", 2, quiet=True) as progress:
            ticks = markers.time_marks(command, library, tmp_path, every, 2, progress)
        markers.count_faults(command, library, tmp_path, every, ticks.shape[1] + 1)
    found = places.read_text().split()
    assert len(found) == 6 and len(set(found)) == 1
