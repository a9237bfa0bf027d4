"""The truth about two programs whose difference is known, and how answers are judged by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.x86.diff.truth.block_truth import ELSEWHERE, NO_FUNCTION, judge_blocks
from tokmill.x86.diff.truth.ground_truth import (
    ALONE,
    CLONE,
    INLINED,
    PART,
    SEVERAL,
    UNKNOWN,
    GroundTruth,
    Score,
    ground_truth,
    judge_functions,
)
from tokmill.x86.diff.truth.source_lines import same_source, two_versions
from tokmill.x86.image.debug.debug_info import read_debug_info
from tokmill.x86.lift.cfg import lift
from x86_programs import C_SOURCE, compiler, run, stripped, symbols

NONE = np.zeros(0, np.int64)
OLD = """\
int printf(const char *, ...);
static int helper(int x) { return x * 3 + 1; }
int removed(int x) {
    if (x > 3)
        return helper(x);
    return printf("removed\\n");
}
int kept(int x) {
    if (x > 5)
        printf("large\\n");
    while (x-- > 0)
        printf("%d\\n", x);
    return x;
}
int main(int argc, char **argv) { return kept(argc) + removed(argc); }
"""
NEW = """\
int printf(const char *, ...);
int added(int x) {
    return printf("added %d\\n", x * 7);
}
int kept(int x) {
    if (x > 5)
        printf("large\\n");
    printf("new\\n");
    while (x-- > 0)
        printf("%d\\n", x);
    return x;
}
int main(int argc, char **argv) { return kept(argc) + added(argc); }
"""


def built_of(folder: Path, source: str, *flags: str) -> Path:
    """Compile a source that is called a.c wherever it lies."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.c").write_text(source)
    run(compiler("gcc"), "-g", "-w", *flags, "-o", str(folder / "program"), str(folder / "a.c"))
    return folder / "program"


def truth_of(a: Path, b: Path, *folders: Path) -> GroundTruth:
    one, other = read_debug_info(a), read_debug_info(b)
    source = two_versions(one.files, other.files, *folders) if folders else None
    return ground_truth(lift(stripped(a)), lift(stripped(b)), one, other, source)


def right_answer(truth: GroundTruth) -> tuple[np.ndarray, np.ndarray]:
    """Return the functions of the two graphs that are partners."""
    a, b = truth.a.labels().tolist(), truth.b.labels().tolist()
    pairs = [(a.index(label), number) for number, label in enumerate(b) if label >= 0]
    one, other = np.array(pairs).T
    return one, other


@pytest.fixture(scope="module")
def versions(built: Path) -> tuple[GroundTruth, Path]:
    """Two versions of a small program, each in a folder of its own."""
    found = []
    for name, source in (("old", OLD), ("new", NEW)):
        found.append(built_of(built / "versions" / name, source, "-O0"))
    folders = [path.parent for path in found]
    return truth_of(*found, *folders), built / "versions"


def test_two_versions(versions: tuple[GroundTruth, Path]) -> None:
    truth, _ = versions
    a, b = right_answer(truth)
    at = truth.a.functions()[a]
    assert {truth.a.info.name[number] for number in at.tolist()} == {"kept", "main"}
    assert truth.matches == 2
    score, left_out = judge_functions(truth, a, b)
    assert score == Score(2, 0, 0) and score.f1 == 1
    assert left_out.a[ALONE] == 2 and left_out.b[ALONE] == 1
    assert left_out.a[UNKNOWN] == left_out.b[UNKNOWN] > 3
    score, _ = judge_functions(truth, a, b[::-1])
    assert score == Score(0, 2, 2) and score.f1 == 0
    # A function of which nothing is known is wrong for one that has a partner.
    unknown = truth.a.reasons().index(UNKNOWN)
    score, left_out = judge_functions(truth, np.array([unknown, unknown]), np.array([b[0], 0]))
    assert (score.right, score.wrong, left_out.matches.total()) == (0, 1, 1)


