"""The benchmark of tuning: its operations are a file's, and its table says what is so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tokmill.mlir.modules import problem


@pytest.fixture(scope="module")
def script(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("tuning")


def test_the_operations_of_the_mix_can_be_tuned(script: Any) -> None:
    mix = script.read_mix()
    assert len(mix.headline) == 4 and len(mix.weights) == 12
    for line in mix.weights:
        assert len(problem.of_line(line).operations) >= 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[headline]\na = 1\n", "it has headline, not headline and held_out"),
        ("[headline]\na = 0\n[held_out]\n", "the weight of a is 0, not above 0"),
        ("[headline]\n[held_out]\nb = true\n", "the weight of b is True"),
        ("[headline]\n[held_out]\nb = nan\n", "the weight of b is nan"),
        ("[headline]\na = 1\n[held_out]\na = 2\n", "a stands there twice"),
    ],
)
def test_what_is_no_mix_is_refused(script: Any, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match=said):
        script.read_mix(path)


def times(tuned: float, **other: float) -> dict[str, float]:
    plain = {"tiles": 100.0, "default": 100.0, "O3": 90.0, "data tiling": 95.0, "torch": 80.0}
    return plain | {"tuned": tuned} | other


def test_means_are_weighted(script: Any) -> None:
    assert script.geometric([1.0, 16.0]) == pytest.approx(4.0)
    assert script.geometric([1.0, 16.0], [3.0, 1.0]) == pytest.approx(2.0)
    # × best flags is 2 for one and .5 for the other; OpenBLAS has one of them alone.
    gains = {
        "a": [script.ratios(times(45.0, OpenBLAS=90.0))],
        "b": [script.ratios(times(180.0))],
    }
    (said,) = script.means(gains, {"a": 1.0, "b": 1.0})
    assert said.startswith("Geometric means of the tuned one's speed: 1.00 × best flags, ")
    assert "2.00 × OpenBLAS" in said
    (said,) = script.means(gains, {"a": 3.0, "b": 1.0})
    assert "speed, weighted: 1.41 × best flags" in said


def test_several_seeds_give_a_range(script: Any) -> None:
    assert script.ranged([2.0]) == "2.00"
    assert script.ranged([1.0, 4.0]) == "2.00 (1.00 to 4.00)"
    rows = {"relu 8": [{"ns": times(90.0), "tuned": "O3"}, {"ns": times(45.0), "tuned": "tiles"}]}
    made = script.table(rows, {"relu 8": 1.0})
    assert "1.41 (1.00 to 2.00)" in made[2] and made[2].endswith("O3 / tiles |")
    assert "over 2 seeds with their range: 1.41 (1.00 to 2.00) × best flags" in made[4]
    assert made[0].count("|") == made[1].count("|") == made[2].count("|")


def test_what_is_slower_is_compared_once_more(script: Any) -> None:
    answers = [times(103.0), times(99.0)]
    row = script.settled(lambda: answers.pop(0))
    assert row == {"ns": times(99.0), "first": times(103.0)} and not answers
    answers = [times(101.0)]
    assert script.settled(lambda: answers.pop(0)) == {"ns": times(101.0)}
    # The second result is shown, whatever it is.
    answers = [times(103.0), times(110.0)]
    assert script.settled(lambda: answers.pop(0))["ns"] == times(110.0)


def test_the_note_names_what_is_slower_and_what_was_compared_twice(script: Any) -> None:
    rows = {
        "a": [{"ns": times(99.0), "first": times(103.0)}],
        "b": [{"ns": times(110.0), "first": times(105.0)}],
        "c": [{"ns": times(50.0)}],
    }
    slower, twice = script.regressions(rows)
    assert slower == "Slower than the default by over 2%: b."
    assert "a (1.03 times its time, then 0.99); b (1.05 times its time, then 1.10)" in twice
    assert script.regressions({"c": rows["c"]}) == ["Slower than the default by over 2%: none."]
