"""Which functions are paired, and that all that is left out is counted."""

import numpy as np
import pytest

from made_functions import f, functions
from tokmill.base.errors import UsageError
from tokmill.similarity.functions import Functions
from tokmill.similarity.pairing import Task, family, keep, tasks_of


def tasks(made: Functions) -> dict[str, Task]:
    return {task.setting: task for task in tasks_of(made, keep(made, 5))}


def pairs(made: Functions, task: Task) -> list[tuple[str, str, str, str]]:
    return [
        (made.text("program", q), made.text("function", q), made.text("program", t),
         made.text("function", t))
        for q, t in zip(task.query, task.target, strict=True)
    ]  # fmt: skip


def test_the_same_function_at_two_levels() -> None:
    made = functions(f("b"), f("c"), f("x"), f("c", "O3"), f("b", "O3"), f("y", "O3"))
    task = tasks(made)["gcc-12 O0 → gcc-12 O3"]
    assert task.row == "O0-O3"
    assert pairs(made, task) == [("a", "b", "a", "b"), ("a", "c", "a", "c")]
    assert task.left_out == {"without a partner": 2} and task.same_code == 0


def test_programs_projects_versions_and_compilers_keep_apart() -> None:
    for other in ({"project": "q"}, {"program": "z"}, {"version": "2"}, {"compiler": "gcc-13"}):
        made = functions(f("b"), f("b", "O3", **other))
        assert all(not len(task.query) for task in tasks(made).values())


def test_what_cannot_be_paired_is_counted() -> None:
    made = functions(
        f("b"), f("b", "O3"),
        f("sub_1", named=False), f("k", compiler="unknown"), f("k", "unknown"), f("k", ""),
        f("small", blocks=4), f("unknown size", blocks=-1),
        f("static"), f("static"), f("static", "O3"),
    )  # fmt: skip
    kept = keep(made, 5)
    assert kept.left_out == {
        "functions without a name of their source": 1,
        "functions whose compiler or level is not known": 3,
        "functions of fewer blocks than asked for": 1,
        "functions whose name stands for several in their program": 2,
    }
    (task,) = tasks_of(made, kept)
    # `static` at O3 and the one of unknown size have no partner.
    assert len(task.query) == 1 and task.left_out == {"without a partner": 2}
    assert len(kept.rows) + sum(kept.left_out.values()) == len(made)


def test_a_function_of_several_programs_counts_once() -> None:
    made = functions(
        f("b"), f("b", "O3"), f("b", program="z"), f("b", "O3", program="z"),
        # Only in z at both levels: that one is taken.
        f("c"), f("c", program="z"), f("c", "O3", program="z"),
    )  # fmt: skip
    (task,) = tasks(made).values()
    assert pairs(made, task) == [("a", "b", "a", "b"), ("z", "c", "z", "c")]
    assert task.left_out == {"without a partner": 1, "in another program too": 1}


def test_functions_of_equal_code_count_once() -> None:
    made = functions(
        f("b", code=1), f("b", "O3", code=2),
        f("c", code=1), f("c", "O3", code=3),  # as b at O0
        f("d", code=4), f("d", "O3", code=2),  # as b at O3
        f("e", code=5), f("e", "O3", code=5),  # the same at both
    )  # fmt: skip
    (task,) = tasks(made).values()
    assert [pair[1] for pair in pairs(made, task)] == ["b", "e"]
    assert task.left_out == {"code of another pair": 2} and task.same_code == 1


def test_without_codes_nothing_is_a_duplicate() -> None:
    made = functions(f("b", code=1), f("b", "O3", code=2), f("c", code=1), f("c", "O3", code=3))
    made.code = None
    (task,) = tasks(made).values()
    assert len(task.query) == 2


def test_compilers_of_two_families_in_both_directions() -> None:
    made = functions(*(
        f(name, level, compiler=compiler)
        for name in "bc" for level in ("O0", "O2")
        for compiler in ("gcc-12.2.0", "gcc-13", "clang-14")
    ))  # fmt: skip
    found = tasks(made)
    rows = [task.row for task in found.values()]
    assert set(rows) == {"O0-O2", "gcc-clang O0", "gcc-clang O2"} and len(rows) == 3 + 8
    assert "clang-14 O0 → gcc-13 O0" in found and "gcc-13 O0 → clang-14 O0" in found
    assert "gcc-12.2.0 O0 → gcc-13 O0" not in found
    assert [family(name) for name in (
        "gcc-12.2.0", "Clang 14", "g++-9", "x86_64-linux-gnu-gcc-12", "/usr/bin/clang++", "icc-19",
        "", "9",
    )] == ["gcc", "clang", "gcc", "gcc", "clang", "icc", "", "9"]  # fmt: skip


def test_order_of_records_changes_nothing() -> None:
    ones = [
        f(name, level, code=n % 5, program=program)
        for n, (name, level, program) in enumerate(
            (name, level, program)
            for name in "bcdefg"
            for level in ("O0", "O3")
            for program in "az"
        )
    ]
    random = np.random.default_rng(0)
    found = set()
    for _ in range(5):
        made = functions(*(ones[i] for i in random.permutation(len(ones))))
        (task,) = tasks(made).values()
        found.add((tuple(pairs(made, task)), tuple(task.left_out.items())))
    assert len(found) == 1


def test_rows_that_are_asked_for() -> None:
    made = functions(f("b"), f("b", "O3"), f("b", "Os"), f("b", "O2", compiler="c"))
    kept = keep(made)
    rows = ["O0-O3", "O0-Os"]
    assert [task.row for task in tasks_of(made, kept)] == rows
    assert [task.row for task in tasks_of(made, kept, rows[1:])] == rows[1:]
    (task,) = tasks_of(made, kept, ["O3-Os"])
    assert pairs(made, task) == [("a", "b", "a", "b")] and task.setting == "gcc-12 O3 → gcc-12 Os"
    with pytest.raises(UsageError, match=r"'O1-O3'.*\n.*O0-O3"):
        tasks_of(made, kept, ["O1-O3"])


def test_levels_of_no_published_pair() -> None:
    made = functions(f("b"), f("b", "O2"), f("b", "Og"))
    assert [task.row for task in tasks_of(made, keep(made))] == ["O0-O2", "O0-Og", "O2-Og"]


def test_nothing() -> None:
    made = functions()
    assert tasks_of(made, keep(made)) == []
