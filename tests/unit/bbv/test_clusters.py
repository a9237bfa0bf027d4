"""k-means, BIC, SimPoint's choice."""

import numpy as np
import pytest
import scipy.sparse

from phases import BLOCKS, phases
from tokmill.base.errors import TokmillError
from tokmill.bbv.points import clusters, simpoint
from tokmill.bbv.points.clusters import Floats, Ints
from tokmill.builds.mining.interval_vectors import BITS, projection_rows


def slow_bic(points: Floats, weights: Floats, labels: Ints) -> float:
    """Return the BIC by the density of each interval, one after the other."""
    count, dimensions = points.shape
    shares = weights / weights.sum() * count
    k = int(labels.max()) + 1
    means = [
        np.average(points[labels == c], axis=0, weights=weights[labels == c]) for c in range(k)
    ]
    squares = sum(
        share * ((point - means[label]) ** 2).sum()
        for share, point, label in zip(shares, points, labels, strict=True)
    )
    variance = squares / (dimensions * (count - k))
    score = 0.0
    for share, point, label in zip(shares, points, labels, strict=True):
        density = -((point - means[label]) ** 2).sum() / (2 * variance)
        density -= dimensions / 2 * np.log(2 * np.pi * variance)
        score += share * (density + np.log(shares[labels == label].sum() / count))
    return score - (k - 1 + k * dimensions + 1) / 2 * np.log(count)


def test_bic_is_that_of_its_definition() -> None:
    random = np.random.default_rng(1)
    points, weights = random.normal(size=(60, 3)), random.random(60) + 0.1
    labels, centres = clusters.k_means(points, weights, 4)
    assert clusters.bic(points, weights, labels, centres) == pytest.approx(
        slow_bic(points, weights, labels)
    )


@pytest.mark.parametrize("count", [10, clusters.MOST, clusters.MOST + 1])
def test_not_every_interval_of_a_short_program_is_a_cluster(count: int) -> None:
    random = np.random.default_rng(1)
    points = random.normal(size=(count, 3)) + 100 * (np.arange(count) % 2)[:, None]
    assert len(clusters.find_clusters(points, np.ones(count))) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_intervals_are_one_cluster_unless_more_are_asked_for(count: int) -> None:
    points = np.arange(float(count))[:, None]
    assert len(clusters.find_clusters(points, np.ones(count))) == 1
    assert len(clusters.find_clusters(points, np.ones(count), exactly=5)) == count


def test_weights_pull_the_centres() -> None:
    points = np.asarray([[0.0], [1.0], [10.0], [11.0]])
    weights = np.asarray([1.0, 3.0, 1.0, 1.0])
    labels, centres = clusters.k_means(points, weights, 2)
    assert labels.tolist() == [0, 0, 1, 1]
    assert centres[:, 0].tolist() == [0.75, 10.5]


def rows(ids: Ints, dimensions: int, seed: int) -> Floats:
    found: Floats = projection_rows(ids, dimensions, seed).astype(np.float64) / (1 << BITS)
    return found


def test_a_row_of_the_projection_is_its_id_s_alone() -> None:
    ids = np.asarray([5, 2**62, 7])
    wide = rows(ids, 30, 1)
    assert (rows(ids[[2, 0]], 15, 1) == wide[[2, 0], :15]).all()
    assert np.abs(wide).max() <= 1 and np.unique(wide).size == wide.size
    many = rows(np.arange(20_000), 4, 3)
    assert np.abs(many.mean(axis=0)).max() < 0.02
    assert np.abs(many.var(axis=0) - 1 / 3).max() < 0.01
    assert np.abs(np.corrcoef(many.T) - np.eye(4)).max() < 0.03


def test_phases_are_found_and_the_points_stand_for_them() -> None:
    made = phases(3)
    found = simpoint.simpoints(made.vectors, np.arange(BLOCKS))
    kinds = len(np.unique(made.phase))
    assert len(found.intervals) == kinds
    pairs = set(zip(found.labels.tolist(), made.phase.tolist(), strict=True))
    assert len(pairs) == kinds
    counts = simpoint.instructions(made.vectors)
    points = simpoint.features(made.vectors, np.arange(BLOCKS), found.dimensions, None)
    for number, weight in enumerate(found.weights):
        inside = found.labels == number
        assert weight == pytest.approx(counts[inside].sum() / counts.sum())
        assert inside[found.intervals[number]]
        centre = np.average(points[inside], axis=0, weights=counts[inside])
        distances = np.linalg.norm(points - centre, axis=1)
        assert distances[found.intervals[number]] == pytest.approx(distances[inside].min())
    assert found.unexplained < 0.05


def test_the_same_points_in_every_run_and_for_any_order_of_columns() -> None:
    made = phases(4)
    first = simpoint.simpoints(made.vectors, np.arange(BLOCKS), dimensions=15, exactly=12)
    again = simpoint.simpoints(made.vectors, np.arange(BLOCKS), dimensions=15, exactly=12)
    assert (first.intervals == again.intervals).all() and (first.weights == again.weights).all()
    order = np.random.default_rng(0).permutation(BLOCKS)
    turned = simpoint.simpoints(made.vectors[:, order], order, dimensions=15, exactly=12)
    assert (turned.intervals == first.intervals).all()


def test_unexplained_is_that_of_dense_vectors() -> None:
    made = phases(5, intervals=50)
    weights = simpoint.instructions(made.vectors)
    labels = made.phase % 3
    dense = made.vectors.toarray() / weights[:, None]
    means = np.stack([
        np.average(dense[labels == c], axis=0, weights=weights[labels == c])
        for c in range(3)
    ])  # fmt: skip
    middle = np.average(dense, axis=0, weights=weights)
    inside = weights @ ((dense - means[labels]) ** 2).sum(axis=1)
    around = weights @ ((dense - middle) ** 2).sum(axis=1)
    assert simpoint.unexplained(made.vectors, weights, labels) == pytest.approx(inside / around)


