"""Tables and curves of what contestants found: numbers in, lines and figures out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from measure import markdown
from tokmill.report.comparison.compare_runs import mean_interval
from tokmill.report.pages.figures import HIGHEST, LOWEST, Figure, Series

POINTS = (8, 16, 24, 64)
"""Evaluations a module of the columns "after n"."""
SLOWER = 1.02
"""Times the baseline's time: what takes longer is a regression."""
LEGEND = (
    f'"slower": the share of modules, over all seeds, whose schedule in the previous column takes '
    f"over {SLOWER - 1:.0%} longer than the baseline, beyond the noise. Speed-ups are confirmed by "
    "new measurements and may be below 1; a method without a valid schedule counts as 1."
)


class Found(NamedTuple):
    """What a contestant found with one seed: gains, a module each."""

    trained: list[float]
    """Of the best schedule of each learned module, measured again; below 1 too."""
    held: list[float]
    """The same of each held-out one."""
    zero: list[float]
    """Of a policy's schedule of each held-out one before anything was measured; [] of a search."""
    curve: list[float]
    """Geometric mean of the best so far of the learned modules, by evaluations of each."""
    seconds: float
    """CPU seconds of its own, without those of compiling and running."""
    wall: float
    """Seconds of the clock, with all that it waited for."""


Table = dict[str, list[Found]]
"""Contestant → what it found, for each seed."""


def mean(gains: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(gains))))


def curve_of(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean over curves after each evaluation."""
    return [mean(column) for column in zip(*curves, strict=True)]


def by_evaluation(steps: Sequence[float], each: int) -> list[float]:
    """Return the best so far after each evaluation, where it is known after `each` of them alone.

    In between it is what it was before the step: nothing is known too early.
    """
    before = [1.0, *steps[:-1]]
    return [
        value
        for old, new in zip(before, steps, strict=True)
        for value in (*[old] * (each - 1), new)
    ]


def slower(gains: Sequence[float]) -> float:
    return float(np.mean([gain * SLOWER < 1 for gain in gains]))


def shown(values: Sequence[Sequence[float]]) -> str:
    """Return the geometric mean of all modules, and its interval over seeds."""
    middle, half = mean_interval([math.log(mean(gains)) for gains in values])
    text = f"{math.exp(middle):.2f}"
    if half is None:
        return text
    return f"{text} ({math.exp(middle - half):.2f} to {math.exp(middle + half):.2f})"


def both(values: Sequence[Sequence[float]]) -> list[str]:
    """Return two cells: the geometric mean with its interval, and the share that is slower."""
    if not all(values):
        return ["–", "–"]
    return [shown(values), f"{slower([gain for gains in values for gain in gains]):.0%}"]


def beside(gains: Mapping[str, float], lines: Sequence[str]) -> list[str]:
    """Return the same two cells for a peer, and on how many modules if it has not all."""
    found = [gains[line] for line in lines if line in gains]
    if not found:
        return ["–", "–"]
    middle, share = both([found])
    return [middle + (f" (on {len(found)})" if len(found) < len(lines) else ""), share]


def contest(
    table: Table,
    peers: Mapping[str, Mapping[str, float]],
    modules: Sequence[str],
    held_out: Sequence[str],
    tried: int,
) -> list[str]:
    """Return the table of all contestants and peers; `tried`: evaluations of held-out modules."""
    budget = len(next(iter(table.values()))[0].curve)
    points = [point for point in POINTS if point <= budget] or [budget]
    head = [
        "method", "training modules", "slower", "held out, zero-shot", "slower",
        f"held out, best of {tried}", "slower", *(f"after {point}" for point in points),
        "own CPU s", "wall s, each seed",
    ]  # fmt: skip
    rows = []
    for name, found in table.items():
        rows.append(
            [
                name,
                *both([one.trained for one in found]),
                *both([one.zero for one in found]),
                *both([one.held for one in found]),
                *(f"{mean([one.curve[point - 1] for one in found]):.2f}" for point in points),
                f"{np.mean([one.seconds for one in found]):.0f}",
                ", ".join(f"{one.wall:.0f}" for one in found),
            ]
        )
    for name, known in peers.items():
        cells = [*beside(known, modules), *beside(known, held_out), *beside(known, held_out)]
        rows.append([name, *cells, *["–"] * (len(points) + 2)])
    return markdown(head, rows)


def curves(table: Table, learns: Sequence[str], title: str, base: str) -> Figure:
    """Return the best so far by evaluations: mean over seeds, from the lowest to the highest.

    Policies (`learns`) have solid lines, searches dashed ones.
    """
    series = []
    for number, (name, found) in enumerate(table.items()):
        values = np.array([one.curve for one in found])
        middle = np.exp(np.log(values).mean(axis=0))
        band: dict[str, Any] = {}
        if len(found) > 1:
            band = {LOWEST: values.min(axis=0), HIGHEST: values.max(axis=0)}
        x = np.arange(1, values.shape[1] + 1)
        line = "-" if name in learns else "--"
        series.append(Series(name, x, middle, number, line, band))
    return Figure(
        title, "evaluations of each module", f"times as fast as {base}", "line", series, log_x=2
    )


def kernelbench(
    found: Mapping[str, Mapping[str, Mapping[str, float]]], lines: Sequence[str], tried: int
) -> list[str]:
    """Return the table of held-out shapes.

    `found`: contestant → `zero` and `best` (module → gain).
    """
    return markdown(
        ["method", "zero-shot", "slower", f"best of {tried}", "slower"],
        [
            [name, *beside(one["zero"], lines), *beside(one["best"], lines)]
            for name, one in found.items()
        ],
    )
