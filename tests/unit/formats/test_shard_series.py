"""Shards of one corpus that cut documents: each is one record, beside a slow twin."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import files_of, here, ids_of, quick_build, token_store
from tokmill.base.errors import TokmillError
from tokmill.builds.plan import How
from tokmill.builds.source import Resources
from tokmill.formats.bin import BinOptions, BinSource, LlmcExport

EOT = 0


class Read:
    def __init__(self):
        self.data = b""

    def update(self, data):
        self.data += bytes(data)


def header(count):
    return struct.pack("<256i", 20240520, 1, count, *[0] * 253)


def save(folder: Path, number, ids, *, name="c_train_", llmc=True):
    folder.mkdir(exist_ok=True)
    data = np.asarray(ids, "<u2").tobytes()
    path = folder / f"{name}{number}.bin"
    path.write_bytes((header(len(ids)) if llmc else b"") + data)
    return path


def documents(ids):
    """The twin: a document ends behind each EOT, the last one with the ids."""
    found, open_ = [], []
    for i in ids:
        open_.append(i)
        if i == EOT:
            found.append(open_)
            open_ = []
    return found + ([open_] if open_ else [])


def read_all(folder, block_bytes=1 << 20):
    def make():
        options = BinOptions(separator_id=EOT, dtype="auto", vocab_size=9)
        return BinSource(options, [str(folder)], {}, Resources(block_bytes=block_bytes))

    records, contents = [], {}
    for item in list(make().items()):
        # Each item from a source of its own: none knows of another.
        read = Read()
        for batch in make().read(item, read):
            for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
                records.append(batch.columns["token"][a:b].tolist())
        contents[item.name, item.start] = read.data
    return records, contents


@settings(max_examples=80, deadline=None)
@given(
    shards=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=14),
    item=st.integers(1, 9),
    block=st.integers(1, 20),
    llmc=st.booleans(),
)
def test_files_are_one_stream_whatever_their_sizes(tmp_path_factory, shards, item, block, llmc):
    folder = tmp_path_factory.mktemp("f")
    for number, ids in enumerate(shards):
        save(folder, number, ids, llmc=llmc)  # 10 after 9, which is no order of letters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokmill.formats.bin.MAX_ITEM", item * 2)
        patch.setattr("tokmill.formats.bin_files.SEARCH", 3)
        records, contents = read_all(folder, block * 2)
        assert records == documents([i for ids in shards for i in ids])
        assert read_all(folder, 1 << 20)[1] == contents


def test_files_that_do_not_follow_one_another_are_apart(tmp_path):
    save(tmp_path / "s", "000", [1, 2])
    save(tmp_path / "s", "002", [3])  # 001 is missing
    save(tmp_path / "s", "003", [4], llmc=False)  # headerless
    save(tmp_path / "s", "004", [5], name="c_val_")
    save(tmp_path / "s", "x", [6])
    (tmp_path / "s" / "d").mkdir()
    save(tmp_path / "s" / "d", "001", [7])
    store = quick_build("bin", tmp_path / "s", tmp_path / "o", separator_id=0, vocab_size=9)
    assert sorted(ids_of(store)) == [[1, 2], [3], [4], [5], [6], [7]]


def test_800_documents_are_800_records(tmp_path):
    random = np.random.default_rng(0)
    rows = [[*random.integers(1, 999, random.integers(1, 90)), EOT] for _ in range(800)]
    rows = [[int(i) for i in row] for row in rows]
    store = token_store(tmp_path / "s", [rows[:500], rows[500:]])
    half = store.tokens // 2 + 7
    while store.offsets().tolist().count(half):
        half += 1
    LlmcExport(LlmcExport.Config(shard_tokens=half)).write(store, tmp_path / "o")
    assert len(list((tmp_path / "o").glob("*.bin"))) == 2
    again = quick_build("bin", tmp_path / "o", tmp_path / "again", separator_id=EOT)
    assert ids_of(again) == rows


def test_a_named_shard_alone_is_read_as_it_is(tmp_path):
    save(tmp_path / "s", 0, [1, 2])
    path = save(tmp_path / "s", 1, [3, 0, 4])
    save(tmp_path / "s", 2, [5])
    store = quick_build("bin", path, tmp_path / "o", separator_id=0)
    assert ids_of(store) == [[3, 0], [4]]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_no_byte(tmp_path, workers, monkeypatch):
    random = np.random.default_rng(1)
    for number in range(12):
        save(tmp_path / "s", number, random.integers(0, 40, 5000))
    stores = [
        quick_build(
            "bin", tmp_path / "s", tmp_path / f"o{w}", separator_id=0, vocab_size=40,
            how=How(quiet=True, amount=here(workers=w)),
        )
        for w in (0, workers)
    ]  # fmt: skip
    assert files_of(stores[0].path) == files_of(stores[1].path)
    ids = np.concatenate([np.fromfile(tmp_path / f"s/c_train_{n}.bin", "<u2")[512:] for n in
                          range(12)])  # fmt: skip
    assert ids_of(stores[0]) == documents(ids.tolist())


def test_a_shard_more_completes_the_last_document(tmp_path):
    save(tmp_path / "s", 0, [1, 0, 2])
    options = {"separator_id": 0, "vocab_size": 99}
    quick_build("bin", tmp_path / "s", tmp_path / "o", **options)
    save(tmp_path / "s", 1, [3, 0, 4])
    with pytest.raises(TokmillError, match=r"changed: c_train_0\.bin"):
        quick_build("bin", tmp_path / "s", tmp_path / "o", **options)
    yes = How(quiet=True, amount=here(), yes=True)
    store = quick_build("bin", tmp_path / "s", tmp_path / "o", how=yes, **options)
    assert ids_of(store) == [[1, 0], [2, 3, 0], [4]]
    # What stands behind the first EOT of the next file is no matter of this one.
    save(tmp_path / "s", 1, [3, 0, 4, 5])
    with pytest.raises(TokmillError) as caught:
        quick_build("bin", tmp_path / "s", tmp_path / "o", **options)
    assert "c_train_1.bin" in str(caught.value) and "c_train_0.bin" not in str(caught.value)
    # A head of equal size is told too.
    save(tmp_path / "s", 1, [6, 0, 4])
    store = quick_build("bin", tmp_path / "s", tmp_path / "o", how=yes, **options)
    assert ids_of(store) == [[1, 0], [2, 6, 0], [4]]


def test_a_shard_that_changes_after_the_plan_is_refused(tmp_path):
    save(tmp_path / "s", 0, [1, 0, 2])
    save(tmp_path / "s", 1, [3, 0, 4])
    source = BinSource(BinOptions(separator_id=0), [str(tmp_path / "s")], {}, Resources())
    item = next(iter(source.items()))
    save(tmp_path / "s", 1, [5, 0, 4])
    with pytest.raises(TokmillError, match="or one that continues it, has changed"):
        list(source.read(item, Read()))


def test_an_id_out_of_range_is_named_where_it_stands(tmp_path):
    save(tmp_path / "s", 0, [1, 2])
    save(tmp_path / "s", 1, [3, 9, 0])
    with pytest.raises(TokmillError, match=r"c_train_1\.bin, byte 1026: the id 9"):
        quick_build("bin", tmp_path / "s", tmp_path / "o", separator_id=0, vocab_size=9)


def test_no_document_runs_on_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("tokmill.formats.bin_files.MAX_RECORD", 16)
    for number in range(4):
        save(tmp_path / "s", number, [1, 2, 3])
    with pytest.raises(TokmillError, match="no document ends within 64 MiB"):
        quick_build("bin", tmp_path / "s", tmp_path / "o", separator_id=0)
