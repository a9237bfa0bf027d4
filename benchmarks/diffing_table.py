"""What `diffing.py` measures of a pair, and the tables that it makes of all pairs."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from diff_evidence_programs import Pair
from function_truth import LeftOut, Score
from measure import markdown

THEIRS, OURS = "qbindiff", "tokmill"
TUNED = ("bzip2", "zlib", "lua")
"""Programs that were looked at while features were chosen; the others are held out."""


@dataclass
class Result:
    """One pair, judged."""

    pair: Pair
    matches: int
    size: int
    """Bytes of the larger one of the two stripped files."""
    scores: dict[str, Score] = field(default_factory=dict)
    """Contestant → its functions; one that gave no answer is not there."""
    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds after lifting."""
    peak: int = 0
    """Of qbindiff."""
    failed: str = ""
    """Why qbindiff gave no answer."""
    left_out: LeftOut = field(default_factory=LeftOut)


def table(results: Sequence[Result], names: Sequence[str]) -> list[str]:
    rows = []
    for one in results:
        cells = {name: f"{score.f1:.3f}" for name, score in one.scores.items()}
        pair = f"{one.pair.project}{' *' if one.pair.project in TUNED else ''} {one.pair.kind}"
        f1 = [cells.get(name, "no answer") for name in names]
        rows.append([pair, f"{one.matches:,}", f"{one.size >> 10:,}", *f1])
    return markdown(["pair", "functions", "KiB", *names], rows)


def means(results: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Return mean F1 by kind of pair, over held-out programs and over all."""
    rows = []
    held_out = [one for one in results if one.pair.project not in TUNED]
    kinds = list(dict.fromkeys(one.pair.kind for one in results))
    for title, some in (("held out", held_out), ("all", results)):
        for kind in kinds:
            rows += mean(f"{title}, {kind}", [one for one in some if one.pair.kind == kind], names)
        rows += mean(f"**{title}**", some, names)
    return markdown(["mean of", "pairs", *names, "tokmill − qbindiff"], rows)


def mean(title: str, results: Sequence[Result], names: Sequence[str]) -> list[list[str]]:
    """Return the row of the pairs that qbindiff has answered.

    If some it has not, a second row has all pairs, where no answer counts as an F1 of 0.
    """
    whole = [one for one in results if not one.failed]
    rows = [_row(title, whole, names)] if whole else []
    if len(whole) < len(results):
        rows.append(_row(f"{title}, no answer = 0", results, names))
    return rows


def _row(title: str, results: Sequence[Result], names: Sequence[str]) -> list[str]:
    found = {
        name: statistics.mean(one.scores[name].f1 if name in one.scores else 0.0 for one in results)
        for name in names
    }
    # A limit of ours is not a measure of how much better an answer is.
    ended = not any(one.failed for one in results)
    gain = f"{found[OURS] - found[THEIRS]:+.3f}" if ended else "–"
    return [title, str(len(results)), *(f"{found[name]:.3f}" for name in names), gain]


def details(results: Sequence[Result]) -> list[str]:
    """Return what is beside the figures: times, memory, what does not count, what is missing."""
    lines = []
    timed = [one for one in results if THEIRS in one.seconds]
    if timed:
        ours, theirs = ([one.seconds[name] for one in timed] for name in (OURS, THEIRS))
        lines.append(
            f"CPU seconds after lifting, median of {len(timed)} pairs: tokmill "
            f"{statistics.median(ours):.1f}, qbindiff {statistics.median(theirs):.1f} (largest "
            f"{max(ours):.1f} and {max(theirs):.1f}); qbindiff's largest resident memory "
            f"{max(one.peak for one in timed) / 2**20:,.0f} MiB."
        )
    failed = [one for one in results if one.failed]
    if failed:
        seconds = [one.seconds[OURS] for one in failed]
        lines.append(
            f"qbindiff gave no answer for {len(failed)} of {len(results)} pairs; tokmill took "
            f"{min(seconds):.1f} to {max(seconds):.1f} CPU seconds for each of these."
        )
        lines += [
            f"- {THEIRS}, {one.pair.project} {one.pair.kind}: {one.failed}." for one in failed
        ]
    left: dict[str, Counter[str]] = {"A": Counter(), "B": Counter()}
    for one in results:
        left["A"] += one.left_out.a
        left["B"] += one.left_out.b
    for side, counts in left.items():
        reasons = ", ".join(f"{number:,} {why}" for why, number in counts.most_common())
        lines.append(f"- Functions of {side} that do not count: {reasons}.")
    return lines
