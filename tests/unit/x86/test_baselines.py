"""Untrained baselines over the functions of a store: joined by address, products are scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import quick_build
from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.store.store import Store
from tokmill.x86.features.baselines import baselines, facts, neighbours, parts_of
from tokmill.x86.features.ranker_weights import WEIGHTS
from tokmill.x86.features.store_functions import layout_of, store_functions
from tokmill.x86.graphs.lifting import lift_files
from x86_programs import C_SOURCE, compiles

LAYOUT = "{project}/{compiler}-{level}/{program}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store]:
    """Return graphs and a store of one program at two levels, and of another project."""
    folder = tmp_path_factory.mktemp("baselines")
    other = 'int puts(const char *); int main(void) { return puts("somewhere else"); }'
    for project, level, source in (
        ("one", "O0", C_SOURCE), ("one", "O2", C_SOURCE), ("two", "O2", other)
    ):  # fmt: skip
        path = folder / "programs" / project / f"gcc-{level}" / "tool"
        path.parent.mkdir(parents=True)
        compiles(folder, f"{project}{level}", source, f"-{level}", "-g").rename(path)
    lift_files([str(folder / "programs")], folder / "graphs")
    return folder / "graphs", quick_build("x86", folder / "graphs", folder / "s", layout=LAYOUT)


def dense(matrix: Any) -> Any:
    return matrix.toarray() if hasattr(matrix, "toarray") else matrix


def rows_of(store: Store, name: str, level: str = "O2") -> int:
    found = [
        number
        for number, record in enumerate(store)
        if (record["function"], record["level"], record["project"]) == (name, level, "one")
    ]
    assert len(found) == 1
    return found[0]


def test_every_baseline_has_a_row_a_record_whose_product_is_a_score(
    made: tuple[Path, Store],
) -> None:
    graphs, store = made
    found = baselines(store, [graphs], tuple(plugins.BASELINES))
    assert list(found) == list(plugins.BASELINES)
    for name, matrix in found.items():
        rows = dense(matrix)
        assert rows.shape[0] == len(store) and rows.dtype == np.float32, name
        assert np.isfinite(rows).all(), name
        lengths = np.linalg.norm(rows, axis=1)
        if name not in ("ranker", "code-around"):
            assert ((np.abs(lengths - 1) < 1e-5) | (lengths == 0)).all(), name
        assert lengths.any(), name
    # Strings and imports stay what they are at every level; its code does not.
    one, other = rows_of(store, "dispatch", "O0"), rows_of(store, "dispatch")
    scores = {name: dense(matrix)[one] @ dense(matrix)[other] for name, matrix in found.items()}
    assert scores["facts"] > scores["opcodes"] > 0


def test_facts_have_those_of_callees_at_a_third(made: tuple[Path, Store]) -> None:
    graphs, store = made
    features = store_functions(store, [graphs])
    found = {"facts": dense(facts(features)), "callees": dense(parts_of(features)["callees"])}
    parts = [features.weighed(kind).toarray() for kind in ("constants", "strings", "imports")]
    near = [features.around(kind).toarray() for kind in ("constants", "strings", "imports")]
    own, called = (np.hstack(rows)[features.record] for rows in (parts, near))
    for name, rows in (("facts", own + 0.3 * called), ("callees", called)):
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        assert np.allclose(found[name], rows / np.where(length > 0, length, 1), atol=1e-6)
    assert called.any(1).any() and not called.any(1).all()


def test_the_ranker_weighs_the_parts_that_there_are(made: tuple[Path, Store]) -> None:
    graphs, store = made
    parts = parts_of(store_functions(store, [graphs]))
    assert set(parts) == set(WEIGHTS) and len(parts) == 12
    assert all(weight >= 0 for weight in WEIGHTS.values())
    rows = dense(baselines(store, [graphs], ["ranker"])["ranker"])
    wanted = sum(WEIGHTS[name] * dense(one) @ dense(one).T for name, one in parts.items())
    assert np.allclose(rows @ rows.T, wanted, atol=1e-3)
    # What `dispatch` calls is near it, though not its own.
    called = neighbours(store_functions(store, [graphs]))
    assert set(called) == {"deep", "around", "callers"}


def test_records_that_were_selected_find_their_functions(
    made: tuple[Path, Store], tmp_path: Path
) -> None:
    graphs, store = made
    some = quick_build("select", store.path, tmp_path / "some", where=("level = O2",))
    again = quick_build("select", some.path, tmp_path / "again", where=("project = one",))
    assert layout_of(again) == LAYOUT
    whole = dense(baselines(store, [graphs], ["opcodes"])["opcodes"])
    kept = [n for n, r in enumerate(store) if (r["level"], r["project"]) == ("O2", "one")]
    few = dense(baselines(again, [graphs], ["opcodes"])["opcodes"])
    assert len(few) == len(kept) > 0
    # Columns of other programs are not there.
    assert np.allclose(few @ few.T, whole[kept] @ whole[kept].T, atol=1e-6)


def test_what_does_not_belong_together_is_refused(made: tuple[Path, Store], tmp_path: Path) -> None:
    graphs, store = made
    with pytest.raises(UsageError, match="no baseline is called 'opcode'") as error:
        baselines(store, [graphs], ["opcode"])
    assert "opcodes" in error.value.hint
    with pytest.raises(TokmillError, match="records belong to none of the graphs"):
        baselines(store, [graphs / "one"], ["opcodes"])
    text = tmp_path / "walks.txt"
    text.write_text("a b c\n")
    plain = quick_build("corpus", text, tmp_path / "corpus")
    with pytest.raises(TokmillError, match="no column"):
        baselines(plain, [graphs], ["opcodes"])
