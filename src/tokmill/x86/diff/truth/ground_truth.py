"""The true matches of functions and blocks, by debug information and source.

A function is the same in both programs where it has the same name (that of the linker; that of a
function that one compilation alone knows, with the file of that compilation). Two blocks may be
matched where they lie in the same function and share a line of source. docs/diffing-protocol.md
says all of it, and what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.diff.truth.source_lines import SourceLines, same_source
from tokmill.x86.graph import Graph
from tokmill.x86.image.debug.debug_info import DebugInfo
from tokmill.x86.image.ranges import distinct, member

Key = tuple[str, int]
"""Name and, of a function that is known in one compilation alone, its file in B (else -1); files
that only A has count down from -2."""

# Why a function has no partner in the truth.
UNKNOWN = "without debug information"
PART = "part of a function"
CLONE = "clone of a function that is there itself"
SEVERAL = "several partners"
FOLDED = "several functions at one address"
INLINED = "inlined or not made in the other"
ALONE = "not known to the other"
STUB = "import stub"


@dataclass(frozen=True, slots=True)
class Score:
    """What was found (matches of two programs, or starts of functions) against the truth."""

    right: int
    wrong: int
    lost: int

    @property
    def recall(self) -> float:
        """The share of what is true that was found; 1 where there are none."""
        return self.right / (self.right + self.lost) if self.right + self.lost else 1.0

    @property
    def precision(self) -> float:
        """The share of what was found that is true; 1 where none was found."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of the two; 1 where there is nothing to find and nothing was found."""
        whole = 2 * self.right + self.wrong + self.lost
        return 2 * self.right / whole if whole else 1.0

    def __add__(self, other: Score) -> Score:
        return Score(self.right + other.right, self.wrong + other.wrong, self.lost + other.lost)


@dataclass(slots=True)
class Side:
    """One program: its graph, what its debug information says, and what the truth makes of it."""

    graph: Graph
    info: DebugInfo
    label: Array
    """(functions of `info`,) i8: number of the true match; -1 for none."""
    why: list[str]
    """(functions of `info`): why there is none; "" where there is one."""

    def functions(self) -> Array:
        """Return for each function of the graph the one that begins there: i8, -1 for none."""
        order = np.argsort(self.info.entry, kind="stable")
        entry = self.info.entry[order]
        at = np.searchsorted(entry, self.graph.function_address)
        found = np.full(len(self.graph.function_address), -1, np.int64)
        there = member(self.graph.function_address, entry)
        found[there] = order[at[there]]
        return found

    def labels(self) -> Array:
        """Return for each function of the graph its true match: i8, -1 for none."""
        own = self.functions()
        return np.where(own >= 0, np.append(self.label, -1)[own], -1)

    def reasons(self) -> list[str]:
        """Return for each function of the graph why it has none; "" where it has one."""
        own = self.functions().tolist()
        around = self.info.function_at(self.graph.function_address).tolist()
        why = [
            self.why[number] if number >= 0 else PART if inside >= 0 else UNKNOWN
            for number, inside in zip(own, around, strict=True)
        ]
        stubs = np.asarray(getattr(self.graph, "import_address", ()), np.uint64)
        for number in np.flatnonzero(member(self.graph.function_address, stubs)).tolist():
            why[number] = STUB
        return why

    def lifted(self) -> Array:
        """Return which true matches have a function in the graph: i8, their numbers."""
        found = self.labels()
        return distinct(found[found >= 0])


@dataclass(slots=True)
class LeftOut:
    """What does not count: reason → how many of A, of B, and of the matches that were made."""

    a: Counter[str] = field(default_factory=Counter)
    b: Counter[str] = field(default_factory=Counter)
    matches: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class GroundTruth:
    """The truth about two programs."""

    a: Side
    b: Side
    source: SourceLines
    matches: int
    """True matches of functions; those that a lifter does not find count too."""


def ground_truth(
    a: Graph, b: Graph, info_a: DebugInfo, info_b: DebugInfo, source: SourceLines | None = None
) -> GroundTruth:
    """Return the truth about two programs; without `source` both are of the same source."""
    source = source or same_source(info_a.files, info_b.files)
    keys_a = _keys(info_a, source.partner)
    keys_b = _keys(info_b, None)
    side_a = Side(a, info_a, np.full(len(keys_a), -1, np.int64), [ALONE] * len(keys_a))
    side_b = Side(b, info_b, np.full(len(keys_b), -1, np.int64), [ALONE] * len(keys_b))
    for side, keys, other, partner in (
        (side_a, keys_a, info_b, source.partner),
        (side_b, keys_b, info_a, None),
    ):
        _why(side, keys, other, partner, source)
    pairs = _pairs(side_a, side_b, keys_a, keys_b, source)
    for number, (mine, theirs) in enumerate(pairs):
        side_a.label[mine] = side_b.label[theirs] = number
        side_a.why[mine] = side_b.why[theirs] = ""
    return GroundTruth(side_a, side_b, source, len(pairs))


