"""MinHash against exact similarity, and the index against a plain loop over all pairs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import batch_of, rec
from phrase_records import PHRASES
from tokmill.builds.selection.minhash import HASHES, NearIndex, elements, minima, rows_of_a_band
from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array, Column

TOKENS = {"token": Column("u2")}


def least_of(rows: list[list[int]], shingle: int = 5) -> Array:
    """The minima of records of tokens."""
    batch = batch_of(TOKENS, [rec(row) for row in rows])
    return minima(*elements(batch, ["token"]), shingle)


def shingles(row: Any, size: int) -> set[tuple[int, ...]]:
    """A record's shingles: a shorter record is one, an empty one has none."""
    row = tuple(row)
    return {row[i : i + size] for i in range(max(1, len(row) - size + 1))} if row else set()


def jaccard(a: Any, b: Any, size: int) -> float:
    first, second = shingles(a, size), shingles(b, size)
    return len(first & second) / len(first | second) if first | second else 1.0


ROWS = st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=8)


@given(ROWS, st.integers(1, 6))
def test_minima_are_equal_where_the_sets_of_shingles_are(rows: list[list[int]], size: int) -> None:
    found = least_of(rows, size)
    assert found.shape == (len(rows), HASHES)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            same = shingles(a, size) == shingles(b, size)
            assert (found[i] == found[j]).all() == same
            if not shingles(a, size) & shingles(b, size) and not same:
                assert not (found[i] == found[j]).any()


@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.9, 0.95])
def test_minima_estimate_the_similarity(similarity: float) -> None:
    """Each of 128 × 200 pairs of minima is equal with a chance of exactly the similarity."""
    size, pairs = 400, 200
    shared = round(size * 2 * similarity / (1 + similarity))
    rows = []
    for pair in range(pairs):
        rng = np.random.default_rng(pair)
        tokens = rng.permutation(60_000)[: 2 * size - shared]
        rows += [tokens[:size].tolist(), tokens[size - shared :].tolist()]
    exact = jaccard(rows[0], rows[1], 1)
    found = least_of(rows, 1)
    equal = (found[::2] == found[1::2]).mean()
    assert abs(equal - exact) < 4 * math.sqrt(exact * (1 - exact) / pairs / HASHES)


