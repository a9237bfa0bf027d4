"""Entries of several records, values of records, and vectors that references lead to."""

from pathlib import Path

import numpy as np
import pytest

from entry_stores import labelled, lay, tuples_of
from making import token_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.cli import main
from tokmill.feed.entries import Tuples, Vectors
from tokmill.feed.feed import Batch, Feed
from tokmill.feed.rows import Whole, Windows
from tokmill.store.store import Store
from toy import make_store

LENGTH = 8
TRIPLET = ("anchor", "positive", "negative")


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return labelled(tmp_path_factory.mktemp("entries") / "functions")


@pytest.fixture(scope="module")
def listed(functions: Path) -> Store:
    return Store(tuples_of(functions.parent / "listed", functions), ["entries", "groups"])


def row_of(batch: Batch, row: int, document: int = 0) -> list[int]:
    return batch.columns["token"][row][batch.document[row] == document].tolist()


def record(store: Store, number: int) -> list[int]:
    return store.record(int(number))["token"].tolist()


def test_values_are_those_of_the_row_s_record(functions: Path) -> None:
    store = Store(functions, ["label"])
    for rows in (Whole(store, LENGTH), Windows(store, LENGTH, 3, across=False)):
        feed = Feed(rows, 8, seed=2, columns=["token", "label"])
        for step in range(6):
            epoch, row, _ = feed.rows_of(step)
            (records,) = rows.value_records(row)
            batch = feed.batch(step)
            assert batch.values["label"].tolist() == store.column("label")[records].tolist()
            for i in range(8):
                assert row_of(batch, i)[0] in record(store, records[i])
            parts = [feed.batch(step, rank, 4) for rank in range(4)]
            together = np.concatenate([part.values["label"] for part in parts])
            assert np.array_equal(together, batch.values["label"])


def test_values_of_rows_of_several_records_are_refused(functions: Path) -> None:
    store = Store(functions, ["label"])
    with pytest.raises(UsageError, match="a row may hold several records"):
        Feed(Windows(store, LENGTH), 8, columns=["token", "label"])
    with pytest.raises(UsageError, match="no column 'lable'"):
        Feed(Whole(store, LENGTH), 8, columns=["token", "lable"])


