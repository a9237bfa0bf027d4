"""The commands of docs/profiles.md for traces without code, and the rules of their triplets."""

import gzip
import json
import pickle
import re
import shlex
from itertools import permutations
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import pytest

from tokmill.cli import main
from tokmill.store.store import Store

Interval = dict[int, int]
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
CLOSE = 0.003
"""By so much the cosines of rounded vectors are off."""


def mixed(value: int) -> int:
    """The finaliser of splitmix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def projected(interval: Interval) -> list[float]:
    """Shares of blocks times a random row of 100 numbers for each id."""
    total, found = sum(interval.values()), [0.0] * 100
    for block, count in interval.items():
        key = mixed(block)
        for place in range(100):
            bits = mixed(key + (place + 1) * STEP & MASK)
            found[place] += count / total * ((bits >> 32) / 2**31 - 1)
    return found


def cosines(intervals: list[Interval]) -> np.ndarray[Any, Any]:
    vectors = np.asarray([projected(one) for one in intervals])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found: np.ndarray[Any, Any] = vectors @ vectors.T
    return found


def made(folder: Path) -> tuple[list[Interval], list[float]]:
    """Write `program.gz` as BbTracker does, and gem5's timeline beside it.

    Of its three phases two share half of their blocks.
    """
    draw = np.random.default_rng(0)
    blocks = (draw.permutation(40) + 1).tolist()
    shapes = [{b: int(draw.integers(500, 900)) for b in blocks[at : at + 10]} for at in (0, 5, 20)]
    phase = [i // 5 % 3 if i < 30 else 0 for i in range(45)]
    intervals = [
        {b: int(n * (1 + draw.random())) for b, n in sorted(shapes[one].items())} for one in phase
    ]
    intervals[2] = dict(intervals[1])
    lines = ("T" + "".join(f":{b}:{n}   " for b, n in one.items()) for one in intervals)
    (folder / "program.gz").write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    sums = [sum(one.values()) for one in intervals]
    cycles = [
        round(n * (1 + one / 2 + 0.1 * draw.random())) for n, one in zip(sums, phase, strict=True)
    ]
    value = {"board.processor.start.core.numCycles": cycles, "simInsts": np.cumsum(sums).tolist()}
    (folder / "program_timeline_full.json").write_text(json.dumps(value))
    return intervals, [c / n for c, n in zip(cycles, sums, strict=True)]


def members(entry: tuple[Any, ...], intervals: list[Interval]) -> list[list[int]]:
    """The intervals that each member of a tuple may be, by ids and counts in the script's order."""
    found = []
    for blocks, weights in zip(entry[:6:2], entry[1:6:2], strict=True):
        assert weights == sorted(weights)
        one = dict(zip(blocks, weights, strict=True))
        found.append([i for i, interval in enumerate(intervals) if interval == one])
    return found


def section(repository: Path, name: str) -> str:
    page = (repository / "docs/profiles.md").read_text("utf-8")
    return page.partition(f" {name}\n")[2].partition("\n##")[0]


def does(block: str) -> None:
    for line in block.splitlines():
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line, comments=True)[1:])
        assert ended.value.code == 0, line


def test_from_a_trace_to_triplets(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    intervals, cpi = made(tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", section(repository, "Traces without code"), re.DOTALL)
    plain, with_cpi, _ = blocks
    assert len(plain.splitlines()) == len(with_cpi.splitlines()) == 3
    does(plain + with_cpi)
    like = cosines(intervals)
    pairs = [like[i, j] for i, j in permutations(range(45), 2)]
    above, below = mean(pairs) + 0.5 * pstdev(pairs), mean(pairs) - pstdev(pairs)
    other = np.asarray([[a != b for b in intervals] for a in intervals])

    entries = pickle.loads(Path("program.pkl").read_bytes())  # noqa: S301 (written here)
    anchors = set()
    for entry in entries:
        assert len(entry) == 6
        (a, *more), (p, *_), (n, *_) = members(entry, intervals)
        assert other[a, p] and like[a, p] > above - CLOSE and like[a, n] < below + CLOSE
        anchors |= {a, *more}
    able = (other & (like > above + CLOSE)).any(1) & (like < below - CLOSE).any(1)
    assert {*np.flatnonzero(able).tolist()} <= anchors and able.sum() > 30

    entries = pickle.loads(Path("program-cpi.pkl").read_bytes())  # noqa: S301 (written here)
    assert len(entries) > 30
    semi_hard = 0
    for entry in entries:
        assert len(entry) == 9
        a, p, n = found = [
            next(i for i in those if abs(cpi[i] - known) < 1e-6)
            for those, known in zip(members(entry, intervals), entry[6:], strict=True)
        ]
        assert len({*found}) == 3 and other[a, p] and like[a, p] > above - CLOSE
        *rest, least = np.sort(np.delete(like[a], a))[: -20 + 1]
        assert like[a, p] > least - CLOSE and like[a, n] < least + CLOSE
        within = [one for one in rest if like[a, p] - 0.25 + CLOSE < one < like[a, p] - CLOSE]
        semi_hard += bool(within)
        assert not within or like[a, p] - 0.25 - CLOSE < like[a, n] < like[a, p] + CLOSE
    assert 0 < semi_hard < len(entries)


@pytest.mark.long
def test_pictures_of_a_trace(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", section(repository, "Traces without code"), re.DOTALL)
    does(blocks[1].splitlines()[0])
    does(blocks[2])
    for name in ("phases.png", "cpi.png"):
        assert (tmp_path / name).stat().st_size > 3000


def test_a_store_of_blocks_from_their_bytes(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    intervals, _ = made(tmp_path)
    table = {i: bytes([0x90] * (i % 5) + [0x83, 0xC0, i]).hex() for i in range(1, 41)}
    rows = [f"{i},{code}{['', 'c3', 'eb05'][i % 3]}" for i, code in table.items()]
    (tmp_path / "program.csv").write_text("\n".join(["id,bytes", *rows, ""]))
    text = section(repository, "Blocks without addresses")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    exec(compile(program, "profiles.md", "exec"), {})  # noqa: S102 (a page of this repository)
    does(commands)
    store = Store("executions")
    blocks, places = store.reference("block"), [(i + 1) * 65_537 for i in range(41)]
    assert len(blocks) == 40
    for record, interval in zip(store, intervals, strict=True):
        at = [places.index(int(blocks.record(int(n))["address"])) for n in record["block"]]
        assert dict(zip(at, record["count"].tolist(), strict=True)) == interval
