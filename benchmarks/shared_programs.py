"""Simulation points that the programs of `make profiles` share.

Of untrained features, and with a CPI beside them that was learned from the other programs.

    python benchmarks/shared_programs.py CACHE [--points 30 60] [--seeds 3] [--only gzip …]

CACHE/profiles/store holds the intervals (`python benchmarks/profiles.py CACHE --store`). Signatures
of the Set Transformer are compared by `benchmarks/signatures.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tokmill.bbv.points.clusters import Floats
from tokmill.bbv.points.executions import Executions, mnemonic_mix, read_executions, with_rates
from tokmill.bbv.points.shared_points import Shared, cluster_intervals, shared_points, weights_of
from tokmill.bbv.traces.cpi import PAGE_FAULTS
from tokmill.store.store import Store

PENALTIES = (0.03, 0.3, 3.0)
"""Of the ridge regression, times the mean variance of a feature."""


def without_rate(executions: Executions, event: str) -> Executions:
    """Return executions without a rate."""
    kept = [number for number, name in enumerate(executions.events) if name != event]
    events = tuple(executions.events[number] for number in kept)
    return dataclasses.replace(executions, rates=executions.rates[:, kept], events=events)


def learned_cpi(executions: Executions, features: Floats, inside: np.ndarray) -> Floats:
    """Return log CPI by ridge regression on the intervals of the programs outside of `inside`.

    The penalty is the one with the least error on programs that are left out in turn.
    """
    logs, program = np.log(executions.cpi), executions.program
    weights = executions.shares() * ~inside

    def predicted(weights: Floats, penalty: float) -> Floats:
        weights = weights / weights.sum()
        means = weights @ features, weights @ logs
        centred = features - means[0]
        squares = (centred * weights[:, None]).T @ centred
        squares += penalty * np.trace(squares) / len(squares) * np.eye(len(squares))
        slopes = np.linalg.solve(squares, (centred * weights[:, None]).T @ (logs - means[1]))
        found: Floats = means[1] + centred @ slopes
        return found

    def error(penalty: float) -> float:
        off = 0.0
        for number in np.unique(program[~inside]):
            left = program == number
            off += float(np.abs(predicted(weights * ~left, penalty) - logs)[left] @ weights[left])
        return off

    return predicted(weights, min(PENALTIES, key=error))


def trained(executions: Executions, features: Floats, count: int, seed: int) -> list[float]:
    """Return the error of each program, with a CPI beside the features that was not learned from
    it."""
    found = []
    for number in range(len(executions.names)):
        inside = executions.program == number
        cpi = learned_cpi(executions, features, inside)
        spread = float(np.sqrt(executions.shares() @ (cpi - cpi.mean()) ** 2))
        both = np.hstack([features, (cpi / max(spread, 1e-12))[:, None]])
        labels, points = cluster_intervals(executions, both, count, seed)
        weights = weights_of(executions, labels, len(points))[number]
        truth = executions.shares()[inside] @ executions.cpi[inside]
        found.append(float(weights @ executions.cpi[points] / truth - 1))
    return found


def main(store: Path, counts: Sequence[int], seeds: int, only: Sequence[str] = ()) -> list[str]:
    """Return the lines of the table."""
    opened = Store(store)
    known = read_executions(opened)
    mix = mnemonic_mix(opened, known)
    features, misses = with_rates(mix, known), with_rates(mix, without_rate(known, PAGE_FAULTS))
    if only:
        chosen = np.isin(np.asarray(known.names)[known.program], only)
        known, features, misses = known.some(chosen), features[chosen], misses[chosen]
    lines = [
        f"{len(known.names)} programs, {len(known.cpi):,} intervals, {known.kind} CPI, {seeds} "
        "seeds: mean and range of the seeds.",
        "",
        "| | points | mean | largest program | nothing simulated |",
        "|---|---|---|---|---|",
    ]
    each: list[str] = []
    for count in counts:
        without = [shared_points(known, misses, count, seed=seed) for seed in range(seeds)]
        runs = [shared_points(known, features, count, seed=seed) for seed in range(seeds)]
        learned = [trained(known, features, count, seed) for seed in range(seeds)]
        lines += [
            _row("untrained: mix and miss rates", f"{count} for all", _of(without, "shared"),
                 _of(without, "held_out")),
            _row("untrained: and page faults", f"{count} for all", _of(runs, "shared"),
                 _of(runs, "held_out")),
            _row("and a CPI learned from the others", f"{count} for all", np.asarray(learned)),
            _row("SimPoint, each program alone", f"{count} for each", _of(runs, "simpoint")),
        ]  # fmt: skip
        for kind, found in (("without", without), ("with", runs)):
            errors = np.abs(_of(found, "shared")).mean(axis=0)
            named = (f"{n} {100 * e:.1f}" for n, e in zip(known.names, errors, strict=True))
            each += [
                f"{count} shared points {kind} page faults, error of each program, %: "
                f"{', '.join(named)}.",
                "",
            ]
    constant = np.abs(_of(runs[:1], "constant"))
    lines.append(_row("mean CPI of the others", "0", constant, constant))
    return [*lines, "", *each]


def _of(runs: Sequence[Shared], name: str) -> Floats:
    """Return (seeds, programs) of a column."""
    return np.asarray([[getattr(row, name) for row in run.rows] for run in runs])


def _row(name: str, points: str, errors: Floats, nothing: Floats | None = None) -> str:
    errors = np.abs(errors)
    held = "–" if nothing is None else _range(np.abs(nothing).mean(axis=1))
    cells = name, points, _range(errors.mean(axis=1)), _range(errors.max(axis=1)), held
    return f"| {' | '.join(cells)} |"


def _range(values: Floats) -> str:
    mean = f"{values.mean():.1%}"
    if len(values) < 2:
        return mean
    return f"{mean} ({100 * values.min():.1f}–{100 * values.max():.1f})"


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("cache", type=Path)
    options.add_argument("--points", type=int, nargs="*", default=[30, 60])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--only", nargs="*", default=[], help="programs")
    asked = options.parse_args()
    store = asked.cache / "profiles" / "store"
    print("\n".join(main(store, asked.points, asked.seeds, asked.only)))
