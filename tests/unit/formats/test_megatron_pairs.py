"""Megatron pairs: golden bytes, cutting at documents, refusals."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import files_of, here, ids_of, quick_build, rec, token_store, write_store
from tokmill.base.errors import TokmillError
from tokmill.builds.plan import How
from tokmill.builds.source import Resources
from tokmill.formats.megatron import MegatronExport, MegatronOptions, MegatronSource
from tokmill.store.schema import Column
from tokmill.store.vocab import Vocabulary

CODES = {8: "H", 4: "i", 5: "q", 1: "B", 2: "b", 3: "h"}


def golden(docs, code=8, sequences=None, **changes):
    """The two files, by hand; `sequences` cuts the documents further, `changes` are damage."""
    sequences = sequences or [[d] for d in docs or []]
    flat = [s for document in sequences for s in document]
    size = struct.calcsize("<" + CODES[code])
    lengths = [len(s) for s in flat]
    pointers = [size * sum(lengths[:i]) for i in range(len(flat))]
    starts = [sum(len(d) for d in sequences[:i]) for i in range(len(sequences) + 1)]
    values = {
        "magic": b"MMIDIDX\0\0", "version": 1, "code": code, "lengths": lengths,
        "pointers": pointers, "documents": starts, "count": len(flat), **changes,
    }  # fmt: skip
    index = values["magic"] + struct.pack(
        "<QBQQ", values["version"], values["code"], values["count"], len(values["documents"])
    )
    for kind, name in (("i", "lengths"), ("q", "pointers"), ("q", "documents")):
        index += struct.pack(f"<{len(values[name])}{kind}", *values[name])
    data = b"".join(struct.pack(f"<{len(s)}{CODES[code]}", *s) for s in flat)
    return data, index


def put(folder, data, index, name="set"):
    (folder / f"{name}.bin").write_bytes(data)
    (folder / f"{name}.idx").write_bytes(index)
    return folder / name


def test_the_pair_byte_for_byte(tmp_path):
    store = token_store(tmp_path / "s", [[[1, 2, 0], []], [[65000, 0]]])
    prefix = tmp_path / "out" / "my.set"
    written = MegatronExport(MegatronExport.Config()).write(store, prefix)
    data, index = golden([[1, 2, 0], [], [65000, 0]])
    assert (tmp_path / "out/my.set.bin").read_bytes() == data
    assert (tmp_path / "out/my.set.idx").read_bytes() == index
    assert len(index) == 34 + 8 + 20 * 3
    assert written["dtype"] == "uint16" and written["documents"] == 3
    MegatronExport(MegatronExport.Config()).write(store, tmp_path / "out/my.set.bin")
    MegatronExport(MegatronExport.Config()).write(store, tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out").iterdir() if p.name[0] != ".")
    assert names == ["my.set.bin", "my.set.idx", "tokens.bin", "tokens.idx"]


@pytest.mark.parametrize(("size", "code"), [(65499, 8), (65500, 4), (100000, 4)])
def test_the_dtype_is_megatrons(tmp_path, size, code):
    vocabulary = {"token": Vocabulary("token.json", "0" * 64, size, {})}
    schema = {"token": Column("u4", vocab="token")}
    store = write_store(tmp_path / "s", schema, [[rec([1, size - 1])]], vocabularies=vocabulary)
    MegatronExport(MegatronExport.Config()).write(store, tmp_path / "p")
    data, index = golden([[1, size - 1]], code)
    assert (tmp_path / "p.bin").read_bytes() == data
    assert (tmp_path / "p.idx").read_bytes() == index


@pytest.mark.parametrize("argument", ["set", "set.bin", "set.idx", "."])
def test_pairs_are_named_by_prefix_either_file_or_folder(tmp_path, argument):
    (tmp_path / "d").mkdir()
    put(tmp_path / "d", *golden([[1, 2], [3]]))
    store = quick_build("megatron", str(tmp_path / "d" / argument), tmp_path / "s")
    assert ids_of(store) == [[1, 2], [3]]


def test_both_files_of_a_pair_may_be_named(tmp_path):
    put(tmp_path, *golden([[1, 2], [3]]))
    store = quick_build("megatron", [tmp_path / "set.bin", tmp_path / "set.idx"], tmp_path / "s")
    assert ids_of(store) == [[1, 2], [3]]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "u1"), (3, "u2"), (4, "u4"), (5, "u4")])
def test_all_integer_codes_are_read(tmp_path, code, dtype):
    put(tmp_path, *golden([[1, 2], [127]], code))
    store = quick_build("megatron", tmp_path / "set", tmp_path / "s")
    assert ids_of(store) == [[1, 2], [127]] and store.schema["token"].dtype == dtype


def test_sequences_or_documents(tmp_path):
    pair = golden(None, sequences=[[[1], [2, 3]], [], [[4], []], [[5]]])
    put(tmp_path, *pair)
    by_document = quick_build("megatron", tmp_path / "set", tmp_path / "d")
    assert ids_of(by_document) == [[1, 2, 3], [], [4], [5]]
    by_sequence = quick_build("megatron", tmp_path / "set", tmp_path / "s", unit="sequence")
    assert ids_of(by_sequence) == [[1], [2, 3], [4], [], [5]]


documents = st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=30)


@settings(max_examples=60, deadline=None)
@given(documents=documents, item=st.integers(1, 12), block=st.integers(1, 30), wide=st.booleans())
def test_items_tile_the_file_at_documents(tmp_path_factory, documents, item, block, wide):
    folder = tmp_path_factory.mktemp("f")
    put(folder, *golden(documents, 4 if wide else 8))
    size = 4 if wide else 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokmill.formats.megatron.MAX_ITEM", item * size)
        patch.setattr("tokmill.formats.megatron.DOCUMENTS", 4)
        patch.setattr("tokmill.formats.megatron.CHECKED", 3)
        source = MegatronSource(
            MegatronOptions(), [str(folder)], {}, Resources(block_bytes=block * size)
        )
        items = list(source.items())
        found, starts = [], []
        for part in items:
            for batch in source.read(part, type("H", (), {"update": lambda self, data: None})()):
                offsets = batch.offsets.tolist()
                for a, b in zip(offsets, offsets[1:], strict=False):
                    found.append(batch.columns["token"][a:b].tolist())
                starts += batch.starts.tolist()
    assert found == documents
    assert starts == (np.cumsum([0, *map(len, documents)])[:-1] * size).tolist()
    assert all(a.stop == b.start for a, b in zip(items, items[1:], strict=False))
    # One document may be longer than an item; otherwise items keep the limit.
    longest = max(map(len, documents), default=0)
    assert all(part.size <= max(item, longest) * size for part in items)


def test_workers_share_a_file_and_the_store_is_the_same(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    put(tmp_path, *golden([random.integers(0, 999, n).tolist() for n in range(60)]))
    monkeypatch.setattr("tokmill.formats.megatron.MAX_ITEM", 300)
    monkeypatch.setattr("tokmill.builds.plan.SHARD_BYTES", 600)
    one = quick_build("megatron", tmp_path / "set", tmp_path / "a")
    assert len(one.shards) > 2
    whole = [d.tolist() for d in (r["token"] for r in one)]
    assert [len(d) for d in whole] == list(range(60))
    monkeypatch.setattr("tokmill.formats.megatron.DOCUMENTS", 7)
    two = quick_build("megatron", tmp_path / "set", tmp_path / "b")
    assert files_of(one.path) == files_of(two.path)


def test_workers_in_other_processes(tmp_path, monkeypatch):
    put(tmp_path, *golden([[i, i + 1] for i in range(50)]))
    monkeypatch.chdir(tmp_path)
    how = How(quiet=True, amount=here(workers=2))
    one = quick_build("megatron", "set", tmp_path / "a", how=how)
    assert files_of(one.path) == files_of(quick_build("megatron", "set", tmp_path / "b").path)


def test_a_changed_index_makes_a_new_plan(tmp_path):
    data, index = golden([[1, 2], [3]])
    put(tmp_path, data, index)
    one = quick_build("megatron", tmp_path / "set", tmp_path / "a")
    put(tmp_path, *golden([[1], [2, 3]]))
    with pytest.raises(TokmillError, match="inputs have changed"):
        quick_build("megatron", tmp_path / "set", tmp_path / "a")
    two = quick_build("megatron", tmp_path / "set", tmp_path / "b")
    assert ids_of(two) == [[1], [2, 3]] and one.fingerprint != two.fingerprint


def test_an_index_that_changes_after_the_plan_is_noticed(tmp_path):
    data, index = golden([[1, 2], [3]])
    put(tmp_path, data, index)
    source = MegatronSource(MegatronOptions(), [str(tmp_path)], {}, Resources())
    items = list(source.items())
    put(tmp_path, *golden([[1], [2, 3]]))
    with pytest.raises(TokmillError, match="has changed since the build was planned"):
        list(source.read(items[0], None))


D = [[1, 2], [3]]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (golden(D, magic=b"TNTIDX\0\0\0"), "index of the old kind"),
        (golden(D, magic=b"something"), "this is no Megatron index"),
        (golden(D, version=1 << 56), "version 72057594037927936.*big-endian"),
        (golden(D, version=2), "version 2"),
        ((golden(D)[0], golden(D)[1][:17] + b"\7" + golden(D)[1][18:]), "code 7 .float32."),
        ((golden(D)[0], golden(D)[1][:20]), "is 20 bytes long, its header 34"),
        ((golden(D)[0], golden(D)[1][:-1]), "take 82 bytes, it has 81"),
        ((golden(D)[0], golden(D)[1] + b"\0\0"), "multimodal"),
        (golden(D, count=1 << 60), "damaged"),
        ((golden(D)[0][:-1], golden(D)[1]), "set.bin: the index promises 6 bytes of uint16, .* 5"),
        (golden(D, lengths=[1, 1]), "sequence 1 does not begin where"),
        (golden(D, lengths=[-2, 1]), "sequence 0 does not begin|sequence 1 does not begin"),
        (golden(D, pointers=[2, 4]), "sequence 0 does not begin"),
        (golden(D, documents=[0, 2, 1]), "out of order"),
        (golden(D, documents=[0, 1, 1]), "cover the sequences 0 to 1 of 2"),
        (golden(D, documents=[1, 1, 2]), "cover the sequences 1 to 2 of 2"),
        (golden(D, documents=[]), "0 document indices, of at least 1"),
        (golden([[1, -2]], 4), "byte 4: the id -2 is none of"),
        (golden([[1, 1 << 33]], 5), "byte 8: the id 8589934592 is none of 0 to 4294967295"),
        (golden([]), "not one record|nothing"),
    ],
)
def test_refusals(tmp_path, pair, message):
    put(tmp_path, *pair)
    with pytest.raises(TokmillError) as caught:
        quick_build("megatron", tmp_path / "set", tmp_path / "s")
    import re

    text = str(caught.value).replace("\n", " ")
    assert re.search(message, text), text
    assert "set" in text


def test_missing_files(tmp_path):
    (tmp_path / "set.bin").write_bytes(b"\1\0")
    with pytest.raises(TokmillError, match="its index set.idx is missing"):
        quick_build("megatron", tmp_path / "set", tmp_path / "s")
    with pytest.raises(TokmillError, match="no such file"):
        quick_build("megatron", tmp_path / "other", tmp_path / "s")
