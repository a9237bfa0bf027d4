"""Statistics against a slow twin in plain Python."""

import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report_stores import ROLES, write_store
from tokmill.base.errors import UsageError
from tokmill.store.checks import stats
from tokmill.store.checks.stats import id_columns, statistics
from tokmill.store.schema import Column, Phrases, Records
from tokmill.store.shards.shard import SUFFIX, ShardWriter

RECORDS = st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=30)


def slow(shards: list[list[list[int]]], width: int, size: int, roles: dict[str, int]) -> Any:
    """The figures again, one record after the other."""
    records = [record for shard in shards for record in shard]
    tokens = [i for record in records for i in record]
    lengths = sorted(map(len, records))

    def quantile(percent: int) -> int:
        for length in lengths:
            if sum(other <= length for other in lengths) * 100 >= percent * len(lengths):
                return length
        return 0

    bins: dict[tuple[int, int], int] = {}
    if lengths:
        low, high = 0, 0
        while low <= lengths[-1]:
            bins[low, high] = sum(low <= length <= high for length in lengths)
            low, high = high + 1, max(2 * high + 1, 1)
    rows = sum(math.ceil(len(record) / width) for record in records)
    eot, counts = roles.get("eot"), Counter(tokens)
    frequent = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:20]
    return {
        "records": len(records),
        "tokens": len(tokens),
        "min": min(lengths, default=0),
        "mean": len(tokens) / len(records) if records else 0.0,
        "median": float(np.median(lengths)) if lengths else 0.0,
        "p90": quantile(90),
        "p99": quantile(99),
        "max": max(lengths, default=0),
        "histogram": [(*b, n) for b, n in bins.items()],
        "rows": rows,
        "padding": (rows * width - len(tokens)) / (rows * width) if rows else 0.0,
        "longer": sum(length > width for length in lengths) / max(len(records), 1),
        "empty": sum(all(i == eot for i in record) for record in records),
        "unique": len(counts),
        "used": len(counts) / size,
        "unknown": counts[roles["unk"]] / max(len(tokens), 1) if "unk" in roles else None,
        "eot": counts[eot] if eot is not None else None,
        "frequent": [(i, n, n / len(tokens)) for i, n in frequent],
    }


def fast(found: stats.Statistics) -> dict[str, Any]:
    use = found.columns["token"]
    flat = {name: getattr(found, name) for name in ("records", "tokens", "rows", "padding")}
    flat |= {name: getattr(found, name) for name in ("longer", "empty")}
    names = ("min", "mean", "median", "p90", "p99", "max", "histogram")
    flat |= {name: getattr(found.lengths, name) for name in names}
    return flat | {
        name: getattr(use, name) for name in ("unique", "used", "unknown", "eot", "frequent")
    }


@settings(max_examples=60, deadline=None)
@given(
    shards=st.lists(RECORDS, max_size=3),
    width=st.integers(1, 50),
    roles=st.sampled_from([ROLES, {}, {"eot": 3}]),
    block=st.sampled_from([1, 7, 1 << 22]),
)
def test_equals_the_slow_twin(
    shards: list[list[list[int]]], width: int, roles: dict[str, int], block: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "BLOCK", block)
        store = write_store(Path(folder), shards, size=10, roles=roles)
        found = fast(statistics(store, width))
        expected = slow(shards, width, 10, roles)
        assert found.pop("padding") == pytest.approx(expected.pop("padding"), abs=1e-12)
        assert found == expected


def test_whole_store_figures(tmp_path: Path) -> None:
    drops = [(0, 5, "empty", False), (0, 9, "json", True), (0, 12, "json", True)]
    store = write_store(tmp_path, [[[2, 3, 0], [4, 0]], [[1, 0]]], drops=drops)
    seen: list[int] = []
    found = statistics(store, 2, advance=seen.append)
    assert found.shards == 2
    assert found.input_bytes == 3 * 7
    assert found.bytes_per_token is None
    assert found.skipped == {"empty": 1}
    assert found.rejected == {"json": 2}
    assert (found.rows, found.padding, found.longer) == (4, 1 - 7 / 8, 1 / 3)
    assert sum(seen) == store.manifest.bytes


def test_without_a_vocabulary(tmp_path: Path) -> None:
    use = statistics(write_store(tmp_path, [[[2, 0], []]], vocabulary=None)).columns["token"]
    assert (use.vocabulary, use.used, use.unknown, use.eot, use.unique) == (
        None, None, None, None, 2,
    )  # fmt: skip


def test_ids_that_are_too_many_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "LARGEST", 4)
    found = statistics(write_store(tmp_path, [[[2, 7, 0]]]))
    assert found.not_counted == ["token"]
    assert found.columns == {}
    assert found.tokens == 3


@pytest.mark.parametrize("width", [0, -1])
def test_refuses_what_makes_no_sense(tmp_path: Path, width: int) -> None:
    store = write_store(tmp_path, [[[2, 0]]])
    with pytest.raises(UsageError):
        statistics(store, width)


@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_phrases_count_as_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(stats, "BLOCK", block)
    store = write_store(tmp_path, [[[2, 0]]])
    # Phrases 0: [5, 6], 1: [0], 2: [7]; records [5 6 0], [], [0], [7 7].
    phrases = Phrases(
        ids=np.asarray([0x80000000, 1, 1, 2, 2], np.uint32),
        offsets=np.asarray([0, 2, 2, 3, 5]),
        table_offsets=np.asarray([0, 2, 3, 4]),
        table={"token": np.asarray([5, 6, 0, 7], "u1")},
    )
    schema = {
        "token": Column("u1", phrase=True, vocab="token"),
        "border": Column("u1", phrase=True),
    }
    writer = ShardWriter(schema, {"token": 50})
    writer.add(Records(np.asarray([0, 3, 3, 4, 6]), {}, np.zeros(4, np.int64), (), phrases), 0)
    writer.write(tmp_path / "shards" / f"{store.shards[0].name}{SUFFIX}")
    store.schema, store.token_columns = schema, list(schema)
    monkeypatch.setattr("tokmill.store.shards.shard.Shard.check_lengths", lambda *_: None)
    assert id_columns(store) == ["token"]
    found = statistics(store)
    assert (found.records, found.tokens, found.empty) == (4, 6, 1)
    assert [(i, n) for i, n, _ in found.columns["token"].frequent] == [
        (0, 2), (7, 2), (5, 1), (6, 1),
    ]  # fmt: skip
