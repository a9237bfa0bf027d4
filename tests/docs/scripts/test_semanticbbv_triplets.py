"""SemanticBBV: executions, functions at several levels, and triplets of both."""

import csv
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page import Played, run
from references_semanticbbv import (
    LEVELS,
    aligned,
    cosines,
    got,
    plain,
    sequence,
    trace_of,
)
from semanticbbv_section import (
    checks,
    keyed,
    multiset,
    named,
    played_here,
    records,
    streams_of,
)

import tokmill

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="its programs are compiled for this machine"
)


@pytest.fixture
def done(play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch) -> Played:
    return played_here(play, monkeypatch)


# Executions.


@checks("`asm_bbv_dataset.py`: BbTracker", "`asm_bbv_dataset.py --semi-hard", "`asm_bbv_cpi")
def test_triplets_of_intervals(done: Played) -> None:
    trace = trace_of("bbt.gz")
    cpi = [float(row["cpi"]) for row in csv.DictReader(Path("cpi.csv").read_text().splitlines())]
    for name in ("intervals", "with-cpi", "with-csv"):
        store = tokmill.Store(name)
        held = [
            dict(zip(row["block"].tolist(), row["count"].tolist(), strict=True)) for row in store
        ]
        assert held == trace
        assert name == "intervals" or store.column("cpi").tolist() == pytest.approx(cpi)

    # Cosines are off by what rounding the vectors does.
    like, near = cosines(trace), 0.003
    pairs = like[~np.eye(len(trace), dtype=bool)]
    above, below = pairs.mean() + 0.5 * pairs.std(), pairs.mean() - pairs.std()

    def members(entry: tuple[Any, ...]) -> Iterator[int]:
        for blocks, weights in zip(entry[:6:2], entry[1:6:2], strict=True):
            assert weights == sorted(weights)
            yield trace.index(dict(zip(blocks, weights, strict=True)))

    anchors = set()
    for entry in got("train.emb.pkl"):
        assert isinstance(entry, tuple) and len(entry) == 6
        a, p, n = members(entry)
        assert a != p and like[a, p] > above - near and like[a, n] < below + near
        anchors.add(a)
    able = (like - np.eye(len(trace)) > above + near).any(1) & (like < below - near).any(1)
    assert set(np.flatnonzero(able).tolist()) <= anchors and able.sum() > 30

    hard = 0
    for entry in tokmill.Store("semi-hard"):
        a, p, n = (int(entry[name]) for name in ("anchor", "positive", "negative"))
        assert like[a, p] > above - near and like[a, n] < like[a, p] + near
        hard += like[a, n] > like[a, p] - 0.25 - near
    assert hard > 20

    entries = got("train-cpi.emb.pkl")
    assert len(entries) > 30
    for entry in entries:
        assert isinstance(entry, tuple) and len(entry) == 9
        a, p, n = members(entry)
        assert entry[6:] == pytest.approx((cpi[a], cpi[p], cpi[n]))
        assert like[a, p] > above - near and like[a, n] < below + near
        assert (like[a] > like[a, p] + near).sum() <= 20


@checks("Optional T-SNE")
def test_pictures_of_intervals(done: Played) -> None:
    for name in ("phases.svg", "cpi.svg"):
        assert "<svg" in Path(name).read_text() and Path(name).stat().st_size > 5000


@checks("Tracing by Rust BbTracker")
def test_a_trace_is_checked(done: Played) -> None:
    trace = trace_of("bbt.gz")
    text = done.output["tokmill bbv check bbt.gz"]
    assert f"{len(trace)} intervals, {sum(map(len, trace)):,} entries" in text
    assert f"{sum(sum(one.values()) for one in trace):,} instructions" in text


# Functions at several levels.