def _keys(info: DebugInfo, partner: Array | None) -> list[Key]:
    return [
        (name, _unit(unit, partner))
        for name, unit in zip(info.name, info.unit.tolist(), strict=True)
    ]


def _unit(unit: int, partner: Array | None) -> int:
    """Return a file as a file of B; one that only A has is a number below -1."""
    if unit < 0 or partner is None:
        return unit
    return int(partner[unit]) if partner[unit] >= 0 else -2 - unit


def _why(
    side: Side, keys: list[Key], other: DebugInfo, partner: Array | None, source: SourceLines
) -> None:
    """Say of every function why it has no partner, before partners are looked for."""
    if partner is not None:
        described = other.described
    else:
        described = {(name, _unit(unit, source.partner)) for name, unit in other.described}
    names = {name for name, _ in described}
    begins = Counter(side.info.entry.tolist())
    there = {key for key, clone in zip(keys, side.info.clone.tolist(), strict=True) if not clone}
    for number, key in enumerate(keys):
        if begins[int(side.info.entry[number])] > 1:
            side.why[number] = FOLDED
        elif side.info.clone[number] and key in there:
            side.why[number] = CLONE
        elif key in described or key[0] in names:
            side.why[number] = INLINED


def _pairs(
    a: Side, b: Side, keys_a: list[Key], keys_b: list[Key], source: SourceLines
) -> list[tuple[int, int]]:
    """Return the true matches as functions of the debug information."""
    to_file, to_line = source.lines(a.info.file.astype(np.int64), a.info.line.astype(np.int64))
    # By name and file; those of one name by the line that declares them; then by the name alone,
    # as a function may have moved to another file.
    rounds: list[tuple[Sequence[Hashable], Sequence[Hashable]]] = [
        (keys_a, keys_b),
        (
            list(zip(a.info.name, to_file.tolist(), to_line.tolist(), strict=True)),
            list(zip(b.info.name, b.info.file.tolist(), b.info.line.tolist(), strict=True)),
        ),
        (a.info.name, b.info.name),
    ]
    left_a, left_b = _counting(a), _counting(b)
    found: dict[int, int] = {}
    for mine, theirs in rounds:
        groups = _grouped(left_b, theirs)
        for key, numbers in _grouped(left_a, mine).items():
            if len(numbers) == len(groups.get(key, ())) == 1:
                found[numbers[0]] = groups[key][0]
        done = set(found.values())
        left_a = [n for n in left_a if n not in found]
        left_b = [n for n in left_b if n not in done]
    both = {a.info.name[n] for n in left_a} & {b.info.name[n] for n in left_b}
    for side, left in ((a, left_a), (b, left_b)):
        for n in left:
            if side.info.name[n] in both:
                side.why[n] = SEVERAL
    return sorted(found.items(), key=lambda pair: int(a.info.entry[pair[0]]))


def _counting(side: Side) -> list[int]:
    return [n for n, why in enumerate(side.why) if why not in (FOLDED, CLONE)]


def _grouped(numbers: list[int], keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for number in numbers:
        found.setdefault(keys[number], []).append(number)
    return found


def judge_functions(truth: GroundTruth, a: Array, b: Array) -> tuple[Score, LeftOut]:
    """Return how many matches of functions are right, wrong and lost, and what did not count.

    `a` and `b` (i8 each, as long) are functions of the two graphs. A match counts where one of the
    two has a true partner and neither is a part of a function.
    """
    why_a, why_b = truth.a.reasons(), truth.b.reasons()
    label_a, label_b = truth.a.labels(), truth.b.labels()
    left_out = LeftOut(Counter(filter(None, why_a)), Counter(filter(None, why_b)))
    right = wrong = 0
    for one, other in zip(a.tolist(), b.tolist(), strict=True):
        reasons = {why_a[one], why_b[other]}
        if PART in reasons:
            left_out.matches[PART] += 1
        elif "" not in reasons:
            left_out.matches[why_a[one]] += 1
        elif label_a[one] == label_b[other]:
            right += 1
        else:
            wrong += 1
    for side, count in ((truth.a, left_out.a), (truth.b, left_out.b)):
        if lost := truth.matches - len(side.lifted()):
            count["with a partner, but not lifted"] = lost
    return Score(right, wrong, truth.matches - right), left_out
