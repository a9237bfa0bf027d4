"""Results of schedules as plain values, as JSON has them."""

from __future__ import annotations

from typing import Any


def facts_of_result(result: Any) -> dict[str, Any]:
    """Return what was found of a schedule, a `measure.Result`; times in milliseconds.

    `speedup` is the gain, which noise is no part of; what gave no result has none (NaN).
    """
    return {
        "status": result.status,
        "reason": result.reason,
        "milliseconds": result.nanoseconds / 1e6,
        "baseline_milliseconds": result.baseline / 1e6,
        "speedup": result.gain,
        "noise": result.noise,
        "error": result.error,
        "allowed_error": result.allowed,
    }
