"""What is left out is counted in little room, whatever its number, and can be found again."""

from pathlib import Path

import numpy as np
import pytest

from making import jsonl, quick_build
from tokmill.builds import make_shard
from tokmill.builds.remake import each_left_out, left_out
from tokmill.store.schema import Drop, drops_of, each_drop


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
    monkeypatch.setattr(make_shard, "MOST_REJECTS", 10)
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
    listed = left_out(store, most=100)
    assert [(one.line, one.reason) for one in listed] == [
        (n, "json") for n in [1, 2, *range(5, 21, 2)]
    ]
    assert len(left_out(store, most=3)) == 3
    lines = b"".join(line.encode() + b"\n" for line in rows)
    every = list(each_left_out(store))
    mine = [one for one in every if one.item == "x.jsonl"]
    places = [0, *np.flatnonzero(np.frombuffer(lines, np.uint8) == 10)[:-1] + 1]
    assert [one.byte for one in mine] == [
        place for place, row in zip(places, rows, strict=True) if row != '{"text": "a"}'
    ]
    assert [one.line for one in mine][:3] == [1, 2, 3]
    assert sum(one.rejected for one in every) == 57
