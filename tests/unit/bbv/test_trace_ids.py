"""Traces without a store of blocks: blocks are called by their ids."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokmill
from making import quick_build
from source_cases import block_store, write_trace
from tokmill.base.errors import TokmillError, UsageError
from tokmill.bbv.points.executions import block_vectors
from tokmill.bbv.traces import read as reading
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store

Rows = list[dict[int, int]]


def write(path: Path, rows: Rows) -> Path:
    """Write a trace as BbTracker does."""
    lines = ("T" + "".join(f":{b}:{n}   " for b, n in row.items()) + "\n" for row in rows)
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return path


def phases(seed: int, intervals: int = 40) -> Rows:
    """Four phases with blocks of their own, whose counts are never equal."""
    draw = np.random.default_rng(seed)
    shapes = [draw.permutation(30)[:8] + 1 for _ in range(4)]
    return [
        {int(b): int(draw.integers(500, 900)) for b in shapes[i // 5 % 4]} for i in range(intervals)
    ]


def slow(path: Path) -> Rows:
    """What a trace holds, as SemanticBBV's script reads it."""
    found = []
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        row: dict[int, int] = {}
        for block, count in re.findall(r":(\d+):(\d+)", line):
            row[int(block)] = row.get(int(block), 0) + int(count)
        found.append({block: count for block, count in row.items() if count})
    return found


def held(store: Store) -> Rows:
    return [dict(zip(one["block"].tolist(), one["count"].tolist(), strict=True)) for one in store]


def test_a_trace_is_a_store_by_its_own_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 20)
    monkeypatch.setattr(reading, "CHUNK", 100)
    trace = write(tmp_path / "program.gz", [*phases(0), {}, {1 << 62: 3, 7: 0}])
    with gzip.open(trace, "ab") as file:
        file.write(b"T:3:5   :2:9   :3:1   \n")
    (tmp_path / "cpi.csv").write_text(
        "interval,cpi\n" + "".join(f"{i},{1 + i}\n" for i in range(43))
    )
    store = quick_build("bbv", trace, tmp_path / "s", cpi=[str(tmp_path / "cpi.csv")])
    assert held(store) == slow(trace) and held(store)[-1] == {2: 9, 3: 6}
    assert store.schema["block"].ref is None and validate(store).ok
    assert store.column("cpi").tolist() == list(range(1, 44))
    assert store.column("instructions").tolist() == [sum(row.values()) for row in slow(trace)]
    assert {one["program"] for one in store} == {"program"} and len(set(store.column("trace"))) == 1
    assert store.manifest.notes["traces whose blocks are called by their own ids"] == 1


def test_a_trace_is_known_by_its_content(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.gz", phases(1)), write(tmp_path / "b.gz", phases(2))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "copy.gz").write_bytes(first.read_bytes())
    numbers = quick_build("bbv", [first, second], tmp_path / "s").column("trace")
    assert len(set(numbers[:40])) == len(set(numbers[40:])) == 1 and numbers[0] != numbers[-1]
    # The name says nothing: of a folder such files are read where they are asked for.
    with pytest.raises(TokmillError, match=r"(?s)no .bb or .*--suffix .gz"):
        quick_build("bbv", tmp_path / "folder", tmp_path / "t")
    again = quick_build("bbv", tmp_path / "folder", tmp_path / "t", suffix=[".gz"])
    assert set(again.column("trace")) == {numbers[0]}
    shared = quick_build("bbv", [first, second], tmp_path / "u", shared_ids=True)
    assert not shared.column("trace").any() and held(shared) == [*phases(1), *phases(2)]


@pytest.mark.parametrize(
    ("head", "end"),
    [
        ("", "\n# Thread 23\n#   Total intervals: 9\n\n"),
        ("", "\n# Thread 23"),
        ("", "\n# Thread 23\n# " + "long " * 2000 + "\n"),
        ("# Thread 23\n", ""),
        ("# Thread 23\n" + "# more\n" * 200, "# end\n" * 200),
        ("", ""),
    ],
)
@pytest.mark.parametrize("chunk", [12, 40, 41, 1 << 20])
def test_all_intervals_of_a_long_trace_have_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, end: str, chunk: int
) -> None:
    """valgrind's exp-bbv says it at the end of the file."""
    monkeypatch.setattr(reading, "PIECE", 3)
    monkeypatch.setattr(reading, "CHUNK", chunk)
    (tmp_path / "a.bb").write_text(head + "T:1:5   :2:7   \n" * 9 + end)
    store = quick_build("bbv", tmp_path / "a.bb", tmp_path / "s")
    assert store.column("thread").tolist() == [23 if head + end else 1] * 9


