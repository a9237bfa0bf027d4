"""Results of schedules as rows of a table and as JSON."""

from __future__ import annotations

from typing import Any

from tokmill.cli.output import print_table

PUBLISHED = "published ms"
"""Unscheduled, on another machine."""


def published_time(problem: Any) -> dict[str, float]:
    """Return the time that a folder of benchmarks says, which was taken on another machine."""
    if problem.published is None:
        return {}
    return {"published_milliseconds": problem.published / 1e6}


def shown_times(row: dict[str, Any], published: list[str]) -> list[str]:
    """Return that time as cells of a table, one for each of the columns `published`."""
    time = row.get("published_milliseconds")
    return ["" if time is None else f"{time:.3f}" for _ in published]


def print_results(found: list[dict[str, Any]], baseline: str) -> None:
    """Print results as a table; `baseline` names what they are compared with."""
    published = [PUBLISHED] * any("published_milliseconds" in one for one in found)
    print_table(
        ["module", "ms", baseline, "times as fast", "noise", "measured", *published],
        [
            [
                one["module"],
                f"{one['milliseconds']:.3f}",
                f"{one['baseline_milliseconds']:.3f}",
                f"{one['speedup']:.2f}" if one["status"] == "ok" else one["status"],
                f"{one['noise']:.1%}",
                ", ".join(f"{count} {status}" for status, count in sorted(one["counts"].items())),
                *shown_times(one, published),
            ]
            for one in found
        ],
    )
