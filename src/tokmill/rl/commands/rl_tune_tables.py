"""Results of `tokmill rl tune` as tables, as JSON, and as the line that applies them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tokmill.base.progress import human_count
from tokmill.terminal.output import print_json, print_table, say


def print_parts(parts: list[Any], skipped: list[tuple[str, str]]) -> None:
    """Print a row an operation, what was not reached, and what was left out and why."""
    from tokmill.mlir.iree import tune as tuning

    print_table(
        ["operation", "runs", "ms", "IREE's tiles", "times as fast", "evaluations"],
        [
            [
                part.name,
                str(part.count),
                _milliseconds(part.tuned),
                _milliseconds(part.default),
                f"{part.gain:.2f}" if part.status == "tuned" else part.status,
                str(part.evaluations),
            ]
            for part in parts
        ],
    )
    if missed := sum(part.status == tuning.NOT_REACHED for part in parts):
        say(
            f"{human_count(missed, 'operation')} not reached: the same command with more --minutes "
            "goes on from here"
        )
    for why, names in _reasons(skipped).items():
        often = human_count(len(names), "different operation")
        say(f"left out: {often} ({', '.join(names[:3])}): {why}")


def print_choice(choice: Any, out: Path, line: str, as_json: bool) -> None:
    """Print what was found for a whole model."""
    default, untuned, tuned = choice.default, choice.untuned, choice.tuned
    if not choice.spec and out.exists():
        say(f"note: {out} is of an earlier tuning and no part of this result")
    if as_json:
        print_json(
            {
                "spec": str(out) if choice.spec else None,
                "compile": line,
                "flags": list(choice.way.flags),
                "channels_last": choice.way.last,
                "operations": [_row(part) for part in choice.parts],
                "skipped": [{"operation": name, "reason": why} for name, why in choice.skipped],
                "tried": [
                    {"name": one.name, "status": one.status, "milliseconds": one.nanoseconds / 1e6}
                    for one in choice.flags
                ],
                "whole": {
                    "default_milliseconds": default.nanoseconds / 1e6,
                    "best_flags": untuned.name,
                    "best_flags_milliseconds": untuned.nanoseconds / 1e6,
                    "milliseconds": tuned.nanoseconds / 1e6,
                    "noise": default.noise,
                    "obeyed": choice.obeyed if choice.spec else None,
                    "dispatches": tuned.dispatches if choice.spec else None,
                    "error": tuned.error,
                    "allowed_error": tuned.allowed,
                    "other_input_difference": tuned.moved,
                },
            }
        )
        return
    print_parts(choice.parts, choice.skipped)
    print_table(
        ["the whole model", "ms", "times as fast"],
        [
            [
                one.name,
                f"{one.nanoseconds / 1e6:.3f}",
                f"{choice.flags[0].nanoseconds / one.nanoseconds:.2f}"
                if one.status == "ok"
                else one.status,
            ]
            for one in choice.flags
        ],
    )
    if not choice.spec:
        from tokmill.mlir.iree.tune import LEAST

        simpler = "IREE's default" if tuned is default else "these flags alone"
        say(f"no spec makes the whole {LEAST - 1:.0%} faster than {simpler}: no spec is written")
    else:
        say(f"wrote {out}: {choice.obeyed} of {tuned.dispatches} dispatches obey it")
    if tuned is default:
        say(
            f"whole: nothing is faster than IREE's default, {default.nanoseconds / 1e6:.3f} ms "
            f"(noise {default.noise:.1%})"
        )
        return
    ratio = default.nanoseconds / tuned.nanoseconds
    say(
        f"whole: {tuned.nanoseconds / 1e6:.3f} ms ({choice.way.name}"
        f"{', tuned' if choice.spec else ''}), IREE's default {default.nanoseconds / 1e6:.3f} ms "
        f"({ratio:.2f} times as fast, noise {default.noise:.1%}), best flags alone "
        f"{untuned.nanoseconds / 1e6:.3f} ms ({untuned.name}); results differ by "
        f"{tuned.error:.1e} of the largest ({tuned.allowed:.1e} is allowed)"
    )
    if not tuned.moved > tuned.allowed:
        say(
            "note: another input gives the same results, so that they are equal proves little; are "
            "the weights those of a model that was trained?"
        )
    say(f"to apply it: {line}")


def _row(part: Any) -> dict[str, Any]:
    return {
        "operation": part.name,
        "runs": part.count,
        "status": part.status,
        "milliseconds": part.tuned / 1e6,
        "default_milliseconds": part.default / 1e6,
        "speedup": part.gain,
        "evaluations": part.evaluations,
    }


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}" if math.isfinite(nanoseconds) else "-"


def _reasons(skipped: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in skipped:
        found.setdefault(why, []).append(name)
    return found
