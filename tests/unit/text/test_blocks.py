"""Blocks: the records of all items are those of a plain split, however the file is cut."""

import bz2
import gzip
import hashlib
import lzma
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokmill.base import inflate
from tokmill.base.errors import TokmillError
from tokmill.builds.source import Item
from tokmill.text import record_blocks as blocks
from tokmill.text.record_blocks import Block, line_starts, record_blocks

# Few letters, so that delimiters and what looks like one come often; the last ones are usual.
LETTERS = st.lists(st.sampled_from(list(b"ab\n")), max_size=60).map(bytes)
DELIMITERS = st.one_of(
    st.lists(st.sampled_from(list(b"ab\n")), min_size=1, max_size=4).map(bytes),
    st.sampled_from([b"\n", b"\n\n", b"<|endoftext|>", b"aba"]),
)
PLACES = st.integers(1, 30)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


PACK = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


@given(LETTERS)
def test_lines_begin_after_newlines(data: bytes) -> None:
    lines = data.splitlines(keepends=True)
    assert line_starts(data).tolist() == [sum(map(len, lines[:i])) for i in range(len(lines) or 1)]


def test_the_first_bytes_tell_the_compression() -> None:
    for suffix, pack in PACK.items():
        assert inflate.packing(pack(b"text")[:16]) == inflate.packing(pack(b"")[:16]) == suffix
    assert inflate.packing(b"BZh9 is text") == inflate.packing(b"") == ""


def plain_split(content: bytes, delimiter: bytes, limit: int) -> tuple[list[Any], list[int]]:
    """The slow twin: ((start, record) of all short records, starts of the over-long ones)."""
    kept, lost, place = [], [], 0
    pieces = content.split(delimiter)
    for i, piece in enumerate(pieces):
        if i < len(pieces) - 1 or piece:
            if len(piece) > limit:
                lost.append(place)
            else:
                kept.append((place, piece))
        place += len(piece) + len(delimiter)
    return kept, lost


def records_of(found: list[Block], delimiter: bytes) -> list[tuple[int, bytes]]:
    records = []
    for block in found:
        pieces = block.data.split(delimiter)
        place = block.start
        for i, piece in enumerate(pieces):
            if i < len(pieces) - 1 or piece:
                records.append((place, piece))
            place += len(piece) + len(delimiter)
    return records


def small(patch: pytest.MonkeyPatch, limit: int, step: int) -> None:
    patch.setattr(blocks, "MAX_RECORD", limit)
    patch.setattr(blocks, "READ", step)
    patch.setattr(blocks, "PEEK", step + 1)


@settings(max_examples=250, deadline=None)
@given(LETTERS, DELIMITERS, st.lists(st.integers(0, 60)), PLACES, PLACES, st.integers(1, 40))
@example(b"a\n\n\nb\n\n\n\nc", b"\n\n", [3, 4, 8], 1, 1, 40)
@example(b"a" * 20 + b"\n" + b"b" * 3, b"\n", [5, 21], 4, 3, 6)
def test_records_of_all_items_are_those_of_a_plain_split(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    delimiter: bytes,
    places: list[int],
    block_bytes: int,
    step: int,
    limit: int,
) -> None:
    content = content.replace(b"aab", delimiter)
    path = tmp_path_factory.getbasetemp() / "blocks.txt"
    path.write_bytes(content)
    # Items that are shorter than a record may be, as 64 MiB and 64 MiB in earnest.
    edges = [0, *sorted({p for p in places if 0 < p < len(content)}), len(content)]
    found: list[Block] = []
    digests = b""
    with pytest.MonkeyPatch.context() as patch:
        small(patch, limit, step)
        for start, stop in zip(edges, edges[1:], strict=False):
            digest = hashlib.sha256()
            item = Item("x", str(path), start, stop, "")
            found += record_blocks(item, delimiter, digest, block_bytes)
            digests += digest.digest()
    wanted, lost = plain_split(content, delimiter, limit)
    assert records_of(found, delimiter) == wanted
    assert [place for block in found for place in block.too_long] == lost
    assert not any(block.ends_part for block in found)
    if len(edges) == 2:
        assert digests == hashlib.sha256(content).digest()


class Parts:
    """Hashes as a build does: what was read since the last part ended."""

    def __init__(self) -> None:
        self.data = b""

    def update(self, data: bytes) -> None:
        self.data += data