def test_more_dimensions_where_fifteen_hide_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "RESTARTS", 2)
    random = np.random.default_rng(2)
    blocks, kinds = 4000, 60
    own = np.zeros((kinds, blocks))
    for kind in range(kinds):
        own[kind, random.choice(blocks, 40, replace=False)] = 1
    rows = own[np.arange(900) % kinds] * 1000 + (random.random((900, blocks)) < 0.02) * 300
    vectors = scipy.sparse.csr_matrix(rows)
    found = simpoint.simpoints(vectors, np.arange(blocks), exactly=kinds)
    fixed = simpoint.simpoints(vectors, np.arange(blocks), exactly=kinds, dimensions=15)
    assert found.dimensions > 15 and found.unexplained < 0.95 * fixed.unexplained


@pytest.mark.parametrize("most", [1, 2, 30])
def test_equal_intervals_are_one_cluster(most: int) -> None:
    vectors = scipy.sparse.csr_matrix(np.ones((10, 3)))
    found = simpoint.simpoints(vectors, np.arange(3), most=most)
    assert found.intervals.tolist() == [0] and found.weights.tolist() == [1]
    assert found.unexplained == 0


def test_one_interval_and_more_clusters_than_intervals() -> None:
    one = scipy.sparse.csr_matrix([[4.0, 0.0, 2.0]])
    assert simpoint.simpoints(one, np.arange(3)).intervals.tolist() == [0]
    assert simpoint.simpoints(one, np.arange(3), exactly=9).weights.tolist() == [1]
    three = scipy.sparse.csr_matrix(np.eye(3))
    found = simpoint.simpoints(three, np.arange(3), exactly=9)
    assert sorted(found.intervals.tolist()) == [0, 1, 2]


def test_rows_of_zeros_are_no_points() -> None:
    rows = np.asarray([[0, 0], [5, 1], [0, 0], [1, 9], [0, 0]], float)
    found = simpoint.simpoints(scipy.sparse.csr_matrix(rows), np.arange(2), exactly=3)
    assert sorted(found.intervals.tolist()) == [1, 3]
    assert found.weights.sum() == pytest.approx(1)
    with pytest.raises(TokmillError, match="no interval has instructions"):
        simpoint.simpoints(scipy.sparse.csr_matrix((3, 2)), np.arange(2))


@pytest.mark.parametrize("empty", [1, 20])
def test_rows_of_zeros_change_no_point(empty: int) -> None:
    """Neither their number by BIC nor their weights."""
    draw = np.random.default_rng(1)
    shapes = 10 + np.outer(np.arange(6) + 2, np.arange(12)) % 7 * 20
    rows = (shapes[draw.integers(6, size=80)] * draw.uniform(0.6, 1.4, (80, 12)) * 100).round()
    more = np.zeros((80 * (empty + 1), 12))
    more[empty :: empty + 1] = rows
    alone, beside = (
        simpoint.simpoints(scipy.sparse.csr_matrix(one), np.arange(12)) for one in (rows, more)
    )
    assert (beside.intervals == alone.intervals * (empty + 1) + empty).all()
    assert beside.weights.tolist() == alone.weights.tolist()
    assert beside.labels[empty :: empty + 1].tolist() == alone.labels.tolist()
    assert (beside.labels >= 0).sum() == 80


def test_a_tiny_interval_is_no_point() -> None:
    labels = np.asarray([0, 0, 0, 1, 1])
    off = np.asarray([0.0, 0.2, 0.1, 0.3, 0.3])
    weights = np.asarray([1.0, 100.0, 90.0, 5.0, 5.0])
    assert clusters.nearest(labels, off, weights).tolist() == [2, 3]
    assert clusters.nearest(labels, off, weights * 0 + 1).tolist() == [0, 3]


def test_memory_vectors_part_what_blocks_do_not() -> None:
    vectors = scipy.sparse.csr_matrix(np.ones((20, 3)))
    memory = np.where(np.arange(20) < 10, 0.01, 0.5)[:, None]
    found = simpoint.simpoints(vectors, np.arange(3), memory=np.hstack([memory, memory * 0 + 7]))
    assert len(found.intervals) == 2
    assert (found.labels == (np.arange(20) >= 10)).all()


def test_many_intervals_are_searched_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made = phases(6, intervals=600)
    whole = simpoint.simpoints(made.vectors, np.arange(BLOCKS), dimensions=15)
    monkeypatch.setattr(clusters, "SEARCHED", 200)
    part = simpoint.simpoints(made.vectors, np.arange(BLOCKS), dimensions=15)
    assert len(part.labels) == 600 and (part.labels == whole.labels).all()


@pytest.mark.long
def test_a_million_intervals_of_sparse_ids_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    monkeypatch.setattr(clusters, "RESTARTS", 2)
    random = np.random.default_rng(0)
    count, each = 1_000_000, 10
    ids = np.unique(random.integers(1, 2**62, 50_000))
    columns = random.integers(len(ids) // 5, size=(count, each)) + (
        random.integers(5, size=(count, 1)) * (len(ids) // 5)
    )
    indptr = np.arange(0, count * each + 1, each, dtype=np.int32)
    data = random.integers(1, 1000, count * each).astype(np.float64)
    vectors = scipy.sparse.csr_matrix((data, columns.ravel().astype(np.int32), indptr))
    tracemalloc.start()
    found = simpoint.simpoints(vectors, ids[: vectors.shape[1]], most=6, dimensions=15)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.labels) == count and len(found.intervals) <= 6
    # Dense vectors would be 400 GB; the sparse ones are 120 MB.
    assert peak < 1e9
