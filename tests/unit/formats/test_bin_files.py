"""Headerless files: golden bytes, cutting, refusals."""

import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import TOKENIZER, ids_of, quick_build, rec, token_store, write_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.source import Resources
from tokmill.formats.bin import BinExport, BinOptions, BinSource, wrong_layout
from tokmill.store.schema import Column


class NoHash:
    def update(self, data):
        pass


def read_all(path, block_bytes=1 << 20, **options):
    """(items, records, starts) of a file without a build."""
    source = BinSource(BinOptions(**options), [str(path)], {}, Resources(block_bytes=block_bytes))
    items = list(source.items())
    batches = [batch for item in items for batch in source.read(item, NoHash())]
    records = [
        batch.columns["token"][a:b].tolist()
        for batch in batches
        for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    return items, records, [s for batch in batches for s in batch.starts.tolist()]


def test_headerless_bytes_are_little_endian_ids_and_nothing_else(tmp_path):
    store = token_store(tmp_path / "s", [[[1, 258, 0]], [[65535]]])
    written = BinExport(BinExport.Config()).write(store, tmp_path / "t.bin")
    assert (tmp_path / "t.bin").read_bytes() == struct.pack("<4H", 1, 258, 0, 65535)
    assert written == {
        "files": [str(tmp_path / "t.bin")], "tokens": 4, "bytes": 8, "dtype": "uint16"
    }  # fmt: skip
    BinExport(BinExport.Config(dtype="u4")).write(store, tmp_path / "folder")
    data = (tmp_path / "folder/tokens.bin").read_bytes()
    assert data == struct.pack("<4I", 1, 258, 0, 65535)


def test_ids_that_do_not_fit_are_refused(tmp_path):
    store = write_store(tmp_path / "s", {"token": Column("u4")}, [[rec([1, 65536])]])
    BinExport(BinExport.Config()).write(store, tmp_path / "t.bin")
    assert np.fromfile(tmp_path / "t.bin", "<u4").tolist() == [1, 65536]
    with pytest.raises(TokmillError, match="the id 65536 does not fit into uint16"):
        BinExport(BinExport.Config(dtype="u2")).write(store, tmp_path / "u.bin")
    assert not (tmp_path / "u.bin").exists()


def header(magic=20240520):
    return struct.pack("<256i", magic, 1, 2, *[0] * 253)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (header() + bytes(4), {}, "a shard of llm.c.*tail -c"),
        (header(20240801) + bytes(8), {"dtype": "u4"}, "a shard of llm.c"),
        (struct.pack(">256i", 20240520, 1, 2, *[0] * 253) + bytes(4), {}, "a shard of llm.c"),
        (b"\1\0\2", {}, "3 bytes are not a whole number of 2-byte ids"),
        (b"\1\0\2\0\3\0", {"dtype": "u4"}, "6 bytes are not a whole number of 4-byte ids"),
        (np.arange(1, 99, dtype="<u4").tobytes(), {}, "look like uint32"),
        (np.arange(1, 9000, dtype="<u4").tobytes(), {"vocab_size": 9000}, "look like uint32"),
        (np.arange(1, 99, dtype="<i8").tobytes(), {}, "look like int64.*<i8.*--dtype u2"),
        (np.arange(1, 99999, dtype="<i8").tobytes(), {}, "look like int64"),
        (np.arange(1, 99, dtype="<i8").tobytes(), {"vocab_size": 99999}, "look like int64"),
        (
            np.repeat([5, 0, 0], 99).astype("<i8").tobytes(),
            {"vocab_size": 99999},
            "look like int64",
        ),
        (b"\x93NUMPY" + bytes(130), {"dtype": "u2"}, "an array of numpy"),
        (np.arange(1, 99, dtype=">u2").tobytes(), {}, "look like big-endian uint16"),
        (np.arange(1, 99, dtype=">u4").tobytes(), {}, "big-endian uint32"),
        (np.arange(1, 99, dtype=">u4").tobytes(), {"vocab_size": 99999}, "big-endian uint32"),
        (np.arange(1, 9, dtype=">u2").tobytes(), {"vocab_size": 300}, "byte 2.*big-endian"),
        (b"\1\0\2\0", {"vocab_size": 2}, "byte 2: the id 2 is none of 0 to 1"),
        (b"\1\0", {"separator_id": 1, "record_tokens": 1}, "two ways"),
        (b"\1\0", {"separator_id": 300, "vocab_size": 300}, "none of the 300 ids"),
        (b"\1\0", {"record_tokens": 0}, "record_tokens: expected"),
        (b"\1\0", {"vocab_size": 0}, "vocab_size: expected"),
        (b"\1\0", {"roles": {"eot": "x"}}, "but none was named"),
        (b"", {}, "no record"),
    ],
)
def test_refusals(tmp_path, data, options, message):
    (tmp_path / "t.bin").write_bytes(data)
    with pytest.raises(TokmillError) as caught:
        quick_build("bin", tmp_path / "t.bin", tmp_path / "s", **options)
    assert re.search(message, str(caught.value).replace("\n", " ")), str(caught.value)
    if not isinstance(caught.value, UsageError):
        assert "t.bin" in str(caught.value)


