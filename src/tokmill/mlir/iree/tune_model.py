"""Tuning of a whole model for IREE: the best layout, flags and tuning spec, checked on the whole.

`tune` tunes the dispatches that IREE forms of the model; here layouts and flags are chosen, and
what helps a dispatch alone and not the whole model is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tokmill.errors import TokmillError
from tokmill.mlir.iree.model import PACKED, Model, Timed, Way, fastest, helping
from tokmill.mlir.iree.tiles import IreeSpace
from tokmill.mlir.iree.tune import LEAST, MOST, Again, NothingToTuneError, Part, Tuned, tune
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules.problem import Problem

COMPARED, WHOLE = "flags and layouts", "the whole model"
"""What is done first, and at the end."""


class Choice(msgspec.Struct, kw_only=True):
    """What is best for a whole model."""

    way: Way
    spec: str
    """"" if flags alone are as good."""
    parts: list[Part]
    skipped: list[tuple[str, str]]
    """Dispatches that were not tuned, and why."""
    flags: list[Timed]
    """The model under each set of flags."""
    default: Timed
    untuned: Timed
    """The fastest without a spec; the default if no flags gain."""
    tuned: Timed
    obeyed: int = 0
    """Dispatches that have a configuration of the spec."""


def tune_model(
    model: Model,
    *,
    seconds: float,
    most: int = MOST,
    seed: int = 0,
    state: Path | None = None,
    tick: Callable[[str, float, int], None] = lambda stage, spent, evaluations: None,
) -> Choice:
    """Return the best layout, flags and spec for a model; what gains nothing is left out.

    The dispatches that IREE forms under the fastest flags of each layout are tuned one by one,
    until so many `seconds` are spent or each dispatch had `most` evaluations in all layouts (one in
    each, at least). Then the whole model is timed with the spec. If it is slower than without, or
    gives other results, the matchers that make it so are found by halves and dropped. Flags and
    spec that gain less than `LEAST` over what is simpler are left out, so IREE's default may be the
    answer.

    `tick` hears what is done now, and of the seconds and evaluations of the search so far. Each
    layout keeps how far it came in a file of its own, whose name begins with that of `state`.

    Raises `TokmillError` if IREE does not compile the model, or obeys no matcher of the spec.
    """

    spent: dict[Way, tuple[float, int]] = {}

    def tell(stage: str) -> None:
        tick(stage, sum(one for one, _ in spent.values()), sum(one for _, one in spent.values()))

    def heard(way: Way, seconds: float, evaluations: int) -> None:
        spent[way] = (seconds, evaluations)
        tell(f"tiles of dispatches ({way.name})")

    ways = model.ways()
    tell(COMPARED)
    found = model.compare([(way, "") for way in ways], partial(tell, COMPARED))
    quickest, _ = fastest(list(zip(ways, found, strict=True)))
    looks = [
        _Look(model, way, seed, state, partial(heard, way))
        for way in _worth(list(zip(ways, found, strict=True)))
    ]
    # Of two layouts each gets a third, and the better one the last.
    shares = len(looks) + 1 if len(looks) > 1 else 1
    whole = partial(tell, WHOLE)
    for look in looks:
        look.go_on(seconds / shares, max(1, most // shares))
    if len(looks) > 1:
        whole()
        ran = model.compare([(ways[0], ""), *((look.way, look.spec) for look in looks)], whole)
        pairs = [(look.way, one) for look, one in zip(looks, ran[1:], strict=True)]
        right = [pair for pair in pairs if pair[1].status == "ok"] or pairs
        best_way, _ = min(right, key=lambda pair: pair[1].nanoseconds)
        look = next(one for one in looks if one.way == best_way)
        look.go_on(2 * seconds / shares, max(1, 2 * most // shares))
    whole()
    kept = _helping_the_whole(model, look.way, look.tuned, look.space, whole)
    made = [(problem, schedule) for _, problem, schedule in kept]
    way, text = look.way, look.space.merged(made) if made else ""
    default, untuned, best = model.compare([(ways[0], ""), (quickest, ""), (way, text)], whole)
    settled = settle([(ways[0], "", default), (quickest, "", untuned), (way, text, best)])
    way, text, best = settled[-1]
    return Choice(
        way=way,
        spec=text,
        parts=look.tuned.parts,
        skipped=look.cut.skipped,
        flags=found,
        default=default,
        untuned=next(timed for _, spec, timed in settled[::-1] if not spec),
        tuned=best,
        obeyed=sum(best.hits.values()),
    )


def settle(rising: Sequence[tuple[Way, str, Timed]]) -> list[tuple[Way, str, Timed]]:
    """Return the first of some flags and specs, and of the others each that gains over the last.

    The first is IREE's default. Less than `LEAST` is no gain: it would be noise, or not worth a
    flag or a file to keep.
    """
    kept = [rising[0]]
    for way, spec, timed in rising[1:]:
        if timed.status == "ok" and timed.nanoseconds * LEAST <= kept[-1][2].nanoseconds:
            kept.append((way, spec, timed))
    return kept


def _worth(tried: Sequence[tuple[Way, Timed]]) -> list[Way]:
    """Return the fastest way of each layout: tiles change which of them is the best."""
    layouts = [[pair for pair in tried if pair[0].last == last] for last in (False, True)]
    unpacked = [[pair for pair in some if PACKED not in pair[0].name] for some in layouts]
    good = [some for some in unpacked if any(one.status == "ok" for _, one in some)]
    return [fastest(some)[0] for some in good]


class _Look:
    """A layout and flags whose dispatches are tuned."""

    def __init__(
        self,
        model: Model,
        way: Way,
        seed: int,
        state: Path | None,
        tick: Callable[[float, int], None],
    ) -> None:
        self.way, self.cut, self.space = way, model.dispatches(way), IreeSpace(way.flags)
        self._measure, self._seed, self._tick = model.measure, seed, tick
        name = re.sub(r"\W+", "-", way.name)
        self._state = None if state is None else state.with_name(f"{state.name}.{name}")
        self.tuned = Tuned(spec="", parts=[], chosen=[])
        self._again = Again()

    @property
    def spec(self) -> str:
        """Return the spec of all groups that gain alone."""
        return self.tuned.spec

    def go_on(self, seconds: float, most: int) -> None:
        """Tune until so many seconds were spent in all, or evaluations of each dispatch."""
        with Measurements(self._measure.settings, self._measure.path, self.space) as measure:
            try:
                self.tuned = tune(
                    self.cut.problems,
                    self.cut.counts,
                    measure,
                    seconds=seconds,
                    most=most,
                    seed=self._seed,
                    state=self._state,
                    again=self._again,
                    tick=self._tick,
                )
            except NothingToTuneError as error:
                # The best flags are worth a line without a spec too.
                self.tuned = Tuned(spec="", parts=error.parts, chosen=[])


def _helping_the_whole(
    model: Model, way: Way, tuned: Tuned, space: Any, alive: Callable[[], None]
) -> list[tuple[list[int], Problem, tuple[Any, ...]]]:
    """Return the groups whose tiles help the whole model; the status of the others says why not."""

    def timed(some: Sequence[Any]) -> tuple[Timed, Timed]:
        spec = space.merged([(problem, schedule) for _, problem, schedule in some])
        base, other = model.compare([(way, ""), (way, spec)], alive)
        return base, other

    def slower(some: Sequence[Any]) -> bool:
        base, other = timed(some)
        return other.status != "ok" or other.nanoseconds > base.nanoseconds

    if not tuned.chosen:
        return []
    _, all_of_them = timed(tuned.chosen)
    missed = []
    # Where IREE refuses the whole spec, nothing is known of its matchers.
    if all_of_them.status in ("ok", "wrong"):
        obeyed = all_of_them.hits.keys()
        missed = [one for one in tuned.chosen if not space.matchers(*one[1:]) & obeyed]
    if len(missed) == len(tuned.chosen):
        raise TokmillError(
            f"IREE obeys no matcher of the spec: none of {len(missed)} operations has its tiles",
            hint="report it with the version of IREE; no spec is written",
        )
    left = [one for one in tuned.chosen if one not in missed]
    kept = helping(left, slower)
    for one in tuned.chosen:
        if one in kept:
            continue
        why = "no dispatch of the model obeys" if one in missed else "the whole is slower with it"
        for number in one[0]:
            tuned.parts[number].leave(why)
    return kept
