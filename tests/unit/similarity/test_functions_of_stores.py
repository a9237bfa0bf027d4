"""The functions of real stores: programs that were compiled here at several levels."""

from pathlib import Path

import numpy as np
import pytest

from leveled_programs import LAYOUT, leveled
from making import quick_build, token_store
from tokmill.base.errors import UsageError
from tokmill.similarity.functions import Functions, functions_of, of_functions
from tokmill.similarity.pairing import keep, tasks_of
from tokmill.store.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leveled(tmp_path_factory.mktemp("leveled"))


@pytest.fixture(scope="module")
def store(folder: Path) -> Store:
    return build(folder, folder / "../store-whole")


def build(folder: Path, out: Path, **options: object) -> Store:
    return quick_build("x86", str(folder), out.resolve(), layout=LAYOUT, **options)


def test_columns_and_sizes_are_those_of_the_records(store: Store) -> None:
    made = functions_of(store)
    assert len(made) == len(store) and made.record is None and made.code is not None
    for row in range(0, len(store), 7):
        record = store.record(row)
        border = record["border"]
        for name, coded in made.names.items():
            assert coded.names[coded.codes[row]] == record[name]
        assert made.blocks[row] == np.count_nonzero(border & 2)
        assert made.named[row] == (record["function"] != f"sub_{record['address']:x}")
    assert not made.named.all() or all(name[:4] != "sub_" for name in made.names["function"].names)


def test_pairs_of_levels(store: Store) -> None:
    made = functions_of(store)
    tasks = {task.row: task for task in tasks_of(made, keep(made, 3))}
    assert set(tasks) == {"O0-O3", "O2-O3"}
    for row, task in tasks.items():
        names = {made.text("function", one) for one in task.query.tolist()}
        assert {"dispatch", "interpret", "search", "words"} <= names
        for query, target in zip(task.query.tolist(), task.target.tolist(), strict=True):
            for column in ("project", "program", "function", "compiler"):
                assert made.text(column, query) == made.text(column, target)
            assert (made.text("level", query), made.text("level", target)) == tuple(row.split("-"))


def test_parts_of_a_function_are_one(folder: Path, store: Store, tmp_path: Path) -> None:
    cut = build(folder, tmp_path / "cut", max_tokens=64)
    assert len(cut) > len(store)
    whole, made = functions_of(store), functions_of(cut)
    assert key(made) == key(whole)
    assert made.blocks.tolist() == whole.blocks.tolist()
    # Equal functions are equal in parts too.
    groups = [np.unique(one.code, return_inverse=True)[1] for one in (whole, made)]
    for a in range(0, len(whole), 5):
        assert ((groups[0] == groups[0][a]) == (groups[1] == groups[1][a])).all()
    assert made.record is not None
    vectors = np.random.default_rng(0).normal(size=(len(cut), 3))
    mean = of_functions(made, vectors)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for row in (0, 5, len(made) - 1):
        assert mean[row] == pytest.approx(unit[made.record == row].mean(0))


def key(made: Functions) -> list[tuple[str, ...]]:
    return [tuple(made.text(name, row) for name in made.names) for row in range(len(made))]


def test_walks_of_a_function_are_one(folder: Path, tmp_path: Path) -> None:
    walks = build(folder, tmp_path / "walks", unit="walk", min_tokens=64)
    made = functions_of(walks)
    assert made.record is not None and len(made) < len(walks) == len(made.record)
    assert len(set(key(made))) == len(made)
    for record in range(0, len(walks), 11):
        assert made.text("function", made.record[record]) == walks.record(record)["function"]


def test_stripped_programs_have_no_names(folder: Path, tmp_path: Path) -> None:
    from x86_programs import run

    program = tmp_path / "in" / "p" / "gcc-O0" / "tool"
    program.parent.mkdir(parents=True)
    run("objcopy", "--strip-all", str(folder / "first/gcc-O0/tool"), str(program))
    made = functions_of(build(tmp_path / "in", tmp_path / "s"))
    kept = keep(made)
    assert len(made) > 10 and not made.named[1:].all() and len(kept.rows) <= 2
    assert sum(kept.left_out.values()) + len(kept.rows) == len(made)


def test_a_store_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no column of strings 'project'"):
        functions_of(token_store(tmp_path / "s", [[[1, 2]]]))
