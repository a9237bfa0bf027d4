"""Checkpoints of TensorFlow: what it wrote itself, and files that are damaged or lie."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from bundle_writer import block, entry, header, masked, table, varint, write_bundle
from tokmill.base.errors import MissingExtraError, TokmillError
from tokmill.training.runs.tensorflow import tensor_bundle
from tokmill.training.runs.tensorflow.tensor_bundle import TensorBundle, find_bundle, is_tensorflow

GOLDEN = Path(__file__).parents[2] / "golden" / "tensorflow"
ONE = np.arange(6, dtype=np.float32).reshape(2, 3)
CRC = masked(ONE.tobytes())


def refused(match: str, prefix: Path, name: str = "a") -> None:
    with pytest.raises(TokmillError, match=match) as caught:
        TensorBundle(prefix).read(name)
    assert caught.value.hint and caught.value.where


@pytest.mark.parametrize("prefix", ["bert/bert_model.ckpt", "two-shards/model.ckpt-1234"])
def test_variables_are_those_that_tensorflow_reads(prefix: str) -> None:
    bundle = TensorBundle(GOLDEN / prefix)
    assert bundle.shards == 1 + ("two" in prefix)
    assert len({one.shard for one in bundle.entries.values()}) == bundle.shards
    with np.load(GOLDEN / "bert/expected.npz") as expected:
        assert {n for n in bundle.entries if "/adam_" not in n} == set(expected.files)
        assert sum("/adam_" in name for name in bundle.entries) == 2 * (len(expected.files) - 1)
        for name in expected.files:
            found = bundle.read(name)
            assert found.dtype == expected[name].dtype
            np.testing.assert_array_equal(found, expected[name])
    for name in bundle.entries:
        assert bundle.read(name).shape == bundle.entries[name].shape


def test_every_dtype_equals_what_tensorflow_reads() -> None:
    bundle = TensorBundle(GOLDEN / "plain/plain")
    kinds = {"float32", "float16", "bfloat16", "int32", "int64"}
    assert {bundle.entries[kind].kind for kind in kinds} == kinds
    with np.load(GOLDEN / "plain/expected.npz") as expected:
        assert set(expected.files) == set(bundle.entries)
        for name in set(expected.files) - {"bool"}:
            found = bundle.read(name)
            assert found.tobytes() == expected[name].tobytes(), name
            assert (found.dtype, found.shape) == (expected[name].dtype, expected[name].shape)
    assert bundle.read("empty").shape == (0, 3) and bundle.read("no_axes").shape == ()
    with pytest.raises(TokmillError, match="'bool' is of dtype"):
        bundle.read("bool")
    with pytest.raises(TokmillError, match="no tensor 'flaot32'") as caught:
        bundle.read("flaot32")
    assert "'float32'" in caught.value.hint


def test_what_is_written_to_an_array_does_not_reach_the_file(tmp_path: Path) -> None:
    write_bundle(tmp_path / "m", {"a": ONE})
    TensorBundle(tmp_path / "m").read("a")[:] = 7
    np.testing.assert_array_equal(TensorBundle(tmp_path / "m").read("a"), ONE)


def test_an_index_of_many_blocks(tmp_path: Path) -> None:
    """TensorFlow begins a block every 256 KiB; here it is one every five entries."""
    tensors = {f"scope/{'x' * (n % 7)}{n:04}": ONE + n for n in range(203)}
    write_bundle(tmp_path / "m", tensors, each=5)
    bundle = TensorBundle(tmp_path / "m")
    assert set(bundle.entries) == set(tensors)
    assert all(np.array_equal(bundle.read(name), value) for name, value in tensors.items())


def test_a_partitioned_variable_is_refused() -> None:
    bundle = TensorBundle(GOLDEN / "partitioned/model.ckpt")
    with pytest.raises(TokmillError, match="word_embeddings' was saved in 3 parts"):
        bundle.read("bert/embeddings/word_embeddings")


def test_the_checkpoint_that_is_meant(tmp_path: Path) -> None:
    golden, prefix = GOLDEN / "bert", GOLDEN / "bert/bert_model.ckpt"
    for name in ("", "bert_model.ckpt", "bert_model.ckpt.index",
                 "bert_model.ckpt.data-00000-of-00001"):  # fmt: skip
        assert is_tensorflow(golden / name) and find_bundle(golden / name) == prefix
    for name in ("version-1", "version-1/model.ckpt"):
        with pytest.raises(TokmillError, match="no file") as caught:
            find_bundle(GOLDEN / name)
        assert "Saver" in caught.value.hint
    for name in ("a", "b"):
        write_bundle(tmp_path / name, {"a": ONE})
    with pytest.raises(TokmillError, match="2 checkpoints: a, b") as caught:
        find_bundle(tmp_path)
    assert find_bundle(Path(caught.value.hint.removeprefix("name one: "))) == tmp_path / "b"
    for name in ("c", ".index", "x" * 300):
        with pytest.raises(TokmillError):
            find_bundle(tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert not is_tensorflow(tmp_path)


@pytest.mark.parametrize(
    ("match", "extra"),
    [
        ("it lies in data shard 1 of 1", entry(1, (2, 3), 0, 24, CRC, shard=1)),
        ("ends at byte 124", entry(1, (2, 3), 100, 24, CRC)),
        ("overlaps another", entry(1, (2, 3), 4, 24, CRC)),
        ("has 24 bytes, and its shape and dtype 16", entry(1, (2, 2), 0, 24, CRC)),
        ("and its shape and dtype", entry(1, (1 << 31, 1 << 32), 0, 0, CRC)),
        ("shape or its place", entry(1, [1] * 33, 0, 4, CRC)),
        ("shape or its place", entry(1, ((1 << 64) - 1,), 0, 4, CRC)),
        ("shape or its place", entry(1, (2, 3), 1 << 63, 24, CRC)),
        ("is of dtype number 99", entry(99, (1,), 24, 0, 0)),
        ("no end", b"\x08\xff"),
        ("cut short", b"\x12\x7f"),
        ("unknown kind 3", b"\x0b"),
    ],
)
def test_entries_that_lie(match: str, extra: bytes, tmp_path: Path) -> None:
    write_bundle(tmp_path / "m", {"a": ONE}, extra={b"b": extra})
    refused(match, tmp_path / "m", "b")


@pytest.mark.parametrize(
    ("match", "head"),
    [
        ("big-endian", header(endian=1)),
        ("needs a reader", header(needs=2)),
        ("0 data shards", header(shards=0)),
        ("data shards are not possible", header(shards=1 << 40)),
    ],
)
def test_headers_that_are_not_read(match: str, head: bytes, tmp_path: Path) -> None:
    write_bundle(tmp_path / "m", {"a": ONE}, head=head)
    refused(match, tmp_path / "m")


def test_tables_that_are_not_read(tmp_path: Path) -> None:
    index = tmp_path / "m.index"
    for kind in (1, 2, 9):
        write_bundle(tmp_path / "m", {"a": ONE}, kind=kind)
        refused("is compressed", tmp_path / "m")
    index.write_bytes(table({b"a": entry(1, (), 0, 4, 0)}))
    refused("it has no header", tmp_path / "m")
    index.write_bytes(table({}))
    refused("it has no header", tmp_path / "m")
    index.write_bytes(table({b"": header(), b"b": b"", b"a": b""}))
    refused("the key b'a' is out of order", tmp_path / "m")
    index.write_bytes(table({b"": header(), b"\xff": b""}))
    refused(r"the tensor b'\\xff'", tmp_path / "m")


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes an entry may stand for a long name, and a block may be named again and again."""
    index = tmp_path / "m.index"
    index.write_bytes(table({b"": header(), b"x" * 5000: b""}))
    refused("a name of more than 4,096 bytes", tmp_path / "m")
    names = {b"": header(), **{b"x" * 3000 + b"%06d" % n: b"" for n in range(40)}}
    index.write_bytes(table(names))
    monkeypatch.setattr(tensor_bundle, "MOST_KEY_BYTES", 100_000)
    refused("names are longer than 100,000 bytes", tmp_path / "m")
    monkeypatch.setattr(tensor_bundle, "MOST_BYTES", 100)
    refused("an index has at most 100", tmp_path / "m")
    monkeypatch.undo()
    part = block([(b"", header())])
    data = part + b"\0" + masked(part + b"\0").to_bytes(4, "little")
    again = block([(b"a", varint(0) + varint(len(part))), (b"b", varint(0) + varint(len(part)))])
    place = varint(len(data)) + varint(len(again))
    data += again + b"\0" + masked(again + b"\0").to_bytes(4, "little")
    index.write_bytes(data + (place + place).ljust(40, b"\0") + tensor_bundle.MAGIC)
    refused("overlaps another", tmp_path / "m")


def test_without_the_package_for_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(MissingExtraError, match="google_crc32c") as caught:
        TensorBundle(GOLDEN / "bert/bert_model.ckpt")
    assert "tokmill[tensorflow]" in caught.value.hint


def test_names_are_no_paths(tmp_path: Path) -> None:
    """The data shards are found by the prefix that the user named, whatever the index says."""
    write_bundle(tmp_path / "m", {"../../etc/passwd": ONE})
    (tmp_path / "sub").mkdir()
    for path in tmp_path.glob("m.*"):
        shutil.move(path, tmp_path / "sub" / path.name)
    assert TensorBundle(tmp_path / "sub/m").read("../../etc/passwd").sum() == 15
