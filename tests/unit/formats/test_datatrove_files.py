"""datatrove files: golden bytes, cutting, refusals."""

from __future__ import annotations

import re
import struct

import pytest

from making import ids_of, quick_build, rec, token_store, write_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.formats.datatrove import DatatroveExport, _readable
from tokmill.store.schema import Column
from tokmill.store.vocab import Vocabulary


def put(folder, ids, ends, metadata=None, kind="H", order="<"):
    (folder / "a.ds").write_bytes(struct.pack(f"<{len(ids)}{kind}", *ids))
    (folder / "a.ds.index").write_bytes(struct.pack(f"{order}{len(ends)}Q", *ends))
    if metadata is not None:
        (folder / "a.ds.metadata").write_text(metadata)
    return folder / "a.ds"


def test_the_files_byte_for_byte(tmp_path):
    store = token_store(tmp_path / "s", [[[1, 2, 0], []], [[500, 0]]])
    written = DatatroveExport(DatatroveExport.Config(tokenizer="gpt2")).write(store, tmp_path / "o")
    name = tmp_path / "o/tokens_00000_unshuffled.ds"
    assert name.read_bytes() == struct.pack("<5H", 1, 2, 0, 500, 0)
    assert name.with_name(name.name + ".index").read_bytes() == struct.pack("<3Q", 3, 3, 5)
    assert name.with_name(name.name + ".metadata").read_text() == "gpt2|2\n5\n5.00 T"
    assert written["documents"] == 3 and len(written["files"]) == 3
    with pytest.raises(UsageError, match="parts its metadata"):
        DatatroveExport(DatatroveExport.Config(tokenizer="a|b")).write(store, tmp_path / "o")


@pytest.mark.parametrize(("size", "kind"), [(65536, "H"), (65537, "I")])
def test_the_width_is_datatroves(tmp_path, size, kind):
    vocabulary = {"token": Vocabulary("tokenizer.json", "0" * 64, size, {})}
    schema = {"token": Column("u4", vocab="token")}
    store = write_store(tmp_path / "s", schema, [[rec([1, size - 1])]], vocabularies=vocabulary)
    DatatroveExport(DatatroveExport.Config()).write(store, tmp_path / "x.ds")
    assert (tmp_path / "x.ds").read_bytes() == struct.pack(f"<2{kind}", 1, size - 1)
    width = struct.calcsize("<" + kind)
    assert (tmp_path / "x.ds.metadata").read_text() == f"tokenizer.json|{width}\n2\n2.00 T"


def test_numbers_for_people():
    numbers = (0, 7, 12, 123, 1500, 123456, 9_035_582_198, 10**12)
    expected = "0.00 T,7.00 T,12.0 T,123 T,1.50 kT,123 kT,9.04 GT,1.00 TT"
    assert ",".join(map(_readable, numbers)) == expected


@pytest.mark.parametrize("kind", "HI")
@pytest.mark.parametrize("metadata", [True, False])
def test_the_width_is_known_with_and_without_metadata(tmp_path, kind, metadata):
    width = struct.calcsize("<" + kind)
    put(tmp_path, [1, 2, 3], [2, 2, 3], f"Unknown Tokenizer|{width}|{width}" * metadata, kind)
    if not metadata:
        (tmp_path / "a.ds.metadata").unlink()
    for number, argument in enumerate(("a.ds", "a.ds.index", "a", ".")):
        store = quick_build("datatrove", str(tmp_path / argument), tmp_path / f"s{number}")
        assert ids_of(store) == [[1, 2], [], [3]]
        assert store.schema["token"].dtype == ("u2" if kind == "H" else "u4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], [2, 4]), "promises 4 ids of 2 or 4 bytes, the file has 6 bytes"),
        (([1, 2, 3], [2, 3], "gpt2|4"), "promises 3 ids of 4 bytes, the file has 6"),
        (([1, 2, 3], [2, 3], "gpt2"), "does not end in |2 or |4"),
        (([1, 2, 3], [2, 3], "gpt2|2\n4\n4.00 T"), "says 4 tokens, the index has 3"),
        (([1, 2, 3], [2, 3], "gpt2|2\n3.0\n3.00 T"), "is no number of tokens: b'3.0'"),
        (([1, 2, 3], [2, 1, 3]), "do not follow one another"),
        (([1, 2, 3], [2, 3], None, "H", ">"), "big-endian"),
        (([1, 2, 3], []), "promises 0 ids"),
    ],
)
def test_refusals(tmp_path, arguments, message):
    put(tmp_path, *arguments)
    with pytest.raises(TokmillError) as caught:
        quick_build("datatrove", tmp_path / "a.ds", tmp_path / "s")
    assert re.search(message, str(caught.value)) and "a.ds" in str(caught.value)


def test_a_cut_or_missing_index(tmp_path):
    put(tmp_path, [1, 2, 3], [2, 3])
    index = tmp_path / "a.ds.index"
    index.write_bytes(index.read_bytes()[:-3])
    with pytest.raises(TokmillError, match="13 bytes are no whole number of uint64"):
        quick_build("datatrove", tmp_path / "a.ds", tmp_path / "s")
    index.unlink()
    with pytest.raises(TokmillError, match="its index a.ds.index is missing"):
        quick_build("datatrove", tmp_path / "a.ds", tmp_path / "s")