def test_real_ids_are_not_taken_for_something_else():
    random = np.random.default_rng(0)
    for size in (2, 40, 256, 300, 5000, 50257, 65536):
        zipf = np.minimum(random.zipf(1.2, 20000), size) - 1
        for ids in (zipf, random.integers(0, size, 20000)):
            assert wrong_layout(ids.astype("<u2")) == "", size
            assert wrong_layout(ids.astype("<u4")) == "", size
    for size in (300, 5000, 50257):
        ids = random.integers(0, size, 20000)
        assert "big-endian uint16" in wrong_layout(ids.astype(">u2").view("<u2")), size
        assert "uint32" in wrong_layout(ids.astype("<u4").view("<u2")), size
        assert "uint32" in wrong_layout(ids.astype(">u4").view("<u2")), size
        assert "big-endian uint32" in wrong_layout(ids.astype(">u4").view("<u4")), size
        for large in (1 << 21, (1 << 32) - 1):
            few = np.append(ids, [large, 7]).astype("<u4")
            assert "look like uint32" in wrong_layout(few.view("<u2")), size
        for share in (1000, 10):
            ids[::share] = -100
            assert "int64" in wrong_layout(ids.view("<u2")), size
            assert "int64" in wrong_layout(ids.view("<u4")), size
    ids = random.integers(0, 3_000_000, 20000)
    assert "look like uint32" in wrong_layout(ids.astype("<u4").view("<u2"))
    # Two codebooks in turns between separators, and printable characters between commas.
    books = [random.integers(0, 1024, 5000), random.integers(1024, 2048, 5000)]
    assert wrong_layout(np.array([2048, *np.stack(books[::-1], 1).ravel(), 2048], "<u2")) == ""
    assert wrong_layout(np.array([2048, *np.stack(books, 1).ravel(), 2048], "<u2")) == ""
    pairs = np.stack([random.integers(16, 95, 5000), np.full(5000, 12)], 1)
    assert wrong_layout(pairs.ravel().astype("<u2")) == ""


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("ids", [[7, 9], [290, 7], [7, 290, 5, 291]])
def test_few_ids_before_many_zeros_are_no_int64(tmp_path, dtype, ids):
    """A separator that is repeated, or padding: the upper halves of 8-byte numbers say nothing."""
    for zeros in (5000, 5002):
        np.asarray([*ids, *[0] * zeros], dtype).tofile(tmp_path / "t.bin")
        options = {"vocab_size": 300 if dtype == "<u2" else 99999, "separator_id": 0}
        store = quick_build("bin", tmp_path / "t.bin", tmp_path / f"s{zeros}", **options)
        assert store.tokens == len(ids) + zeros


