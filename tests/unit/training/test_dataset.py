"""Stores in other loops: items with labels that are not shifted."""

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader

from making import TOKENS, rec, token_store, write_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.store.schema import Column
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.training.dataset import TokenDataset
from toy import cycles, make_store

NO = -100
THREE = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store", cycles(30, seed=1))


STREAMS = ("asm", "mne", "type", "reg", "rw", "eflag")


@pytest.fixture
def streams(tmp_path: Path) -> Store:
    """Records of 2 to 11 tokens in six streams, each with ids of its own."""
    random = np.random.default_rng(4)
    schema = {name: Column("u2", vocab=name) for name in STREAMS}
    sizes = {name: Vocabulary(f"{name}.json", "0" * 64, 40, {}) for name in STREAMS}
    records = [
        {name: random.integers(1, 40, length).tolist() for name in STREAMS}
        for length in random.integers(2, 12, 30)
    ]
    return write_store(tmp_path / "six", schema, [records[:17], records[17:]], vocabularies=sizes)


def lists(dataset: TokenDataset, name: str) -> list[list[int]]:
    return [dataset[i][name].tolist() for i in range(len(dataset))]


def test_windows_by_hand(tmp_path: Path) -> None:
    dataset = TokenDataset(token_store(tmp_path / "s", [THREE]), 4)
    assert lists(dataset, "input_ids") == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 0]]
    # A row's first token and the first of a document (5, 7) are not learned, nor is padding.
    assert lists(dataset, "labels") == [[NO, 2, 3, 4], [NO, NO, 6, NO], [NO, 8, 9, NO]]
    assert lists(dataset, "attention_mask") == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]
    item = dataset[0]
    assert set(item) == {"input_ids", "labels", "attention_mask"}
    assert {value.dtype for value in item.values()} == {torch.int64}


def test_what_an_earlier_window_holds_is_not_learned_again(tmp_path: Path) -> None:
    dataset = TokenDataset(token_store(tmp_path / "s", [[[1, 2, 3, 4, 5, 6]]]), 4, step=1)
    assert lists(dataset, "labels") == [[NO, 2, 3, 4], [NO, NO, NO, 5], [NO, NO, NO, 6]]


def test_whole_and_packed_by_hand(tmp_path: Path) -> None:
    made = token_store(tmp_path / "s", [THREE])
    whole = TokenDataset(made, 3, rows="whole")
    assert lists(whole, "input_ids") == [[1, 2, 3], [5, 6, 0], [7, 8, 9]]
    assert lists(whole, "labels") == [[NO, 2, 3], [NO, 6, NO], [NO, 8, 9]]
    assert lists(whole, "attention_mask") == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]
    packed = TokenDataset(made, 5, rows="packed")
    # With a mask, transformers would let the documents of a row see one another.
    assert set(packed[0]) == {"input_ids", "labels", "position_ids"}
    assert sorted(lists(packed, "input_ids")) == [[1, 2, 3, 4, 0], [7, 8, 9, 5, 6]]
    assert sorted(lists(packed, "labels")) == [[NO, 2, 3, 4, NO], [NO, 8, 9, NO, 6]]
    assert sorted(lists(packed, "position_ids")) == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]


def test_packed_rows_learn_each_token_once_and_no_rest_after_an_end(tmp_path: Path) -> None:
    """Each token has an id of its own; 0 ends a document."""
    lengths = np.random.default_rng(2).integers(1, 40, 60).tolist()
    ids = iter(range(1, 10_000))
    documents = [[*itertools.islice(ids, length), 0] for length in lengths]
    words = {"token": Vocabulary("token.json", "0" * 64, 10_000, {"eot": 0})}
    records = [[rec(document) for document in documents]]
    store = write_store(
        tmp_path / "s", {"token": Column("u2", vocab="token")}, records, vocabularies=words
    )
    dataset = TokenDataset(store, 16, rows="packed")
    firsts = {document[0] for document in documents}
    learned = [label for row in lists(dataset, "labels") for label in row if label != NO]
    assert learned.count(0) == len(documents)
    inside = [token for document in documents for token in document[1:-1]]
    after = [
        b for row in lists(dataset, "input_ids") for a, b in itertools.pairwise(row) if a == 0 and b
    ]
    assert set(after) - firsts, "no rest stands behind an end"
    assert sorted(filter(None, learned)) == sorted(inside + [b for b in after if b in firsts])


def test_tokens_with_a_loss_of_zero_are_only_read(tmp_path: Path) -> None:
    schema = {**TOKENS, "loss": Column("u1")}
    made = write_store(tmp_path / "s", schema, [[rec([1, 2, 3, 4, 5], loss=[1, 1, 0, 0, 1])]])
    assert lists(TokenDataset(made, 5), "labels") == [[NO, 2, NO, NO, 5]]


def test_a_stream_differs_by_epoch_and_by_seed(store: Path) -> None:
    dataset = TokenDataset(store, 16, rows="stream", seed=3)
    first = lists(dataset, "input_ids")
    assert lists(TokenDataset(store, 16, rows="stream", seed=3), "input_ids") == first
    assert lists(TokenDataset(store, 16, rows="stream", seed=4), "input_ids") != first
    dataset.set_epoch(1)
    second = lists(dataset, "input_ids")
    assert second != first
    assert lists(pickle.loads(pickle.dumps(dataset)), "input_ids") == second  # noqa: S301


def test_as_a_sequence(tmp_path: Path) -> None:
    dataset = TokenDataset(token_store(tmp_path / "s", [THREE]), 4)
    assert torch.equal(dataset[-1]["input_ids"], dataset[2]["input_ids"])
    for outside in (3, -4):
        with pytest.raises(IndexError, match="0 to 2"):
            dataset[outside]
    assert len(list(iter(dataset))) == 3  # type: ignore[call-overload]


