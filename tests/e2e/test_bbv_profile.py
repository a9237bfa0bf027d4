"""`tokmill bbv profile`: block vectors, modelled and measured CPI of programs that run here."""

import json
from pathlib import Path

import numpy as np
import pytest

from making import quick_build
from profiled import libraries, ran, text_file
from tokmill.base.errors import TokmillError, UsageError
from tokmill.bbv.traces.cpi import read_measures
from tokmill.bbv.traces.markers import Command, choose, make_library
from tokmill.bbv.traces.profile import USUAL, Asked, profile
from tokmill.bbv.traces.read import read
from x86_programs import compiles

PHASES = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) {
    long sum = 0, rounds = atol(words[1]);
    if (count > 2) rounds += getpid() % 97 * 100;
    for (long i = 0; i < rounds; i++) {
        char *block = malloc(100 + i % 50);
        for (int k = 0; k < 400; k++) sum += (sum ^ k) * (i % 2000 < 1000 ? 3 : sum % 7 + 1);
        __asm__ volatile("" :: "r"(block) : "memory"); // else the allocation is left out
        free(block);
    }
    printf("%ld\\n", sum);
    return count > 3;
}
"""


@pytest.fixture
def phases(tmp_path: Path) -> str:
    """A program that allocates and counts, and whose second argument makes each run another."""
    return str(compiles(tmp_path, "phases", PHASES, "-O1"))


def test_a_program_runs_under_the_name_by_which_it_is_called(tmp_path: Path) -> None:
    source = """
    #include <string.h>
    int main(int count, char **words) { return strcmp(strrchr(words[0], '/'), "/called") != 0; }
    """
    (tmp_path / "called").symlink_to(compiles(tmp_path, "other", source, "-O1"))
    found = profile([str(tmp_path / "called")], tmp_path / "out", Asked(every_blocks=1000))
    assert found.trace.name == "called.bb.gz"
    assert "/other\n" in (tmp_path / "out" / "called.map").read_text()


def test_a_modelled_profile_joins_with_blocks(tmp_path: Path) -> None:
    gzip = ran("gzip")
    data = text_file(tmp_path / "data", 60_000)
    found = profile([gzip, "-c", str(data)], tmp_path / "out", Asked(every_blocks=200_000))
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    ends = ("about.json", "bb.gz", "intervals.csv", "map", "pc")
    assert names == [f"gzip.{end}" for end in ends]
    again = read(found.trace)
    assert (again.counts == found.vectors.counts).all()
    # One program is in the map and not in the store.
    quick_build("x86", [gzip, *libraries(gzip)], tmp_path / "blocks", unit="block")
    store = quick_build("bbv", found.trace, tmp_path / "store", blocks=[str(tmp_path / "blocks")])
    notes = store.manifest.notes
    assert notes["instructions joined"] >= 0.95 * notes["instructions"]
    assert {store.record(n)["cpi_kind"] for n in range(len(store))} == {"modelled"}
    np.testing.assert_allclose(store.column("cpi"), found.cpi["modelled"], rtol=1e-5)
    # The program's: cycles by instructions, not the mean of intervals, of which the last is short.
    cycles = (found.cpi["modelled"] * found.vectors.instructions).sum()
    whole = cycles / found.vectors.instructions.sum()
    assert found.program_cpi() == {"modelled": pytest.approx(whole)}
    assert (store.column("d1_misses") > 0).any()
    # Page faults are counted where CPI is measured.
    assert np.isnan(store.column("page_faults")).all()
    assert not (store.column("d1_misses") < 0).any()


def test_measured_and_modelled_intervals_are_the_same(phases: str, tmp_path: Path) -> None:
    asked = Asked(measured=True, intervals=30, runs=3)
    found = profile([phases, "6000"], tmp_path / "out", asked, name="p")
    cpi = found.cpi["measured"]
    assert 28 <= len(found.vectors) == len(cpi) <= 36
    assert np.isnan(cpi[[0, -1]]).all() and (cpi[1:-1] > 0).all()
    # Two kinds of rounds take turns; intervals of about equal sizes are put together of them.
    sizes = found.vectors.instructions[1:-1]
    assert sizes.max() < 3 * sizes.min()
    table = read_measures(tmp_path / "out/p.intervals.csv")
    assert table.kind == "measured" and set(table.cpi) == {"measured", "modelled"}
    # It begins with faults, and its heap stays as small as it is.
    assert found.timed is not None
    faults = table.rates["page_faults"] * found.vectors.instructions / 1000
    np.testing.assert_allclose(faults, found.timed.faults, atol=0.01)
    assert faults[0] >= 1 > np.median(faults)
    about = json.loads((tmp_path / "out/p.about.json").read_text())
    assert about["marks"]["kind"] == "heap"
    assert about["modelled"]["weights"] == USUAL


FORKS = """
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline)) void spin(long n) { volatile long s = 0; while (n--) s += n; }
int main(int c, char **v) {
    spin(100000);
    pid_t child = c > 1 ? fork() : 1;
    if (!child) { spin(300000); _exit(0); }
    if (c > 1) waitpid(child, 0, 0);
    spin(50000);
}
"""


def test_forked_processes_are_left_out(tmp_path: Path) -> None:
    program = str(compiles(tmp_path, "forks", FORKS, "-O1"))
    alone = profile([program], tmp_path / "out", Asked(every_blocks=50_000), name="alone")
    forked = profile([program, "x"], tmp_path / "out", Asked(every_blocks=50_000), name="forked")
    assert (alone.about["forked"], forked.about["forked"]) == (0, 1)
    # fork, waitpid and their wrappers are some thousand instructions; the child's are 1.8 million.
    more = forked.vectors.instructions.sum() - alone.vectors.instructions.sum()
    assert 0 < more < 20_000


def test_what_cannot_be_profiled(phases: str, tmp_path: Path) -> None:
    out, measured = tmp_path / "out", Asked(measured=True, intervals=10, runs=4)
    with pytest.raises(UsageError, match="no such program"):
        profile([str(tmp_path / "none")], out, Asked())
    with pytest.raises(UsageError, match="no program was named"):
        profile([], out, Asked())
    with pytest.raises(TokmillError, match="leads out"):
        profile([phases, "1"], out, Asked(), name="../x")
    with pytest.raises(TokmillError, match="exit code 1"):
        profile([phases, "1", "x", "y"], out, Asked())
    with pytest.raises(TokmillError, match="not do the same"):
        profile([phases, "500", "x"], out, measured)
    static = compiles(tmp_path, "static", "int main(void) { return 0; }", "-static")
    with pytest.raises(TokmillError, match="passed no mark"):
        profile([str(static)], out, measured)
    assert not out.exists()


def test_functions_are_marked_in_order_of_their_calls(phases: str, tmp_path: Path) -> None:
    # Long enough that another process on the processor does not change which marks are best.
    library, kind, every, calls = choose(Command((phases, "4000")), tmp_path, 20)
    assert (library.name, kind) == ("markers-heap.so", "heap")
    # 4000 blocks and the buffer of stdout. What the C library calls itself is not marked.
    assert calls["io"] < 5 and 8000 <= calls["heap"] <= 8010
    assert every == calls["heap"] // 60
    for other in ("io", "memory"):
        assert make_library(tmp_path, other).is_file()
