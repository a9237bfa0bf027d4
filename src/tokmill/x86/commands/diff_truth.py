"""`tokmill diff --truth`: a diff beside what debug information says of both programs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from tokmill.base.errors import TokmillError, UsageError
from tokmill.x86.diff.result import Diff
from tokmill.x86.diff.truth.block_truth import judge_blocks
from tokmill.x86.diff.truth.ground_truth import (
    GroundTruth,
    LeftOut,
    Score,
    ground_truth,
    judge_functions,
)
from tokmill.x86.diff.truth.source_lines import two_versions
from tokmill.x86.graph import Graph
from tokmill.x86.image.debug.debug_info import debug_reader, read_debug_info

NAMES = "names of functions were looked at; --no-names leaves them out"


class Judged(msgspec.Struct, frozen=True):
    """Matches of functions or blocks against the truth."""

    right: int
    wrong: int
    lost: int
    recall: float | None
    precision: float | None
    f1: float | None
    """None where nothing could be judged."""
    left_out: dict[str, dict[str, int]]
    """`a`, `b` and `matches`: reason → how many do not count."""


class Truth(msgspec.Struct, frozen=True):
    """What `--truth` says."""

    functions: Judged
    blocks: Judged
    notes: list[str]


def judge(
    a: Graph,
    b: Graph,
    diff: Diff,
    debug: tuple[Path, Path],
    source: tuple[Path, Path] | None,
    names: bool,
) -> Truth:
    """Return how a diff stands against the debug information of both programs.

    Raises `UsageError` where the debug information is of other programs, and as `read_debug_info`
    and `two_versions` do.
    """
    with debug_reader(*debug) as reader:
        info_a, info_b = (read_debug_info(path, reader) for path in debug)
    lines = two_versions(info_a.files, info_b.files, *source) if source else None
    truth = ground_truth(a, b, info_a, info_b, lines)
    _check(truth, debug)
    notes = []
    if names and any(a.function_name) and any(b.function_name):
        notes.append(NAMES)
    if lines is not None and lines.not_found:
        notes.append(
            f"{lines.not_found:,} of {len(info_a.files):,} source files are not below "
            f"{source[0] if source else ''}; they count as the same where their paths are"
        )
    for path, info in zip(debug, (info_a, info_b), strict=True):
        notes += [f"{path}: {number:,} {what}" for what, number in info.left_out.items()]
    return Truth(
        judged(*judge_functions(truth, diff.function_a, diff.function_b)),
        judged(*judge_blocks(truth, diff.block_a, diff.block_b)),
        notes,
    )


def _check(truth: GroundTruth, debug: tuple[Path, Path]) -> None:
    if not truth.matches:
        raise TokmillError(
            "their debug information has no function in common",
            where=f"{debug[0]}, {debug[1]}",
            hint="give the files of the two programs, the old one's first",
        )
    for side, path in zip((truth.a, truth.b), debug, strict=True):
        if not len(side.lifted()):
            raise UsageError(
                "no function of the program begins where this debug information says",
                where=str(path),
                hint="give the file as it was before `strip` made the program of it",
            )


def judged(score: Score, left_out: LeftOut) -> Judged:
    """Return scores as they are shown: None stands for what nothing can be said of."""
    return Judged(
        score.right,
        score.wrong,
        score.lost,
        score.recall if score.right + score.lost else None,
        score.precision if score.right + score.wrong else None,
        score.f1 if score.right + score.wrong + score.lost else None,
        {
            "a": _ordered(left_out.a),
            "b": _ordered(left_out.b),
            "matches": _ordered(left_out.matches),
        },
    )


def _ordered(counts: Counter[str]) -> dict[str, int]:
    return dict(counts.most_common())


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def print_truth(truth: Truth) -> None:
    """Print the scores, and what does not count."""
    print("truth, by debug information")
    for what, one in (("functions", truth.functions), ("blocks", truth.blocks)):
        print(
            f"  {what}: recall {_share(one.recall)}, precision {_share(one.precision)}, "
            f"F1 {_share(one.f1)} "
            f"({one.right:,} right, {one.wrong:,} wrong, {one.lost:,} lost)"
        )
    for what, one in (("functions", truth.functions), ("blocks", truth.blocks)):
        titles = {"a": f"{what} of the old", "b": f"{what} of the new",
                  "matches": f"matches of {what}"}  # fmt: skip
        for side, title in titles.items():
            if counts := one.left_out[side]:
                reasons = ", ".join(f"{number:,} {why}" for why, number in counts.items())
                print(f"  {title} that do not count: {reasons}")
    for note in truth.notes:
        print(f"  {note}")
