"""Basic block vectors as text: every producer's way of writing, and what is refused."""

import gzip
import lzma
import os
import re
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from block_rows import from_rows
from tokmill.base.errors import TokmillError
from tokmill.bbv.traces import read as reader
from tokmill.bbv.traces.block_vectors import BlockVectors, write
from tokmill.bbv.traces.read import pieces, read

ENTRY = re.compile(r":(\d+):(\d+)")


def slow(text: bytes) -> list[list[tuple[int, int]]]:
    """The readable twin: line by line, with a regular expression."""
    rows = []
    for line in text.decode("latin-1").split("\n"):
        stripped = line.strip(" \t\r\f\v")
        if re.match(r"T([\s:]|$)", stripped):
            rows.append([(int(i), int(c)) for i, c in ENTRY.findall(stripped)])
    return rows


def rows_of(vectors: BlockVectors) -> list[list[tuple[int, int]]]:
    pairs = list(zip(vectors.ids.tolist(), vectors.counts.tolist(), strict=True))
    edges = vectors.indptr.tolist()
    return [pairs[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def file_of(folder: Path, text: bytes | str, name: str = "a.bb") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


PRODUCERS = {
    # SimPoint 3.2's example, valgrind 3.19, QEMU's plugin, gem5, BbTracker
    "simpoint": "T:1:20 :2:5\nT:2:25\n",
    "valgrind": "T:2218:4   :2219:2   \nT:1:7   \n\n\n# Thread 1\n#   Total intervals: 2 "
                 "(Interval Size 6)\n#   Total instructions: 13\n#   Total reps: 3\n",
    "qemu": "T:3:4 :0:9 \nT:0:1 \n",
    "gem5": "T:1:10 :9:1 \nT:1:8 \n",
    "windows": "T:1:10 :9:1\r\nT:1:8\r\n",
    "odd": "\t T \t :1:10 \t :9:1\n  \nTotal: 3:4\nT:1:8",
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCERS)
@pytest.mark.parametrize("packing", ["", "gz", "xz", "zst"])
def test_every_producer_is_read(name: str, packing: str, tmp_path: Path) -> None:
    text = PRODUCERS[name]
    pack = {"": bytes, "gz": gzip.compress, "xz": lzma.compress,
            "zst": zstandard.ZstdCompressor().compress}[packing]  # fmt: skip
    # A name says nothing about the content.
    found = read(file_of(tmp_path, pack(text.encode())))
    assert rows_of(found) == slow(text.encode())


def test_a_byte_order_mark_costs_no_interval(tmp_path: Path) -> None:
    text = "\ufeffT:1:2 :3:4\nT:5:6\n".encode()
    for data in (text, gzip.compress(text)):
        assert rows_of(read(file_of(tmp_path, data))) == slow(text[3:])


@pytest.mark.parametrize("chunk", [*range(1, len(PRODUCERS["valgrind"])), 1 << 20])
def test_what_a_file_says_of_itself(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "CHUNK", chunk)
    found = read(file_of(tmp_path, PRODUCERS["valgrind"]))
    assert found.declared == (6, 2, 13, 3, 1)
    assert found.ignored == {"#": 4, "blank": 2}
    assert not found.torn
    assert found.instructions.tolist() == [6, 7]
    assert read(file_of(tmp_path, PRODUCERS["odd"])).torn


CELL = st.sampled_from(
    [":1:2", ":0:0", ":7:72057594037927935", ":12345678:9",
     ":123456789:1", ":9223372036854775807:12345678901234567", ":0000000000000000000000012:3"]
)  # fmt: skip
GAP = st.sampled_from([" ", "   ", "\t", " \r", "\x0b\x0c"])
LINE = st.one_of(
    st.builds(lambda lead, cells, gap: lead + "T" + gap.join(cells), st.sampled_from(["", " \t"]),
              st.lists(CELL, max_size=6), GAP),
    st.sampled_from(["", "   ", "# a comment :1:2 T:3:4", "M:1:2", "T1:2", "#", "é :1:2"]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(lines=st.lists(LINE, max_size=12), end=st.booleans(), chunk=st.integers(1, 80))
def test_any_chunks_give_what_the_slow_reader_gives(
    lines: list[str], end: bool, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = ("\n".join(lines) + "\n" * end).encode()
    path = file_of(tmp_path_factory.getbasetemp(), text)
    wanted = slow(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "CHUNK", chunk)
        if not wanted:
            with pytest.raises(TokmillError, match="no line is an interval"):
                read(path)
            return
        # An entry that is longer than a chunk is refused at 1 MiB only.
        patch.setattr(reader, "LONGEST", 1000)
        assert rows_of(read(path)) == wanted
        patch.setattr(reader, "PIECE", 3)
        told: list[float] = []
        parts = list(pieces(path, tell=told.append))
    assert [row for part in parts for row in rows_of(part)] == wanted
    assert len(told) == len(parts) and told == sorted(told) and told[-1] == 1.0


def test_a_pipe_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PIECE", 3)
    monkeypatch.setattr(reader, "CHUNK", 4000)
    end, begin = os.pipe()
    os.write(begin, b"T:1:2 :3:4\n" * 5000)
    os.close(begin)
    assert sum(map(len, pieces(f"/dev/fd/{end}"))) == 5000
    os.close(end)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("T:1:2\nT:1:2:3\n", 2, "not an entry"),
        ("T:1:2\n\nT:1 2\n", 3, "not an entry"),
        ("T:1:2 x\n", 1, "'x' is not an entry"),
        ("T:1:-2\n", 1, "not an entry"),
        ("T:1:2.5\n", 1, "not an entry"),
        ("T:1:2:\n", 1, "not an entry"),
        ("T:1:nan\n", 1, "not an entry"),
        ("T::1:2\n", 1, "not an entry"),
        ("T:1:2 :3\n:4\n", 1, "not an entry"),
        ("T:1:2\0\n", 1, "not an entry"),
        ("# :\nT:1:2\nT:1:18446744073709551616\n", 3, "64 bits"),
        ("T:1:2\nT:1:1 :9223372036854775808:1\n", 2, "63 bits"),
        ("T:1:2\nT:3:4:5:6\n", 2, "':3:4:5:6' is not an entry"),
    ],
)
def test_a_line_that_is_wrong_is_named(text: str, line: int, what: str, tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match=what) as error:
        read(file_of(tmp_path, text))
    assert error.value.where.endswith(f"line {line}")
    assert error.value.hint


@pytest.mark.parametrize("text", ["", "\n" * 1_000_000, "# T:1:2\n", "Tee\n", "x" * 3_000_000])
def test_a_file_without_intervals(text: str, tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="no line is an interval"):
        read(file_of(tmp_path, text))


def test_an_interval_of_very_many_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MOST_ENTRIES", 100_000)
    long = "T" + " ".join(f":{i}:1" for i in range(1, 200_001))
    with pytest.raises(TokmillError, match="more than 100,000 blocks"):
        read(file_of(tmp_path, long))


def test_a_line_has_no_limit_and_an_entry_has(tmp_path: Path) -> None:
    long = "T" + " ".join(f":{i}:{i * 7}" for i in range(1, 200_001))
    found = read(file_of(tmp_path, f"{long}\nT:1:1\n"))
    assert np.diff(found.indptr).tolist() == [200_000, 1]
    assert (found.counts[:-1] == found.ids[:-1].astype(np.uint64) * 7).all()
    with pytest.raises(TokmillError, match="longer than 1 MiB"):
        read(file_of(tmp_path, "T:" + "1" * 3_000_000))


def test_a_file_that_was_cut_off_is_told(tmp_path: Path) -> None:
    whole = PRODUCERS["valgrind"]
    with pytest.raises(TokmillError, match="declares 2 intervals and has 1"):
        read(file_of(tmp_path, whole.replace("T:1:7   \n", "")))
    packed = gzip.compress(whole.encode() * 100)
    with pytest.raises(TokmillError, match="damaged or cut off"):
        read(file_of(tmp_path, packed[:-9]))
    with pytest.raises(TokmillError, match="failed"):
        read(tmp_path)
    with pytest.raises(TokmillError, match="failed"):
        read(tmp_path / "none")


@pytest.mark.parametrize("last", [f":1:{1 << 63} :2:{1 << 63}", f":1:{(1 << 63) - 1}"])
def test_sums_of_more_than_63_bits_are_refused(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokmill.bbv.traces.read.CHUNK", 64)
    trace = file_of(tmp_path, "T:1:9\n" * 100 + f"T{last} :3:1\n" + "T:1:9\n" * 50)
    with pytest.raises(TokmillError, match="of the first 1.. intervals add up") as told:
        read(trace)
    assert told.value.where == str(trace)


def test_instructions_of_intervals() -> None:
    assert from_rows([{}, {1: 3}, {}]).instructions.tolist() == [0, 3, 0]


@pytest.mark.parametrize("name", ["a.bb", "a.bb.gz"])
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    vectors = from_rows([{5: 3, 1: (1 << 54) - 1}, {}, {2: 1}] * 300)
    path = write(tmp_path / name, vectors)
    assert rows_of(read(path)) == rows_of(vectors)
    first = path.read_bytes()
    assert write(path, vectors).read_bytes() == first


def test_lines_that_are_neither_intervals_nor_comments_are_counted(tmp_path: Path) -> None:
    found = read(file_of(tmp_path, "# a\n[run] T:1:2\nT:1:2\n\nM:1:2\n"))
    assert len(found) == 1 and found.other_lines == 2