def test_a_pickle_is_a_path(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    dataset = TokenDataset("store", 16)
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    monkeypatch.chdir("/")
    assert lists(pickle.loads(data), "labels") == lists(dataset, "labels")  # noqa: S301


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_what_the_dataset_holds(store: Path, context: str) -> None:
    dataset = TokenDataset(store, 16, rows="packed")
    expected = dataset.__getitems__(list(range(len(dataset))))
    loader = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context=context)
    found = list(loader)
    assert [len(batch["labels"]) for batch in found][:-1] == [5] * (len(found) - 1)
    for name in expected[0]:
        together = torch.cat([batch[name] for batch in found])
        assert torch.equal(together, torch.stack([item[name] for item in expected]))


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("pickled", [False, True])
def test_workers_that_stay_draw_the_rows_of_each_epoch(
    store: Path, context: str, pickled: bool
) -> None:
    dataset = TokenDataset(store, 8, rows="stream")
    if pickled:
        dataset = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    rows = []
    for epoch in (3, 7):
        dataset.set_epoch(epoch)
        rows.append([row for batch in loader for row in batch["input_ids"].tolist()])
        assert rows[-1] == lists(dataset, "input_ids")
    assert rows[0] != rows[1]


def test_a_copy_has_an_epoch_of_its_own(store: Path) -> None:
    dataset = TokenDataset(store, 8, rows="stream")
    first = lists(dataset, "input_ids")
    for other in (copy.copy(dataset), copy.deepcopy(dataset)):
        other.set_epoch(1)
        assert lists(other, "input_ids") != first
        assert (dataset.epoch, lists(dataset, "input_ids")) == (0, first)
        assert next(iter(DataLoader(dataset)))["input_ids"].tolist() == first[:1]


def test_the_default_device_of_torch_is_not_used(store: Path) -> None:
    with torch.device("meta"):
        dataset = pickle.loads(pickle.dumps(TokenDataset(store, 8)))  # noqa: S301
        dataset.set_epoch(1)
        assert dataset[0]["input_ids"].device.type == "cpu"


def test_numbers_that_cannot_be_are_refused_at_once(store: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"length": 1},
        {"step": -1},
        {"step": 16},
        {"step": 4, "rows": "packed"},
        {"rows": "window"},
        {"column": "tokens"},
    ]
    for options in wrong:
        with pytest.raises(UsageError):
            TokenDataset(store, **{"length": 16, **options})


def test_a_store_that_is_not_complete_has_to_be_opened_by_hand(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", cycles(5), complete=False)
    with pytest.raises(TokmillError, match="not complete"):
        TokenDataset(path, 16)
    dataset = TokenDataset(Store(path), 16)
    assert len(pickle.loads(pickle.dumps(dataset))) == len(dataset)  # noqa: S301


def test_several_stores_are_refused_with_a_way_out(store: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", cycles(5))
    for several in ([store, other], (Store(store), Store(other))):
        with pytest.raises(UsageError, match="not several") as caught:
            TokenDataset(several, 16)  # type: ignore[arg-type]
        assert "ConcatDataset" in caught.value.hint
    parts = [TokenDataset(path, 16) for path in (store, other)]
    joined = ConcatDataset(parts)
    assert len(joined) == len(parts[0]) + len(parts[1])
    shared = DataLoader(joined, batch_size=len(joined))
    assert next(iter(shared))["input_ids"].shape == (len(joined), 16)


def test_a_store_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    made = token_store(tmp_path / "s", [[]])
    with pytest.raises(TokmillError, match="no rows|column"):
        TokenDataset(made, 16)


def test_an_item_holds_all_streams_of_its_record(streams: Store) -> None:
    """Six streams of an unpickled dataset by two workers, against the records one by one."""
    dataset = pickle.loads(pickle.dumps(TokenDataset(streams, 8, rows="whole")))  # noqa: S301
    batches_ = list(DataLoader(dataset, 7, num_workers=2, multiprocessing_context="fork"))
    assert set(batches_[0]) == {*STREAMS, "labels", "attention_mask"}
    assert set(batches_[0]["labels"]) == set(STREAMS)
    for number, record in enumerate(streams):
        batch, row = batches_[number // 7], number % 7
        length = min(8, len(record["asm"]))
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (8 - length)
        for name in STREAMS:
            ids = record[name][:8].tolist()
            assert batch[name].dtype == batch["labels"][name].dtype == torch.int64
            assert batch[name][row].tolist() == ids + [0] * (8 - length)
            assert batch["labels"][name][row].tolist() == [NO, *ids[1:]] + [NO] * (8 - length)
    assert len(dataset) == streams.records == sum(len(batch["asm"]) for batch in batches_)


def test_packed_streams_and_one_of_them(streams: Store) -> None:
    packed = TokenDataset(streams, 16, rows="packed")
    assert set(packed[0]) == {*STREAMS, "labels", "position_ids"}
    found = {name: sorted(int(i) for item in packed for i in item[name] if i) for name in STREAMS}
    assert found == {name: sorted(int(i) for r in streams for i in r[name]) for name in STREAMS}
    one = TokenDataset(streams, 16, rows="packed", column="reg")
    assert set(one[0]) == {"input_ids", "labels", "position_ids"}
    for item, other in zip(one, packed, strict=True):
        assert torch.equal(item["input_ids"], other["reg"])
        assert torch.equal(item["labels"], other["labels"]["reg"])
    with pytest.raises(UsageError, match="no token column 'regs'"):
        TokenDataset(streams, 16, column="regs")
