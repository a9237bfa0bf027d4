"""Results of schedules as rows of a table and as JSON: beside no schedule, and IREE's default."""

from __future__ import annotations

import math
from typing import Any

from tokmill.cli.output import print_table, say

IREE = "iree_default_milliseconds"
"""Key of a row: the time of the module by IREE's default, NaN if IREE does not run it."""


def row_of(problem: Any, best: Any, iree: Any) -> dict[str, Any]:
    """Return a schedule (`search.Trial`) and IREE's default (`measure.Result`) as JSON has them."""
    return {
        "module": problem.name,
        **best.result.facts(),
        IREE: iree.nanoseconds / 1e6,
        "iree_status": iree.status,
        "actions": [repr(action) for action in best.schedule],
    }


def print_results(found: list[dict[str, Any]]) -> None:
    """Print rows of `row_of` as a table."""
    counted = ["measured"] * any("counts" in one for one in found)
    print_table(
        ["module", "ms", "unscheduled", "IREE's default", "times as fast", "noise", *counted],
        [
            [
                one["module"],
                f"{one['milliseconds']:.3f}",
                f"{one['baseline_milliseconds']:.3f}",
                iree_cell(one),
                f"{one['speedup']:.2f}" if one["status"] == "ok" else one["status"],
                f"{one['noise']:.1%}",
                *[", ".join(f"{n} {status}" for status, n in sorted(one["counts"].items()))
                  for _ in counted],
            ]
            for one in found
        ],
    )  # fmt: skip


def iree_cell(row: dict[str, Any]) -> str:
    """Return the time by IREE's default, or why there is none."""
    return f"{row[IREE]:.3f}" if math.isfinite(row[IREE]) else str(row["iree_status"])


def say_what_is_faster(rows: list[dict[str, Any]]) -> None:
    """Say of each row whether no schedule, or IREE's default, is faster than what was found."""
    for one in rows:
        if one["status"] != "ok":
            say(f"note: {one['module']}: {one['status']}, {one['reason']}")
        elif not one["actions"]:
            say(f"note: {one['module']}: no schedule that was measured is faster than none")
        if one[IREE] < one["milliseconds"]:
            say(
                f"note: {one['module']}: IREE's default is "
                f"{one['milliseconds'] / one[IREE]:.2f} times as fast; `tokmill rl tune` begins "
                "with it"
            )