def test_separators_end_records_and_the_eot_of_the_tokenizer_is_one(tmp_path):
    np.asarray([5, 0, 0, 6, 7, 0, 8], "<u2").tofile(tmp_path / "t.bin")
    by_id = quick_build("bin", tmp_path / "t.bin", tmp_path / "a", separator_id=0)
    assert ids_of(by_id) == [[5, 0], [0], [6, 7, 0], [8]]
    by_role = quick_build("bin", tmp_path / "t.bin", tmp_path / "b", tokenizer=TOKENIZER)
    assert ids_of(by_role) == ids_of(by_id)
    by_number = quick_build(
        "bin", tmp_path / "t.bin", tmp_path / "c", tokenizer=TOKENIZER, record_tokens=3
    )
    assert ids_of(by_number) == [[5, 0, 0], [6, 7, 0], [8]]
    whole = quick_build("bin", tmp_path / "t.bin", tmp_path / "d")
    assert ids_of(whole) == [[5, 0, 0, 6, 7, 0, 8]]


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 3), max_size=80),
    item=st.integers(1, 20),
    block=st.integers(1, 40),
    wide=st.booleans(),
)
def test_items_tile_the_file_whatever_their_size(tmp_path_factory, ids, item, block, wide):
    path = tmp_path_factory.mktemp("f") / "t.bin"
    data = np.asarray(ids, "<u4" if wide else "<u2").tobytes()
    path.write_bytes(data)
    documents, open_ = [], []
    for i in ids:
        open_.append(i)
        if i == 0:
            documents.append(open_)
            open_ = []
    documents += [open_] if open_ else []
    size = 4 if wide else 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokmill.formats.bin.MAX_ITEM", item * 4)
        patch.setattr("tokmill.formats.bin.SEARCH", 3)
        dtype = "u4" if wide else "u2"
        items, records, starts = read_all(path, block * size, dtype=dtype, separator_id=0)
        assert records == documents
        places = np.cumsum([0, *map(len, documents)])[:-1] * size
        assert starts == places.tolist()
        assert items[0].start == 0 and items[-1].stop == len(data)
        _, records, _ = read_all(path, block * size, dtype=dtype, record_tokens=7)
        assert records == [ids[i : i + 7] for i in range(0, len(ids), 7)]


def test_a_document_that_two_files_share_is_refused(tmp_path):
    """Not of files that no number joins, nor where records are cut by number."""
    for name, ids in (("c_9", [5, 0, 6]), ("c_10", [7, 0]), ("d", [8])):
        np.asarray(ids, "<u2").tofile(tmp_path / f"{name}.bin")
    with pytest.raises(TokmillError, match=r"c_9.bin, byte 4: .*may go on in c_10.bin"):
        quick_build("bin", tmp_path, tmp_path / "s", separator_id=0)
    cut = quick_build("bin", tmp_path, tmp_path / "n", record_tokens=2)
    assert ids_of(cut) == [[5, 0], [6], [7, 0], [8]]
    np.asarray([5, 0], "<u2").tofile(tmp_path / "c_9.bin")
    whole = quick_build("bin", tmp_path, tmp_path / "w", separator_id=0)
    assert ids_of(whole) == [[5, 0], [7, 0], [8]]


def test_a_file_without_its_separator_is_refused_beyond_64_mib(tmp_path, monkeypatch):
    monkeypatch.setattr("tokmill.formats.bin.MAX_ITEM", 40)
    monkeypatch.setattr("tokmill.formats.bin.MAX_RECORD", 80)
    np.arange(1, 100, dtype="<u2").tofile(tmp_path / "t.bin")
    with pytest.raises(TokmillError, match="byte 38: no document ends within 64 MiB"):
        quick_build("bin", tmp_path / "t.bin", tmp_path / "s", separator_id=0)


def test_a_megatron_pair_is_not_read_as_a_headerless_file_by_mistake(tmp_path):
    np.asarray([5, 6], "<u2").tofile(tmp_path / "t.bin")
    (tmp_path / "t.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(TokmillError, match="Megatron"):
        quick_build("bin", tmp_path / "t.bin", tmp_path / "s")
    assert ids_of(quick_build("bin", tmp_path / "t.bin", tmp_path / "s", dtype="u2")) == [[5, 6]]