@pytest.mark.parametrize("seed", [0, 3])
def test_a_triplet_is_three_rows_in_a_row(listed: Store, functions: Path, seed: int) -> None:
    rows = Tuples(listed, LENGTH, TRIPLET)
    store = Store(functions)
    feed = Feed(rows, 6, seed=seed, columns=["token"])
    assert len(rows) == 24 and rows.store.fingerprint == store.fingerprint
    for step in range(5):
        batch, (_, entries, _) = feed.batch(step), feed.rows_of(step)
        assert len(batch) == 18
        assert batch.entry.tolist() == np.repeat(np.arange(6), 3).tolist()
        assert len(set(batch.key.tolist())) == 18
        for row in range(18):
            name = TRIPLET[row % 3]
            number = listed.column(name)[entries[row // 3]]
            assert row_of(batch, row) == record(store, number)[:LENGTH]
        parts = [feed.batch(step, rank, 3) for rank in range(3)]
        assert np.array_equal(
            np.concatenate([part.columns["token"] for part in parts]), batch.columns["token"]
        )
        assert np.array_equal(np.concatenate([part.key for part in parts]), batch.key)


def test_groups_have_as_many_rows_as_they_name(listed: Store, functions: Path) -> None:
    rows = Tuples(listed, LENGTH, ["member"])
    store = Store(functions, ["label"])
    feed = Feed(rows, 5, seed=1, columns=["token"])
    for step in range(8):
        batch, (_, entries, _) = feed.batch(step), feed.rows_of(step)
        at = 0
        for place, entry in enumerate(entries):
            for number in listed.record(int(entry))["member"]:
                assert row_of(batch, at) == record(store, number)[:LENGTH]
                assert batch.entry[at] == place
                at += 1
        assert at == len(batch)
    lengths = np.diff(store.offsets())
    members = np.concatenate([listed.record(i)["member"] for i in range(len(listed))])
    assert rows.tokens == np.minimum(lengths[members], LENGTH).sum()
    assert rows.tokens + rows.cut_tokens == lengths[members].sum()
    assert rows.cut_records == np.count_nonzero(lengths[members] > LENGTH) > 0


def test_values_of_an_entry_and_of_its_rows(listed: Store, functions: Path) -> None:
    # `anchor` is a column of the entries; `bytes` is one of both stores: the entry's wins.
    feed = Feed(Tuples(listed, LENGTH, TRIPLET), 6, columns=["token", "anchor", "bytes"])
    batch, (_, entries, _) = feed.batch(1), feed.rows_of(1)
    anchors = np.repeat(listed.column("anchor")[entries], 3)
    assert batch.values["anchor"].tolist() == anchors.tolist()
    assert batch.values["bytes"].tolist() == np.repeat(listed.column("bytes")[entries], 3).tolist()


def test_neighbours_make_entries_without_references(tmp_path: Path) -> None:
    store = token_store(tmp_path / "s", [[[1, 2], [3]], [[4], [5, 6], [7]], [[8]] * 2])
    rows = Tuples(store, 2, size=3)
    assert len(rows) == 2 and rows.tokens == 8
    assert Feed(rows, 1, shuffle=False).batch(1).columns["token"].tolist() == [
        [5, 6],
        [7, 0],
        [8, 0],
    ]
    empty = Tuples(token_store(tmp_path / "empty", [[[], []]]), 2)
    with pytest.raises(UsageError, match="no rows to train on"):
        Feed(empty, 1)


def test_families_of_neighbours_are_told_by_the_group_of_each_record(tmp_path: Path) -> None:
    """Not by that of the record that has the number of the entry."""
    make_store(tmp_path / "s", [[number, number] for number in range(1, 10)])
    group = [0, 1, 2, 3, 4, 5, 6, 7, 3]
    for values, families in (
        (group, [0, 0, 2, 3, 3, 5, 6, 6, 3]),
        (np.float32(group), [0, 0, 2, 3, 3, 5, 6, 6, 8]),
    ):
        store = lay(tmp_path / "s", f"of_{np.asarray(values).dtype}", {"group": values})
        rows = Tuples(store, 2, size=3, unlike=[2], group="group")
        assert rows.families().tolist() == families


def test_numbers_that_no_type_holds_are_not_mixed(tmp_path: Path) -> None:
    rows = []
    for name, label in (("a", np.uint64([1 << 63, 1])), ("b", np.int64([-1, 1]))):
        make_store(tmp_path / name, [[1, 1], [2]])
        rows.append(Whole(lay(tmp_path / name, "label", {"label": label}), 2))
    with pytest.raises(UsageError, match="'label' has the types u8, i8"):
        Feed(rows, 2, columns=["label"])


def test_shards_are_mixed_a_few_at_a_time(listed: Store) -> None:
    rows = Tuples(listed, LENGTH, TRIPLET, shards=1, seed=3)
    assert rows.groups.sum() == len(rows)
    assert sorted(Feed(rows, 24).rows_of(0)[1]) == list(range(24))


def test_columns_that_make_no_entries(listed: Store, functions: Path) -> None:
    for columns, said in (
        (["anchor", "member"], "make no entries"),
        (["anchor", "bytes"], "no column 'bytes' that refers"),
    ):
        with pytest.raises(UsageError, match=said):
            Tuples(listed, LENGTH, columns)


def test_a_damaged_reference_is_found(listed: Store) -> None:
    rows = Tuples(listed, LENGTH, TRIPLET)
    rows.store = Store(rows.store.path)
    rows.store.records = 3
    with pytest.raises(TokmillError, match="a reference names the record"):
        Feed(rows, 24, columns=["token"]).batch(0)


def test_vectors_of_references(listed: Store, functions: Path) -> None:
    values = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    lay(functions, "vectors", {"vector": values})
    found = Vectors("member", Store(functions, ["vectors"]), "vector")
    rows = Whole(listed, 3)
    feed = Feed(rows, 6, columns=["member"], vectors=[{"vector": found}])
    batch, (_, entries, _) = feed.batch(2), feed.rows_of(2)
    assert batch.columns["vector"].shape == (6, 3, 3)
    for row, entry in enumerate(entries):
        members = listed.record(int(entry))["member"][:3]
        assert np.array_equal(batch.columns["vector"][row, : len(members)], values[members])
        assert not batch.columns["vector"][row, len(members) :].any()
    with pytest.raises(UsageError, match="vector per record"):
        Vectors("member", Store(functions, ["label"]), "label")


def test_entries_without_records_are_refused_and_the_hint_works(
    functions: Path, tmp_path: Path
) -> None:
    """A record of no tokens names no record."""
    listed = tmp_path / "listed"
    make_store(listed, [np.ones(3, np.int64), np.ones(0, np.int64)])
    store = lay(listed, "groups", {"member": np.arange(3, dtype=np.uint32)}, functions)
    with pytest.raises(UsageError, match="1 records of 2 name no record") as caught:
        Tuples(store, LENGTH, ["member"])
    command = caught.value.hint.split("`")[1]
    words = command.replace("STORE", str(listed)).replace("NEW", str(tmp_path / "new")).split()
    with pytest.raises(SystemExit) as ended:
        main(words[1:])
    assert not ended.value.code
    assert Store(tmp_path / "new").records == 1
