"""What is left out is counted in little room, whatever its number, and can be found again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokmill.builds.reject_runs import Runs
from tokmill.builds.repair.repair import each_left_out
from tokmill.store.checks.locate import left_out

from making import jsonl, quick_build
from tokmill.builds import reject_runs as module
from tokmill.store.manifest import Rejects
from tokmill.store.schema import Drop, Records, drops_of, each_drop
from tokmill.store.store import Store

Outcome = tuple[str, bool]
"""Reason (empty: kept) and whether it is a reject."""
OUTCOMES: list[Outcome] = [("", False), ("blank", False), ("json", True), ("utf8", True)]


def batch(outcomes: list[Outcome], base: int) -> Records:
    drops = drops_of(Drop(base + i, *why) for i, why in enumerate(outcomes) if why[0])
    starts = np.array([base + i for i, why in enumerate(outcomes) if not why[0]], np.int64)
    return Records(np.zeros(len(starts) + 1, np.int64), {}, starts, drops)


def slow_runs(items: list[list[Outcome]]) -> list[Rejects]:
    """One record after the other."""
    found: list[Rejects] = []
    for number, outcomes in enumerate(items):
        before = ("", False)
        for place, (reason, rejected) in enumerate(outcomes):
            if rejected and before == (reason, rejected):
                run = found[-1]
                found[-1] = Rejects(number, run.first, place, run.count + 1, reason)
            elif rejected:
                found.append(Rejects(number, place, place, 1, reason))
            before = (reason, rejected)
    return found


@given(
    st.lists(st.lists(st.sampled_from(OUTCOMES), max_size=30), max_size=3),
    st.lists(st.integers(0, 30), max_size=4),
    st.sampled_from([0, 1, 3, 100]),
)
def test_runs_are_those_of_one_record_after_the_other(
    items: list[list[Outcome]], cuts: list[int], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST", most)
        found = Runs(joins=True)
        for number, outcomes in enumerate(items):
            edges = [0, *sorted(min(cut, len(outcomes)) for cut in cuts), len(outcomes)]
            counts = [
                found.add(number, batch(outcomes[a:b], a))
                for a, b in zip(edges, edges[1:], strict=False)
            ]
            left = [why for why in outcomes if why[0]]
            assert sum(skipped for skipped, _ in counts) == sum(not bad for _, bad in left)
            assert sum(rejected for _, rejected in counts) == sum(bad for _, bad in left)
    wanted = slow_runs(items)
    assert found.listed == wanted[:most]
    every = Counter(why for outcomes in items for why in outcomes if why[0])
    assert found.rejected == {reason: n for (reason, bad), n in every.items() if bad}
    assert found.skipped == {reason: n for (reason, bad), n in every.items() if not bad}
    if len(wanted) > most:
        first, last = wanted[most], wanted[-1]
        assert found.unlisted == (first.item, first.first, last.item, last.last)
    else:
        assert found.unlisted is msgspec.UNSET


def test_addresses_are_no_sequence() -> None:
    found = Runs(joins=False)
    found.add(0, batch([("json", True)] * 3, 10))
    assert [(run.first, run.count) for run in found.listed] == [(10, 1), (11, 1), (12, 1)]


def test_each_drop_comes_in_the_order_of_places() -> None:
    singles = [Drop(3, "a", True), Drop(1, "b", False), Drop(2, "a", True)]
    assert [drop.offset for drop in each_drop(drops_of(singles))] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_million_blank_lines_make_a_small_receipt(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x.jsonl" if kind == "jsonl" else "x.txt")
    path.write_bytes(b'{"text": "a"}\n' + b" \r\n" * 2 + b"\n" * 1_000_000 + b'{"text": "b"}')
    more = {"record": "line"} if kind == "text" else {}
    store = quick_build(kind, path, tmp_path / "s", **more)
    assert len(store) == 2
    reason = "blank line" if kind == "jsonl" else "empty"
    assert store.manifest.skipped == {reason: 1_000_002}
    receipts = list((tmp_path / "s/shards").glob("*.json"))
    assert sum(receipt.stat().st_size for receipt in receipts) < 4000


def test_rejects_are_counted_listed_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 10)
    rows = ["{", "{", "", *['{"text": "a"}', "{"] * 50, '{"text": 5}', '{"text": ""}', "{"]
    jsonl(tmp_path / "x.jsonl", rows)
    (tmp_path / "y.jsonl").write_bytes(b"{\n" * 3)
    from making import here
    from tokmill.builds.plan import How

    how = How(quiet=True, amount=here(), max_rejects=1.0)
    inputs = [tmp_path / "x.jsonl", tmp_path / "y.jsonl"]
    store = quick_build("jsonl", inputs, tmp_path / "s", how=how)
    assert store.manifest.rejected == {"json": 2 + 50 + 1 + 3, "type": 1}
    assert store.manifest.skipped == {"blank line": 1, "empty": 1}
    runs = left_out(store, most=100)
    assert runs[0].count == 2 and len(runs) == 10
    receipt = Store(tmp_path / "s").receipt(0)
    assert receipt.unlisted is not msgspec.UNSET
    lines = b"".join(line.encode() + b"\n" for line in rows)
    every = list(each_left_out(store, rejected_only=False))
    mine = [one for one in every if one.item == "x.jsonl"]
    places = [0, *np.flatnonzero(np.frombuffer(lines, np.uint8) == 10)[:-1] + 1]
    assert [one.byte for one in mine] == [
        place for place, row in zip(places, rows, strict=True) if row != '{"text": "a"}'
    ]
    assert [one.line for one in mine][:3] == [1, 2, 3]
    assert sum(one.rejected for one in every) == 57
    assert sum(1 for _ in each_left_out(store)) == 57