def test_what_needs_a_store_of_blocks(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, 0)
    blocks = [str(block_store(tmp_path)[1])]
    for options, said in (
        ({"pc": [str(trace.with_suffix(".pc"))]}, "--pc does nothing without --blocks"),
        ({"map": ["x"]}, "--map does nothing without"),
        ({"min_joined": 0.1}, "--min-joined does nothing without"),
        ({"shared_ids": True, "blocks": blocks}, "--shared-ids does nothing with --blocks"),
    ):
        with pytest.raises(UsageError, match=said):
            quick_build("bbv", trace, tmp_path / "s", **options)
    # Where its blocks lie says nothing then, so a change of it changes nothing.
    first = quick_build("bbv", trace, tmp_path / "s")
    trace.with_suffix(".pc").unlink()
    assert quick_build("bbv", trace, tmp_path / "t").fingerprint == first.fingerprint
    assert first.column("cpi").tolist() == pytest.approx([1 + i / 10 for i in range(10)])
    with pytest.raises(UsageError, match="no column 'block' that refers") as error:
        first.reference("block")
    assert "build bbv --blocks" in error.value.hint


def mined(store: Path, out: Path, **options: Any) -> Store:
    return quick_build("mine", store, out, what="bbv", count=5, **options)


def test_intervals_of_two_traces_are_never_compared(tmp_path: Path) -> None:
    """Not under one name of a program, nor after stores were merged."""
    traces = [write(tmp_path / f"{seed}.gz", phases(seed)) for seed in (1, 2)]
    together = quick_build("bbv", traces, tmp_path / "together", program="one")
    for trace in traces:
        quick_build("bbv", trace, tmp_path / trace.stem, program="one")
    merged = quick_build("select", [tmp_path / "1", tmp_path / "2"], tmp_path / "merged")
    for store in (together, merged):
        found = mined(store.path, tmp_path / f"m-{store.path.name}")
        number = store.column("trace")
        of = [number[found.column(name)] for name in ("anchor", "positive", "negative")]
        assert len(found) > 200 and (of[0] == of[1]).all() and (of[0] == of[2]).all()
        assert len(set(of[0].tolist())) == len(set(found.column("group").ravel().tolist())) == 2
        with pytest.raises(UsageError, match="traces cannot be compared") as error:
            mined(store.path, tmp_path / "x", across=True)
        assert "--shared-ids" in error.value.hint
    alone = mined(tmp_path / "1", tmp_path / "alone", across=True)
    assert len(alone) > 100
    shared = quick_build("bbv", traces, tmp_path / "shared", shared_ids=True)
    across = mined(shared.path, tmp_path / "across", across=True)
    program = np.arange(80) // 40
    assert (program[across.column("anchor")] != program[across.column("negative")]).any()


def test_two_traces_have_no_block_in_common(tmp_path: Path) -> None:
    traces = [write(tmp_path / f"{seed}.gz", phases(seed)) for seed in (1, 2)]
    one = block_vectors(quick_build("bbv", traces[0], tmp_path / "one"))
    assert one.ids.tolist() == [b for row in phases(1) for b in sorted(row)]
    two = block_vectors(quick_build("bbv", traces, tmp_path / "two"))
    assert not {*two.ids[: one.entries]} & {*two.ids[one.entries :]}
    assert two.counts[: one.entries].tolist() == one.counts.tolist()
    # Equal blocks still are equal.
    numbers = dict(zip(one.ids.tolist(), two.ids[: one.entries].tolist(), strict=True))
    assert [numbers[b] for b in one.ids.tolist()] == two.ids[: one.entries].tolist()


def test_from_python(tmp_path: Path) -> None:
    trace = write(tmp_path / "program.gz", phases(3))
    intervals = tokmill.build("bbv", str(trace), str(tmp_path / "intervals"))
    triplets = tokmill.build("mine", str(intervals.path), str(tmp_path / "triplets"), what="bbv")
    assert triplets.reference("anchor").fingerprint == intervals.fingerprint