@checks("`asm_triple_loss_dataset_generator.py`", "Its output", "`merge_triple_loss_tokens.py`")
def test_functions_at_levels(done: Played) -> None:
    wanted: dict[str, dict[str, list[dict[str, list[str]]]]] = {}
    for path in Path("extracts").iterdir():
        level = path.name.split("-")[2]
        for name, function in got(path).items():
            dicts = [
                t for n in sorted(function[3]) for t in sequence(function[3].nodes[n]["raw"], n)
            ]
            wanted.setdefault(name, {}).setdefault(level, []).append(aligned(dicts))
    pickled = got("functions.pkl")
    assert pickled.keys() == wanted.keys() and len(wanted["entry"]["O0"]) == 2
    for name, levels in wanted.items():
        assert pickled[name].keys() == levels.keys() == set(LEVELS)
        for level, sequences in levels.items():
            assert multiset(streams_of(pickled[name][level])) == multiset(sequences)
    store = tokmill.Store("levels-again")
    own = got("functions-of-levels/saved_func_tokens.pkl")
    assert multiset(records("levels-again")) == multiset(
        aligned(one) for many in own.values() for one in many
    )
    places = {(row["function"], int(row["variant"])) for row in store}
    assert places == {(name, place) for name, many in own.items() for place in range(len(many))}
    both = [one for many in got("levels/tool.pkl").values() for one in many.values()]
    both += [one for many in own.values() for one in many]
    assert multiset(records("all-levels")) == multiset(streams_of(both))
    merged = records("all-functions")
    parts = [one for one in records("functions") + records("built") if len(one["asm"]) <= 512]
    assert multiset(merged) == multiset(parts)


@checks("`extract_triple_dataset.py`")
def test_triplets_of_functions(done: Played) -> None:
    built, triplets = tokmill.Store("built"), tokmill.Store("triplets")
    rows = [
        (row["project"], row["function"], row["compiler"], row["level"], keyed(named(built, row)))
        for row in built
    ]
    anchors = Counter()
    for entry in triplets:
        anchor, positive, negative = (
            rows[int(entry[n])] for n in ("anchor", "positive", "negative")
        )
        anchors[int(entry["anchor"])] += 1
        assert anchor[:2] == positive[:2] and anchor[2:4] != positive[2:4]
        assert anchor[4] != positive[4]
        assert negative[1] != anchor[1] and negative[4] != anchor[4]
    possible = [
        number
        for number, row in enumerate(rows)
        if any(one[:2] == row[:2] and one[4] != row[4] for one in rows)
    ]
    assert sorted(anchors) == possible and set(anchors.values()) == {1}
    every = [{n: int(entry[n]) for n in ("anchor", "positive", "negative")} for entry in triplets]
    tenth = [
        {n: int(entry[n]) for n in ("anchor", "positive", "negative")}
        for entry in tokmill.Store("tenth")
    ]
    assert 0 < len(tenth) < len(every) / 2 and all(one in every for one in tenth)


@checks("The same of pickles of triplets")
def test_pickles_of_triplets(done: Played, tmp_path: Path) -> None:
    every = [one for name in "ab" for one in plain(got(f"triplets-pkl/{name}.pkl"))]
    tenth = plain(got("tenth.pkl"))
    assert 3 <= len(tenth) <= 20 and not Counter(tenth) - Counter(every)
    run(f"tokmill build select imported-triplets --ratio 0.1 --rest -o {tmp_path}/rest")
    run(f"tokmill store export triplets {tmp_path}/rest -o {tmp_path}/rest.pkl")
    assert Counter(plain(got(tmp_path / "rest.pkl"))) + Counter(tenth) == Counter(every)
    lines = Path("signatures/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"loss"' in line] == [1, 2]


@checks("`extract_triple_dataset_circle_loss.py`")
def test_groups_for_the_circle_loss(done: Played) -> None:
    built, groups = tokmill.Store("built"), tokmill.Store("groups")
    rows = [(row["project"], row["function"], keyed(named(built, row))) for row in built]
    for group in groups:
        members = [rows[int(one)] for one in group["member"]]
        assert len({one[:2] for one in members}) == 1
        assert len({one[2] for one in members}) == len(members) >= 2
    kept = {rows[int(group["member"][0])][:2] for group in groups}
    assert kept == {row[:2] for row in rows}
    recipe = json.loads(Path("circle/recipe.json").read_text())
    assert recipe["task"]["loss"] == "circle"