def test_lines_go_through_the_difference(versions: tuple[GroundTruth, Path]) -> None:
    truth, _ = versions
    number = next(n for n, path in enumerate(truth.a.info.files) if path.endswith("a.c"))
    lines = np.arange(1, 16)
    file, found = truth.source.lines(np.full(15, number), lines)
    expected = [
        NEW.splitlines().index(line) + 1 if line in NEW.splitlines() else -1
        for line in OLD.splitlines()
    ]
    assert found.tolist()[7:13] == expected[7:13]
    assert (found[1:6] == -1).all() and (file[found < 0] == -1).all()


def test_a_repository_in_the_working_directory_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings may name filters and the like; it may have come with the input."""
    run(compiler("git"), "init", "-q", str(tmp_path))
    mark = tmp_path / "ran"
    with open(tmp_path / ".git/config", "a") as file:
        file.write(
            f'[filter "x"]\n\tclean = touch {mark}; cat\n[diff "x"]\n\ttextconv = touch {mark}'
        )
    (tmp_path / ".gitattributes").write_text("*.c filter=x diff=x\n")
    for name, text in (("old", "int a;\n"), ("new", "int a;\nint b;\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.c").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", f"touch {mark}")
    lines = two_versions(["a.c"], ["a.c"], tmp_path / "old", tmp_path / "new")
    assert lines.lines(np.array([0]), np.array([1]))[1].tolist() == [1]
    assert not mark.exists()


def test_blocks_of_two_versions(versions: tuple[GroundTruth, Path]) -> None:
    truth, _ = versions
    a, b = truth.a, truth.b

    def blocks(side: object, name: str) -> dict[int, list[int]]:
        """Line → blocks of a function that have it."""
        graph, info = side.graph, side.info  # type: ignore[attr-defined]
        row = graph.function_address.tolist().index(info.entry[info.name.index(name)])
        found: dict[int, list[int]] = {}
        for block in range(graph.function_blocks[row], graph.function_blocks[row + 1]):
            at = info.row_at(graph.block_address[block : block + 1])[0]
            found.setdefault(int(info.row_line[at]), []).append(block)
        return found

    old, new = blocks(a, "kept"), blocks(b, "kept")
    shift = 3 - 6  # `added` has three lines, what went six.
    pairs = [(old[10][0], new[10 + shift][0]), (old[12][0], new[12 + shift + 1][0])]
    one, other = np.array(pairs).T
    empty, left_out = judge_blocks(truth, NONE, NONE)
    assert empty.right == empty.wrong == 0 and empty.lost >= 6
    assert left_out.a[NO_FUNCTION] and left_out.b[NO_FUNCTION]
    score, _ = judge_blocks(truth, one, other)
    assert score == Score(2, 0, empty.lost - 2)
    crossed, _ = judge_blocks(truth, one, other[::-1])
    assert crossed == Score(0, 2, empty.lost)


def test_levels_of_one_source(tmp_path: Path) -> None:
    a = built_of(tmp_path / "truth-a", C_SOURCE, "-O0")
    b = built_of(tmp_path / "truth-b", C_SOURCE, "-O2")
    truth = truth_of(a, b)
    score, left_out = judge_functions(truth, *right_answer(truth))
    assert score.f1 == 1 and score.right == truth.matches >= 12
    score, left_out = judge_blocks(truth, NONE, NONE)
    assert score.lost > 20 and score.f1 == 0


def test_parts_do_not_count(tmp_path: Path) -> None:
    source = """\
__attribute__((noinline)) int rare(const char *x, int n) {
    int sum = 0;
    for (; *x; x++) {
        if (n == 7) { int *p = 0; sum += *p; __builtin_trap(); }
        sum += *x;
    }
    return sum;
}
int main(int argc, char **argv) {
    int sum = 0;
    for (int i = 0; i < argc; i++) sum += rare(argv[i], argc);
    return sum;
}
"""
    a = built_of(tmp_path / "truth-parts-a", source, "-O1")
    b = built_of(tmp_path / "truth-parts-b", source, "-O2")
    truth = truth_of(a, b)
    # As if the lifter had taken what was moved out of `rare` for a function.
    cold = symbols(b)["rare.cold"]
    address = truth.b.graph.function_address
    unknown = truth.b.reasons().index(UNKNOWN)
    address[unknown] = cold
    assert truth.b.reasons()[unknown] == PART
    first, _ = right_answer(truth)
    score, left_out = judge_functions(truth, first[:1], np.array([unknown]))
    assert score == Score(0, 0, truth.matches) and left_out.matches == {PART: 1}


def test_what_is_inlined_is_left_out(tmp_path: Path) -> None:
    source = """\
