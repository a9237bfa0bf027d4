"""Rows of two halves: which belong together, of which group, and that lengths tell nothing."""

from pathlib import Path

import numpy as np
import pytest

import toy
from entry_stores import lay
from tokmill.base.errors import UsageError
from tokmill.feed.halves import LEAST, OTHER, OWN, Halves, second_blocks
from tokmill.feed.rows import codes
from tokmill.store.store import Store

RECORDS = 400


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Records whose tokens name themselves, in any part, of 4 programs and 40 functions."""
    path = tmp_path_factory.mktemp("halves") / "s"
    random = np.random.default_rng(0)
    sizes = random.integers(2, 41, RECORDS)
    sizes[random.random(RECORDS) < 0.3] = 40
    toy.make_store(path, [np.resize([1 + i % 20, 1 + i // 20, 21], n) for i, n in enumerate(sizes)])
    groups = {"program": np.arange(RECORDS) % 4, "function": np.arange(RECORDS) % 40}
    lay(path, "groups", {name: value.astype(np.uint32) for name, value in groups.items()})
    return Store(path, ["groups"])


def test_half_of_an_epoch_are_own_halves(store: Store) -> None:
    rows = Halves(store, 30, group="program", apart="function")
    lengths = np.diff(store.offsets())
    assert len(rows) == (lengths >= 2 * LEAST).sum() == RECORDS - rows.cut_records
    for epoch in range(3):
        spans = rows.spans(np.arange(len(rows)), epoch)
        own = rows.own(np.arange(len(rows)), epoch)
        assert abs(own.sum() - len(rows) / 2) < 1
        first, second = spans.record[::2], spans.record[1::2]
        assert (np.sort(first) == np.flatnonzero(lengths >= 2 * LEAST)).all()
        assert ((first == second) == own).all()
        assert (spans.document[1::2] == np.where(own, OWN, OTHER)).all()
        assert (spans.stop > spans.start).all() and (spans.stop <= lengths[spans.record]).all()
        assert (spans.stop[::2][own] == spans.start[1::2][own]).all()
        sizes = (spans.stop - spans.start).reshape(-1, 2)
        assert (sizes.sum(1) <= 30).all()
        # Of the same program, of about the same length, and of another function.
        assert (first % 4 == second % 4).all()
        assert (first % 40 != second % 40)[~own].mean() > 0.94
        assert np.abs(lengths[first] - lengths[second]).mean() < 12
    assert (rows.own(np.arange(100), 0) != rows.own(np.arange(100), 1)).any()


@pytest.mark.parametrize("blocks", [False, True])
def test_no_row_says_that_the_tokens_which_follow_do_not(blocks: bool, tmp_path: Path) -> None:
    """Few kinds of records, so that those which meet are often equal behind their cuts."""
    random = np.random.default_rng(2)
    tokens = [np.resize(1 + random.integers(0, 2, 3), 24) for _ in range(200)]
    toy.make_store(tmp_path / "s", tokens)
    if blocks:
        begins = np.tile((np.arange(24) == 12) * 2 + 1, 200).astype(np.uint8)
        lay(tmp_path / "s", "border", {"border": begins})
    store = Store(tmp_path / "s", ["border"] if blocks else [])
    rows = Halves(store, 20, blocks=blocks)
    kept = 0
    for epoch in range(4):
        spans = rows.spans(np.arange(len(rows)), epoch)
        starts, stops = spans.start.reshape(-1, 2), spans.stop.reshape(-1, 2)
        for i, (a, b) in enumerate(spans.record.reshape(-1, 2)):
            shown = tokens[b][starts[i, 1] : stops[i, 1]].tolist()
            follows = tokens[a][stops[i, 0] :][: len(shown)].tolist()
            assert (shown == follows) == (spans.document[2 * i + 1] == OWN)
        kept += np.count_nonzero(rows.own(np.arange(len(rows)), epoch))
    assert kept / (4 * len(rows)) > 0.52


def test_lengths_do_not_tell(store: Store) -> None:
    """Both lengths, and whether a record ends there, are as likely of own halves as of others."""
    rows = Halves(store, 64, group="program")
    lengths = np.diff(store.offsets())
    seen: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for epoch in range(60):
        spans, own = rows.spans(np.arange(len(rows)), epoch), rows.own(np.arange(len(rows)), epoch)
        a, b = (spans.stop - spans.start).reshape(-1, 2).T
        ends = spans.stop[1::2] == lengths[spans.record[1::2]]
        full = spans.start[::2] == 0
        facts = np.column_stack([a, b, a + b, a - b, ends, full, a + b == 40])
        for which in (True, False):
            seen[which].append(facts[own == which])
    mean, other = (np.concatenate(seen[which]).mean(0) for which in (True, False))
    spread = np.concatenate(seen[True]).std(0) * np.sqrt(2 / sum(map(len, seen[True])))
    assert (np.abs(mean - other) <= 5 * spread + 1e-9).all(), (mean, other)


def test_what_cannot_be_halved_is_told(tmp_path: Path, store: Store) -> None:
    short = Store(toy.make_store(tmp_path / "short", [np.ones(5, int)] * 9))
    with pytest.raises(UsageError, match="long enough to be cut in two"):
        Halves(short, 30)
    with pytest.raises(UsageError, match="no column 'progam'") as caught:
        codes(store, "progam")
    assert "program" in caught.value.hint


def test_halves_are_the_ends_of_an_edge(tmp_path: Path) -> None:
    """Records of one block, of two, and of three; the first token of a block is 1."""
    blocks = [[9], [5, 6], [8, 7, 6], [4, 30], [3, 9], [6, 3], [40, 5], [7, 7], [5, 11]]
    made = [np.concatenate([[1, *[2] * (n - 1)] for n in sizes]) for sizes in blocks]
    toy.make_store(tmp_path / "s", made)
    border = np.where(np.concatenate(made) == 1, 3, 0).astype(np.uint8)
    lay(tmp_path / "s", "borders", {"border": border})
    store = Store(tmp_path / "s", ["borders"])
    assert second_blocks(store, 30).tolist() == [0, 5, 8, 4, 3, 6, 0, 7, 5]
    rows = Halves(store, 30, blocks=True)
    # Without a second block in the row, or with less than 4 tokens of one of the two.
    assert rows.records.tolist() == [1, 2, 3, 7, 8] and rows.cut_records == 4
    for epoch in range(4):
        spans = rows.spans(np.arange(5), epoch)
        first = [blocks[record][0] for record in spans.record.tolist()]
        assert spans.stop[::2].tolist() == first[::2] and spans.start[1::2].tolist() == first[1::2]
        assert (spans.stop - spans.start).reshape(-1, 2).sum(1).max() <= 30
    toy.make_store(tmp_path / "plain", made)
    with pytest.raises(UsageError, match="does not say where blocks begin"):
        Halves(Store(tmp_path / "plain"), 30, blocks=True)