def read_parts(
    item: Item, delimiter: bytes, block_bytes: int
) -> list[tuple[list[Any], Any, bytes]]:
    """(records, over-long ones, content) of each part."""
    digest, parts, current = Parts(), [], []
    for block in record_blocks(item, delimiter, digest, block_bytes):
        current.append(block)
        if block.ends_part:
            lost = [place for one in current for place in one.too_long]
            parts.append((records_of(current, delimiter), lost, digest.data))
            digest.data, current = b"", []
    lost = [place for one in current for place in one.too_long]
    return [*parts, (records_of(current, delimiter), lost, digest.data)]


@settings(max_examples=120, deadline=None)
@given(LETTERS, DELIMITERS, PLACES, PLACES, st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_parts_of_a_stream(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    delimiter: bytes,
    block_bytes: int,
    other_block: int,
    limit: int,
    part_bytes: int,
    gz: bool,
) -> None:
    """A part ends at the first record after its share; going on after n parts gives the others."""
    content = content.replace(b"aab", delimiter)
    path = tmp_path_factory.getbasetemp() / ("blocks.gz" if gz else "blocks.zst")
    path.write_bytes(gzip.compress(content) if gz else zstandard.compress(content))
    item = Item("x", str(path), 0, path.stat().st_size, "")
    with pytest.MonkeyPatch.context() as patch:
        small(patch, limit, 7)
        patch.setattr(blocks, "MAX_ITEM", part_bytes)
        patch.setattr(inflate, "OUTPUT", 5)
        parts = read_parts(item, delimiter, block_bytes)
        assert read_parts(item, delimiter, other_block) == parts
        for done in range(len(parts)):
            rest = Item("x", str(path), 0, item.stop, "", parts_done=done)
            assert read_parts(rest, delimiter, block_bytes) == parts[done:]
    wanted, lost = plain_split(content, delimiter, limit)
    assert [record for records, _, _ in parts for record in records] == wanted
    assert [place for _, places, _ in parts for place in places] == lost
    assert b"".join(data for _, _, data in parts) == content
    for _, _, data in parts[:-1]:
        assert len(data) > part_bytes
        assert data.endswith(delimiter)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize(
    "contents",
    [
        [b"a\nbb\n", b"ccc\n"],
        [b"a\nb", b"b\nccc"],
        [b"a", b"", b"b", b"\n\nc"],
        [b"a\n", b"b\n", b""],
        [b"", b""],
    ],
)
def test_several_members_are_one_text(tmp_path: Path, suffix: str, contents: list[bytes]) -> None:
    data = b"".join(PACK[suffix](content) for content in contents)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data)
    wanted = [record for _, record in plain_split(b"".join(contents), b"\n", 100)[0]]
    found = list(record_blocks(Item("x", str(path), 0, len(data), ""), b"\n", Parts(), 100))
    assert [record for _, record in records_of(found, b"\n")] == wanted


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_cut_off_stream_is_refused(tmp_path: Path, suffix: str, keep: float) -> None:
    import random

    content = random.Random(0).randbytes(200_000)
    data = PACK[suffix](content)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(TokmillError, match="damaged or cut off") as caught:
        list(record_blocks(Item("x", str(path), 0, path.stat().st_size, ""), b"\n", Parts(), 100))
    assert caught.value.where == str(path)


@pytest.mark.parametrize("suffix", PACK)
def test_a_damaged_stream_is_refused(tmp_path: Path, suffix: str) -> None:
    data = bytearray(PACK[suffix](b"abc\n" * 10_000))
    if suffix == ".zst":
        data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(b"abc\n" * 10_000))
    data[len(data) // 2 + (suffix == ".bz2")] ^= 0xFF  # byte 26 of this .bz2 means nothing
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data)
    with pytest.raises(TokmillError, match="damaged or cut off"):
        list(record_blocks(Item("x", str(path), 0, len(data), ""), b"\n", Parts(), 100))


def test_skippable_frames_and_padding_are_passed_over(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    frames = [zstandard.compress(b"one\n"), zstandard.compress(b"two\n")]
    (tmp_path / "x.zst").write_bytes(skippable + frames[0] + skippable + frames[1])
    padded = (".gz", ".xz", ".bz2")
    for suffix in padded:
        pack, path = PACK[suffix], tmp_path / f"x{suffix}"
        path.write_bytes(pack(b"one\n") + b"\0" * 8 + pack(b"two\n") + b"\0" * 8)
    for path in (tmp_path / f"x{suffix}" for suffix in (".zst", *padded)):
        assert b"".join(inflate.inflate(str(path))) == b"one\ntwo\n"