int printf(const char *, ...);
static int twice(int x) {
    while (x-- > 3)
        if (x & 1) printf("more\\n");
    return 2 * x; }
int main(int c, char **v) { return twice(c); }
"""
    a = built_of(tmp_path / "truth-own", source, "-O0")
    b = built_of(tmp_path / "truth-inlined", source, "-O2")
    truth = truth_of(a, b)
    assert truth.matches == 1
    _, left_out = judge_functions(truth, NONE, NONE)
    assert left_out.a[INLINED] == 1
    _, left_out = judge_blocks(truth, NONE, NONE)
    assert left_out.b[ELSEWHERE] >= 1


def test_clones_and_names_that_stand_twice(built: Path) -> None:
    folder = built / "names-that-stand-twice"
    folder.mkdir(exist_ok=True)
    same = "static __attribute__((noinline)) int same(int x) {{ return x * {0}; }}\n"
    (folder / "a.h").write_text(same.format(3))
    for name in ("one", "two"):
        (folder / f"{name}.c").write_text(
            f'#include "a.h"\nstatic __attribute__((noinline)) int own(int x) {{ return x + 5; }}\n'
            f"int {name}(int x) {{ return same(x) + own(x); }}\n"
        )
    (folder / "main.c").write_text(
        "int one(int); int two(int); int main(int c, char **v) { return one(c) + two(c); }\n"
    )
    found = []
    for level in ("-O0", "-O1"):
        path = folder / f"program{level}"
        files = [str(folder / f"{name}.c") for name in ("one", "two", "main")]
        run(compiler("gcc"), "-g", level, "-o", str(path), *files)
        found.append(path)
    truth = truth_of(*found)
    # `same` and `own` stand in two compilations each, and their files tell them apart.
    assert truth.matches == 7 and truth.a.info.name.count("same") == 2
    assert SEVERAL not in truth.a.why and CLONE not in truth.a.why
    for info in (truth.a.info, truth.b.info):
        info.unit = np.full(len(info.name), -1)
    again = ground_truth(truth.a.graph, truth.b.graph, truth.a.info, truth.b.info)
    # `own` has a line in each file; `same` nothing that tells one from the other.
    assert again.matches == 5 and again.a.why.count(SEVERAL) == 2


def test_sources_that_lie_elsewhere() -> None:
    a = ["/x/a/src/one.c", "/x/a/src/two.c", "/usr/include/stdio.h"]
    b = ["/usr/include/stdio.h", "/y/src/two.c", "/y/src/one.c"]
    assert same_source(a, b).partner.tolist() == [2, 1, 0]
    assert same_source(["/a/x.c"], ["/b/y.c"]).partner.tolist() == [-1]
    assert same_source([], []).partner.tolist() == []


def test_a_file_that_moved(tmp_path: Path) -> None:
    for place in ("old/lib/a.c", "new/src/a.c", "old/b.c", "new/b.c"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("int x;\n")
    found = two_versions(
        ["/p/lib/a.c", "/p/b.c", "/usr/include/stdio.h"],
        ["/usr/include/stdio.h", "/q/b.c", "/q/src/a.c"],
        tmp_path / "old",
        tmp_path / "new",
    )
    assert found.partner.tolist() == [2, 1, 0]
    assert found.not_found == 1 and not found.hunks


def test_source_folders_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="no folder"):
        two_versions(["/a.c"], ["/a.c"], tmp_path / "none", tmp_path)
    with pytest.raises(TokmillError, match="none of the program's source files"):
        two_versions(["/a.c"], ["/a.c"], tmp_path, tmp_path)


def test_shares() -> None:
    total = Score(3, 1, 0) + Score(1, 0, 4)
    assert (total.recall, total.precision) == (0.5, 0.8)
    assert (Score(0, 0, 0).recall, Score(0, 0, 0).precision) == (1.0, 1.0)
    assert (Score(0, 2, 2).recall, Score(0, 2, 2).precision) == (0.0, 0.0)
