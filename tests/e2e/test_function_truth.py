"""The truth about two programs whose difference is known, and how answers are judged by it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from diff_sources import NEW, OLD
from tokmill.x86.lift.cfg import lift
from x86_programs import C_SOURCE, compiler, run, stripped, symbols


@pytest.fixture(scope="module")
def script(benchmark_script: Callable[[str], ModuleType]) -> Any:
    found: Any = benchmark_script("function_truth")
    found.read = benchmark_script("debug_info").read_debug_info
    return found


def built_of(folder: Path, source: str, *flags: str) -> Path:
    """Compile a source that is called a.c wherever it lies."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.c").write_text(source)
    run(compiler("gcc"), "-g", "-w", *flags, "-o", str(folder / "program"), str(folder / "a.c"))
    return folder / "program"


def truth_of(script: Any, a: Path, b: Path) -> Any:
    infos = script.read(a), script.read(b)
    return script.function_truth(lift(stripped(a)), lift(stripped(b)), *infos)


def right_answer(truth: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the functions of the two graphs that are partners."""
    a, b = truth.a.labels().tolist(), truth.b.labels().tolist()
    pairs = [(a.index(label), number) for number, label in enumerate(b) if label >= 0]
    one, other = np.array(pairs).T
    return one, other


def test_two_versions(script: Any, tmp_path: Path) -> None:
    old, new = (built_of(tmp_path / n, s, "-O1") for n, s in (("old", OLD), ("new", NEW)))
    truth = truth_of(script, old, new)
    a, b = right_answer(truth)
    names = {truth.a.info.name[number] for number in truth.a.functions()[a].tolist()}
    assert names == {"main", "twice", "kept"} and truth.matches == 3
    score, left_out = script.judge_functions(truth, a, b)
    assert score == script.Score(3, 0, 0) and score.f1 == 1
    assert left_out.a[script.ALONE] == 1 and left_out.a[script.UNKNOWN] > 3
    score, _ = script.judge_functions(truth, a, np.roll(b, 1))
    assert score == script.Score(0, 3, 3) and score.f1 == 0
    # A function of which nothing is known is wrong for one that has a partner.
    unknown = truth.a.reasons().index(script.UNKNOWN)
    score, left_out = script.judge_functions(truth, np.array([unknown] * 2), np.array([b[0], 0]))
    assert (score.right, score.wrong, left_out.matches.total()) == (0, 1, 1)


def test_levels_of_one_source(script: Any, tmp_path: Path) -> None:
    paths = [built_of(tmp_path / level, C_SOURCE, f"-{level}") for level in ("O0", "O2")]
    truth = truth_of(script, *paths)
    score, _ = script.judge_functions(truth, *right_answer(truth))
    assert score.f1 == 1 and score.right == truth.matches >= 12


def test_parts_and_what_is_inlined_do_not_count(script: Any, tmp_path: Path) -> None:
    source = """\
int printf(const char *, ...);
static int twice(int x) { while (x-- > 3) if (x & 1) printf("more\\n"); return 2 * x; }
__attribute__((noinline)) int rare(const char *x, int n) {
    int sum = 0;
    for (; *x; x++) { if (n == 7) { int *p = 0; sum += *p; __builtin_trap(); } sum += *x; }
    return sum;
}
int main(int argc, char **argv) {
    int sum = twice(argc);
    for (int i = 0; i < argc; i++) sum += rare(argv[i], argc);
    return sum;
}
"""
    paths = [built_of(tmp_path / level, source, f"-{level}") for level in ("O0", "O2")]
    truth = truth_of(script, *paths)
    assert truth.matches == 2
    # As if the lifter had taken what was moved out of `rare` for a function.
    unknown = truth.b.reasons().index(script.UNKNOWN)
    truth.b.graph.function_address[unknown] = symbols(paths[1])["rare.cold"]
    assert truth.b.reasons()[unknown] == script.PART
    first, _ = right_answer(truth)
    score, left_out = script.judge_functions(truth, first[:1], np.array([unknown]))
    assert score == script.Score(0, 0, 2) and left_out.matches == {script.PART: 1}
    assert left_out.a[script.INLINED] == 1


def test_names_that_stand_twice(script: Any, tmp_path: Path) -> None:
    own = "static __attribute__((noinline)) int own(int x) { return x + 5; }\n"
    for name in ("one", "two"):
        (tmp_path / f"{name}.c").write_text(f"{own}int {name}(int x) {{ return own(x); }}\n")
    (tmp_path / "main.c").write_text(
        "int one(int); int two(int); int main(int c, char **v) { return one(c) + two(c); }\n"
    )
    paths = []
    for level in ("-O0", "-O1"):
        paths.append(tmp_path / f"program{level}")
        files = [str(tmp_path / f"{name}.c") for name in ("one", "two", "main")]
        run(compiler("gcc"), "-g", level, "-o", str(paths[-1]), *files)
    truth = truth_of(script, *paths)
    # `own` is in two compilations, and their files tell one from the other.
    assert truth.matches == 5 and script.SEVERAL not in truth.a.why
    for info in (truth.a.info, truth.b.info):
        info.unit = np.full(len(info.name), -1)
    sides = truth.a, truth.b
    again = script.function_truth(*(s.graph for s in sides), *(s.info for s in sides))
    assert again.matches == 3 and again.a.why.count(script.SEVERAL) == 2


def test_shares(script: Any) -> None:
    total = script.Score(3, 1, 0) + script.Score(1, 0, 4)
    assert (total.recall, total.precision) == (0.5, 0.8)
    assert (script.Score(0, 0, 0).recall, script.Score(0, 0, 0).precision) == (1.0, 1.0)
    assert (script.Score(0, 2, 2).recall, script.Score(0, 2, 2).precision) == (0.0, 0.0)
