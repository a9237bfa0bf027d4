"""Which functions of two programs are the same, by the names in their debug information.

benchmarks/diffing-protocol.md says how matches are judged by it.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from debug_info import DebugInfo
from tokmill.store.schema import Array
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import distinct, member

# Why a function has no partner.
UNKNOWN = "without debug information"
PART = "part of a function"
CLONE = "clone of a function that is there itself"
SEVERAL = "several partners"
FOLDED = "several functions at one address"
INLINED = "inlined or not compiled in the other"
ALONE = "not known to the other"
STUB = "import stub"


@dataclass(frozen=True, slots=True)
class Score:
    """Matches of two programs, or starts of functions, against the truth."""

    right: int
    wrong: int
    lost: int

    @property
    def recall(self) -> float:
        """The share of what is true that was found; 1 if nothing is true."""
        return self.right / (self.right + self.lost) if self.right + self.lost else 1.0

    @property
    def precision(self) -> float:
        """The share of what was found that is true; 1 if nothing was found."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both; 1 if there is nothing to find and nothing was found."""
        whole = 2 * self.right + self.wrong + self.lost
        return 2 * self.right / whole if whole else 1.0

    def __add__(self, other: Score) -> Score:
        return Score(self.right + other.right, self.wrong + other.wrong, self.lost + other.lost)


@dataclass(slots=True)
class Side:
    """One program: its graph, its debug information, and the partners of its functions."""

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
        around = self.info.function_at(self.graph.function_address).tolist()
        why = [
            self.why[number] if number >= 0 else PART if inside >= 0 else UNKNOWN
            for number, inside in zip(self.functions().tolist(), around, strict=True)
        ]
        stubs = member(self.graph.function_address, self.graph.import_address)
        for number in np.flatnonzero(stubs).tolist():
            why[number] = STUB
        return why

    def lifted(self) -> int:
        """Return how many true matches have a function in the graph."""
        found = self.labels()
        return len(distinct(found[found >= 0]))


@dataclass(slots=True)
class LeftOut:
    """What does not count: reason → how many functions of A, of B, and matches."""

    a: Counter[str] = field(default_factory=Counter)
    b: Counter[str] = field(default_factory=Counter)
    matches: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class FunctionTruth:
    """The true matches of two programs."""

    a: Side
    b: Side
    matches: int
    """Functions that a lifter does not find count too."""


def function_truth(a: Graph, b: Graph, info_a: DebugInfo, info_b: DebugInfo) -> FunctionTruth:
    """Return the true matches: functions of one name, and of one file where they are static."""
    files = _partners(info_a.files, info_b.files)
    units = info_a.unit.tolist(), info_b.unit.tolist()
    # Files as numbers of B; those that only A has count down from -2.
    own = [unit if unit < 0 else files.get(unit, -2 - unit) for unit in units[0]]
    keys = list(zip(info_a.name, own, strict=True)), list(zip(info_b.name, units[1], strict=True))
    sides = [
        Side(graph, info, np.full(len(key), -1, np.int64), [ALONE] * len(key))
        for graph, info, key in zip((a, b), (info_a, info_b), keys, strict=True)
    ]
    for side, key, other in zip(sides, keys, (info_b, info_a), strict=True):
        _why(side, key, {name for name, _ in other.described})
    pairs = _pairs(sides[0], sides[1], keys)
    for number, (one, other_one) in enumerate(pairs):
        sides[0].label[one] = sides[1].label[other_one] = number
        sides[0].why[one] = sides[1].why[other_one] = ""
    return FunctionTruth(sides[0], sides[1], len(pairs))


def _partners(a: Sequence[str], b: Sequence[str]) -> dict[int, int]:
    """Return file of A → the file of B whose path shares the longest end with it, if one does."""
    by_name: dict[str, list[int]] = {}
    for number, path in enumerate(b):
        by_name.setdefault(posixpath.basename(path), []).append(number)
    found = {}
    for number, path in enumerate(a):
        same = [
            (len(posixpath.commonprefix([path[::-1], b[other][::-1]])), other)
            for other in by_name.get(posixpath.basename(path), [])
        ]
        best = [other for length, other in same if length == max(same)[0]]
        if len(best) == 1:
            found[number] = best[0]
    return found


def _why(side: Side, keys: list[tuple[str, int]], described: set[str]) -> None:
    """Say of functions why they have no partner, before partners are looked for."""
    begins = Counter(side.info.entry.tolist())
    clone = side.info.clone.tolist()
    there = {key for key, cloned in zip(keys, clone, strict=True) if not cloned}
    for number, key in enumerate(keys):
        if begins[int(side.info.entry[number])] > 1:
            side.why[number] = FOLDED
        elif clone[number] and key in there:
            side.why[number] = CLONE
        elif key[0] in described:
            side.why[number] = INLINED


def _pairs(
    a: Side, b: Side, keys: tuple[list[tuple[str, int]], list[tuple[str, int]]]
) -> list[tuple[int, int]]:
    """Return functions of A and B whose key, or else whose name alone, stands once in both."""
    left = [[n for n, why in enumerate(s.why) if why not in (FOLDED, CLONE)] for s in (a, b)]
    found: dict[int, int] = {}
    rounds: list[tuple[Sequence[Hashable], Sequence[Hashable]]] = [keys, (a.info.name, b.info.name)]
    for key_a, key_b in rounds:
        groups = _grouped(left[0], key_a), _grouped(left[1], key_b)
        for key, numbers in groups[0].items():
            if len(numbers) == len(groups[1].get(key, ())) == 1:
                found[numbers[0]] = groups[1][key][0]
        done = set(found.values())
        left = [[n for n in left[0] if n not in found], [n for n in left[1] if n not in done]]
    both = {a.info.name[n] for n in left[0]} & {b.info.name[n] for n in left[1]}
    for side, numbers in zip((a, b), left, strict=True):
        for n in numbers:
            if side.info.name[n] in both:
                side.why[n] = SEVERAL
    return sorted(found.items(), key=lambda pair: int(a.info.entry[pair[0]]))


def _grouped(numbers: list[int], keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for number in numbers:
        found.setdefault(keys[number], []).append(number)
    return found


def judge_functions(truth: FunctionTruth, a: Array, b: Array) -> tuple[Score, LeftOut]:
    """Return how many matches of functions are right, wrong and lost, and what did not count.

    `a` and `b` (i8 each, as long) are functions of the two graphs. A match counts where one of the
    two has a partner and neither is a part of a function.
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
        if lost := truth.matches - side.lifted():
            count["with a partner, but not lifted"] = lost
    return Score(right, wrong, truth.matches - right), left_out
