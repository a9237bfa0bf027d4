"""Points that programs share."""

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from making import quick_build
from source_cases import block_store, write_trace
from tokmill.base.errors import TokmillError
from tokmill.bbv.points import executions as reading
from tokmill.bbv.points import shared_points as sharing
from tokmill.bbv.points.executions import Executions
from tokmill.store.store import Store


def programs(seed: int, kinds: int = 5) -> tuple[Executions, np.ndarray]:
    """Return four programs of the same kinds of intervals, and signatures that tell the kinds."""
    random = np.random.default_rng(seed)
    program = np.repeat(np.arange(4), [30, 50, 80, 20])
    kind = random.integers(kinds, size=180)
    base = np.linspace(0.5, 4, kinds)
    instructions = random.integers(5, 20, 180) * 1e5
    blocks = np.eye(kinds)[kind][:, np.arange(60) % kinds]
    vectors = scipy.sparse.csr_matrix(blocks * (instructions / blocks.sum(axis=1))[:, None])
    found = Executions(
        ["a", "b", "c", "d"], program, np.arange(180), instructions,
        base[kind] * np.exp(random.normal(0, 0.01, 180)), "measured",
        np.zeros((180, 0)), vectors, 0,
    )  # fmt: skip
    return found, np.eye(kinds)[kind] + random.normal(0, 0.01, (180, kinds))


def test_what_programs_have_in_common_is_simulated_once() -> None:
    known, signatures = programs(1)
    found = sharing.shared_points(known, signatures, 5)
    assert len(found.points) == 5
    assert found.weights.sum(axis=1) == pytest.approx(1)
    for row in found.rows:
        assert abs(row.shared) < 0.03 and abs(row.held_out) < 0.03 and abs(row.simpoint) < 0.03
    # Each weight is the share of the program's instructions in the point's cluster.
    shares = known.shares()
    near = ((signatures[:, None] - signatures[found.points]) ** 2).sum(axis=2).argmin(axis=1)
    slow = np.asarray([[shares[(known.program == p) & (near == k)].sum() for k in range(5)]
                       for p in range(4)])  # fmt: skip
    assert found.weights == pytest.approx(slow)
    points = known.instructions[found.points].sum()
    assert found.speed_up == pytest.approx(known.instructions.sum() / points)
    assert found.speed_up > 3 * found.speed_up_alone


def test_signatures_that_say_nothing_are_no_better_than_a_constant() -> None:
    known, signatures = programs(2)
    noise = np.random.default_rng(0).normal(size=signatures.shape)
    useless = sharing.shared_points(known, noise, 5)
    useful = sharing.shared_points(known, signatures, 5)
    error = [np.mean([abs(row.shared) for row in one.rows]) for one in (useless, useful)]
    assert error[0] > 5 * error[1]


def test_nothing_of_the_program_itself_is_in_held_out() -> None:
    known, signatures = programs(3)
    first = sharing.shared_points(known, signatures, 5).rows[2].held_out
    other = known.cpi.copy()
    other[known.program == 2] *= 7
    moved = Executions(**{**vars(known), "cpi": other})
    again = sharing.shared_points(moved, signatures, 5).rows[2].held_out
    assert (1 + first) / 7 == pytest.approx(1 + again)


def test_executions_of_a_store(tmp_path: Path) -> None:
    options = block_store(tmp_path)
    traces = [write_trace(tmp_path, number) for number in (0, 1, 2)]
    quick_build("bbv", traces, tmp_path / "store", blocks=[str(options[1])], min_joined=0.0)
    store = Store(tmp_path / "store")
    known = reading.read_executions(store)
    assert known.names == ["0", "1", "2"] and known.kind == "modelled"
    assert len(known.cpi) + known.left_out == len(store)
    for row in (0, len(known.cpi) - 1):
        record = store.record(int(known.records[row]))
        assert known.cpi[row] == record["cpi"]
        dense = np.zeros(known.vectors.shape[1])
        dense[record["block"]] = record["count"]
        assert (known.vectors[row].toarray()[0] == dense).all()
    signatures = reading.untrained(store, known)
    assert np.isfinite(signatures).all() and len(signatures) == len(known.cpi)
    weights = known.shares() / 3
    assert weights.sum() == pytest.approx(1)


def test_a_store_without_executions_is_told(tmp_path: Path) -> None:
    options = block_store(tmp_path)
    with pytest.raises(TokmillError, match="the store has no column"):
        reading.read_executions(Store(Path(str(options[1]))))


def test_rates_are_columns_that_have_numbers(tmp_path: Path) -> None:
    options = block_store(tmp_path)
    trace = write_trace(tmp_path, 0)
    lines = trace.read_text().count("T:")
    rows = "".join(f"{n},1.5,{n},3,{n % 2}\n" for n in range(lines))
    (tmp_path / "0.intervals.csv").write_text(
        f"interval,cpi_measured,d1_misses,ll_misses,page_faults\n{rows}"
    )
    quick_build("bbv", trace, tmp_path / "store", blocks=[str(options[1])], min_joined=0.0)
    known = reading.read_executions(Store(tmp_path / "store"))
    assert known.rates.shape[1] == 3, "d1_misses, ll_misses, page_faults"
    assert known.rates[:, 2].tolist() == [n % 2 for n in range(lines)]