def twin(least: Array, threshold: float) -> list[bool]:
    """Keep a record unless an earlier kept one shares a band and 8 bits of enough minima."""
    rows = rows_of_a_band(threshold)
    bits = mix(least) & np.uint64(0xFF)
    kept: list[int] = []
    for i, row in enumerate(least):
        near = False
        for j in kept:
            bands = (row == least[j])[: HASHES // rows * rows].reshape(-1, rows).all(1)
            share = (bits[i] == bits[j]).mean()
            near |= bool(bands.any() and share >= threshold + (1 - threshold) / 256)
        if not near:
            kept.append(i)
    return [i in kept for i in range(len(least))]


@st.composite
def families(draw: Any) -> list[list[int]]:
    """Records among which many are near to each other, at all similarities."""
    seed = draw(st.integers(0, 1 << 20))
    rng = np.random.default_rng(seed)
    roots = [rng.integers(0, 500, 60).tolist() for _ in range(draw(st.integers(1, 3)))]
    rows = []
    for _ in range(draw(st.integers(0, 40))):
        row = list(roots[rng.integers(len(roots))])
        for _ in range(rng.integers(0, 4)):
            row[rng.integers(len(row))] = int(rng.integers(500))
        rows.append(row)
        roots.append(row)
    return rows


@settings(max_examples=60, deadline=None)
@given(families(), st.sampled_from([0.5, 0.75, 0.9, 1.0]), st.integers(1, 17), st.integers(1, 99))
def test_the_index_keeps_what_a_plain_loop_keeps_however_it_is_cut(
    rows: list[list[int]], threshold: float, size: int, pairs: int
) -> None:
    least = least_of(rows, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokmill.builds.selection.minhash.PAIRS", pairs)
        index = NearIndex(threshold)
        found: list[bool] = []
        for start in range(0, len(least), size):
            found += index.add(least[start : start + size]).tolist()
    assert found == twin(least, threshold)
    assert index.count == sum(found)


def removed(similarity: float, threshold: float) -> float:
    """The chance that the signatures of two records of a similarity agree enough."""
    chance = similarity + (1 - similarity) / 256
    least = math.ceil(HASHES * (threshold + (1 - threshold) / 256))
    return sum(
        math.comb(HASHES, k) * chance**k * (1 - chance) ** (HASHES - k)
        for k in range(least, HASHES + 1)
    )


def documented(repository: Path) -> list[tuple[float, float]]:
    """The table of docs/building.md: similarity → share removed, in percent."""
    text = (repository / "docs" / "building.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| similarity |")]
    rows += [line for line in text.splitlines() if line.startswith("| removed at 0.9 |")]
    head, values = ([cell.strip() for cell in row.split("|")[2:-1]] for row in rows)
    return [(float(a), float(b.rstrip(" %"))) for a, b in zip(head, values, strict=True)]


def test_the_documented_rates_are_those_of_the_formula_and_of_a_trial(repository: Path) -> None:
    table = documented(repository)
    assert len(table) >= 5
    trials = 4000
    for similarity, percent in table:
        wanted = removed(similarity, 0.9)
        assert abs(percent - 100 * wanted) <= 0.051, similarity
        rng = np.random.default_rng(0)
        first = rng.integers(0, 1 << 63, (trials, HASHES)).astype(np.uint64)
        other = rng.integers(0, 1 << 63, (trials, HASHES)).astype(np.uint64)
        second = np.where(rng.random((trials, HASHES)) < similarity, first, other)
        index = NearIndex(0.9)
        assert index.add(first).all()
        share = 1 - index.add(second).mean()
        assert abs(share - wanted) < 0.002 + 4 * math.sqrt(wanted * (1 - wanted) / trials)


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0])
def test_bands_miss_next_to_nothing_at_the_threshold(threshold: float) -> None:
    rows = rows_of_a_band(threshold)
    assert (1 - threshold**rows) ** (HASHES // rows) <= 0.001


def test_phrases_count_by_what_they_hold() -> None:
    """Equal instructions are equal in every shard, whatever their number and block bits."""
    table = {"asm": [[1, 2], [3], [4, 4, 4]], "type": [[0, 1], [1], [1, 0, 0]]}
    turned = {name: rows[::-1] for name, rows in table.items()}
    row = {"phrases": [(0, True), (1, False), (2, True), (0, False)], "address": 0}
    same = {"phrases": [(2 - number, False) for number, _ in row["phrases"]], "address": 1}
    side = {"side": [0] * 8}
    one = elements(batch_of(PHRASES, [row | side], table=table), ["asm", "type", "side"])
    two = elements(batch_of(PHRASES, [same | side], table=turned), ["asm", "type", "side"])
    assert one[0].tolist() == two[0].tolist()
    assert one[0][0] == one[0][3] and len(set(one[0].tolist())) == 3
    assert one[1].tolist() == [0, 4]


@pytest.mark.parametrize("column", ["token", "other"])
def test_every_column_counts(column: str) -> None:
    schema = {"token": Column("u2"), "other": Column("u1")}
    row = {"token": [1, 2, 3], "other": [1, 2, 3]}
    found = [
        elements(batch_of(schema, [changed]), ["token", "other"])[0]
        for changed in (row, row | {column: [1, 9, 3]})
    ]
    assert (found[0] == found[1]).tolist() == [True, False, True]
    swapped = elements(batch_of(schema, [{"token": [1], "other": [2]}]), ["token", "other"])[0]
    assert swapped != elements(batch_of(schema, [{"token": [2], "other": [1]}]), [*schema])[0]
