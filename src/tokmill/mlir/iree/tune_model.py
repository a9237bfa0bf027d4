"""Tuning of a whole model for IREE: the best layout, flags and tuning spec, checked on the whole.

`tune` tunes the dispatches that IREE forms of the model; here layouts and flags are chosen, and
what helps a dispatch alone and not the whole model is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.mlir.iree.dispatches import Cut
from tokmill.mlir.iree.tiles import IreeSpace
from tokmill.mlir.iree.tune import LEAST, MOST, Again, NothingToTuneError, Part, Tuned, tune
from tokmill.mlir.iree.tuned_model import PACKED, Model, Timed, Way, fastest, helping
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules.problem import Problem

COMPARED, WHOLE = "flags and layouts", "the whole model"
"""What is done first, and at the end."""
CHECKS = 4
"""Compilations of the whole model for which time is left when the search ends."""


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
    until: float,
    most: int = MOST,
    seed: int = 0,
    tick: Callable[[str, int], None] = lambda stage, evaluations: None,
) -> Choice:
    """Return the best layout, flags and spec for a model; what gains nothing is left out.

    All ends at `until` (`time.monotonic`). The dispatches that IREE forms under the fastest flags
    of each layout are tuned one by one, until the time that the checks at the end need is left, or
    each dispatch had `most` evaluations in all layouts (one in each, at least). Then the whole
    model is timed with the spec. If it is slower than without, or gives other results, the
    matchers that make it so are found by halves and dropped. Flags and spec that gain less than
    `LEAST` over what is simpler are left out, so IREE's default may be the answer.

    `tick` hears what is done now, and of the evaluations of the search so far.

    Raises `TokmillError` if IREE does not compile the model, or obeys no matcher of the spec.
    """
    evaluations: dict[Way, int] = {}

    def tell(stage: str) -> None:
        tick(stage, sum(evaluations.values()))

    def heard(way: Way, done: int) -> None:
        evaluations[way] = done
        tell(f"tiles of dispatches ({way.name})")

    model.measure.until = until
    ways = model.ways()
    tell(COMPARED)
    found = model.compare([(way, "") for way in ways], partial(tell, COMPARED))
    tried = list(zip(ways, found, strict=True))
    quickest, untuned = fastest(tried)
    left = max(until - time.monotonic(), 0.0)
    searching = until - min(left / 2, CHECKS * max(one.seconds for one in found))
    looks = [_Look(model, way, seed, partial(heard, way)) for way in _worth(tried)]
    # Of two layouts each gets a third, and the better one the last.
    shares = len(looks) + 1 if len(looks) > 1 else 1
    whole = partial(tell, WHOLE)
    for look in looks:
        now = time.monotonic()
        look.go_on(now + (searching - now) / shares, max(1, most // shares))
    look = looks[0]
    if len(looks) > 1:
        whole()
        ran = model.compare([(ways[0], ""), *((one.way, one.spec) for one in looks)], whole)
        pairs = list(zip(looks, ran[1:], strict=True))
        right = [pair for pair in pairs if pair[1].status == "ok"] or pairs
        look, _ = min(right, key=lambda pair: pair[1].nanoseconds)
        look.go_on(searching, max(1, 2 * most // shares))
    whole()
    made, skipped = _helping_the_whole(model, look, whole), look.skipped
    way, text = look.way, look.space.merged(made) if made else ""
    default, fast, best = model.compare([(ways[0], ""), (quickest, ""), (way, text)], whole)
    if default.status != "ok":
        # No time was left: a spec that was not compared is none.
        way, text, default, fast, best = quickest, "", found[0], untuned, untuned
    settled = settle([(ways[0], "", default), (quickest, "", fast), (way, text, best)])
    way, text, best = settled[-1]
    return Choice(
        way=way,
        spec=text,
        parts=look.tuned.parts,
        skipped=skipped,
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

    def __init__(self, model: Model, way: Way, seed: int, tick: Callable[[int], None]) -> None:
        self.way, self.space = way, IreeSpace(way.flags)
        self._measure, self._seed, self._tick = model.measure, seed, tick
        self.tuned = Tuned(spec="", parts=[], chosen=[])
        self._again = Again()
        try:
            self._cut = model.dispatches(way)
        except TokmillError as error:
            self._cut = Cut([], [], [("all dispatches", error.what)])
        self.skipped = self._cut.skipped

    @property
    def spec(self) -> str:
        """Return the spec of all groups that gain alone."""
        return self.tuned.spec

    def go_on(self, until: float, most: int) -> None:
        """Tune until then, or until each dispatch had so many evaluations."""
        with Measurements(self._measure.settings, self._measure.path, self.space) as measure:
            try:
                self.tuned = tune(
                    self._cut.problems,
                    self._cut.counts,
                    measure,
                    until=until,
                    most=most,
                    seed=self._seed,
                    again=self._again,
                    tick=self._tick,
                )
            except NothingToTuneError as error:
                # The best flags are worth a line without a spec too.
                self.tuned = Tuned(spec="", parts=error.parts, chosen=[])


def _helping_the_whole(
    model: Model, look: _Look, alive: Callable[[], None]
) -> list[tuple[Problem, tuple[Any, ...]]]:
    """Return what helps the whole model; the status of the other parts says why not."""
    way, tuned, space = look.way, look.tuned, look.space

    def timed(some: Sequence[Any]) -> tuple[Timed, Timed]:
        spec = space.merged([(problem, schedule) for _, problem, schedule in some])
        base, other = model.compare([(way, ""), (way, spec)], alive)
        return base, other

    def slower(some: Sequence[Any]) -> bool:
        if time.monotonic() > model.measure.until:
            return True
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
        if time.monotonic() > model.measure.until:
            why = "no time to compare the whole with it"
        for number in one[0]:
            tuned.parts[number].leave(why)
    return [(problem, schedule) for _, problem, schedule in kept]
