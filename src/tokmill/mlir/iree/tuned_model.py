"""A whole model under IREE: which layout and flags are best, and which matchers of a spec help.

A model is compiled in a child for each set of flags, as a flag stays for a process. Compiled ones
run in turns in one child, and what they give is compared with what the default gives. A candidate
whose compilation or run ends its child is one that failed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import ChildDied, call
from tokmill.base.errors import TokmillError
from tokmill.base.files import path_to_text, sha256_file
from tokmill.base.scratch import Scratch
from tokmill.mlir.iree import dispatches
from tokmill.mlir.iree.dispatches import Cut
from tokmill.mlir.iree.tiles import IreeSpace
from tokmill.mlir.measure import Measurements, dead, noise_of

LIMITS = Limits(memory=16 << 30)
"""Limits of compiling a model, and of running several; the time is that of all measurements."""
_CONVOLUTION = "conv_2d_nchw"
FLAGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "O3": ("--iree-opt-level=O3",),
    "data tiling": ("--iree-opt-level=O3", "--iree-opt-data-tiling"),
    "im2col": ("--iree-opt-level=O3", "--iree-global-opt-use-im2col-for-convs"),
}
"""Flags that are tried."""
PACKED = "data tiling"
"""Under these flags products work on packed operands with tiles of their own."""
LAST = "channels last"
"""A layout that is tried too, with each of these flags but `im2col`."""
RUNS = 8
"""Rounds of a comparison of whole models, at least."""


NO_TIME = "no time is left"
VERSION = 5
"""Version of what a comparison says; kept ones of another version are made again."""


class Way(msgspec.Struct, frozen=True):
    """A layout of the model and flags to compile it with."""

    name: str
    flags: tuple[str, ...]
    last: bool = False
    """Whether convolutions work on channels last."""


class Timed(msgspec.Struct, kw_only=True):
    """A whole model that was compiled and run."""

    name: str
    status: str = "ok"
    """`ok`, `wrong`, or `refused`, `crashed`, `timeout` or `memory` with the reason."""
    nanoseconds: float = float("nan")
    noise: float = float("nan")
    """Median over least time, less 1."""
    error: float = float("nan")
    """Largest difference to the default's results in units of the largest one."""
    allowed: float = float("nan")
    moved: float = float("nan")
    """What another input changes in the default's results, in the same units."""
    hits: dict[str, int] = {}
    """Matcher of the spec, by `spec.identity` → how many dispatches obey it, if any do."""
    dispatches: int = 0
    seconds: float = 0.0
    """Seconds that it took to compile."""


class Model:
    """A model to be tuned as a whole; used by `with`, it keeps what it compiled until the end.

    All that it does ends at `measure.until`.
    """

    def __init__(
        self,
        text: str,
        measure: Measurements,
        *,
        parameters: Path | None = None,
        length: int = 1,
        flags: tuple[str, ...] = (),
    ) -> None:
        """`parameters`: an archive of weights (`.irpa`); `length`: the longest sum in the model.

        `flags` are those that all ways have.
        """
        self.text, self.measure, self.length, self.flags = text, measure, length, flags
        self.parameters = parameters
        self._last = self._weights = ""
        self._scratch: Scratch | None = None
        self._compiled: dict[tuple[Way, str], Timed] = {}
        self._ran = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._scratch is not None:
            self._scratch.close()

    def module(self, way: Way) -> str:
        """Return the text of the module in a layout."""
        return self._channels_last() if way.last else self.text

    def ways(self) -> list[Way]:
        """Return the layouts and flags that can be tried."""
        made = [Way(name, (*self.flags, *flags)) for name, flags in FLAGS.items()]
        if _CONVOLUTION not in self.text:
            return made[:-1]
        return made + [Way(f"{LAST}, {way.name}", way.flags, True) for way in made[1:-1]]

    def dispatches(self, way: Way) -> Cut:
        """Return the dispatches that IREE forms of the model."""
        request = {"ask": "formed", "module": self.module(way), "flags": list(way.flags)}
        return dispatches.cut(self._kept(request))

    def compare(self, tried: Sequence[tuple[Way, str]], tick: Callable[[], None]) -> list[Timed]:
        """Compile the model with layouts, flags and specs ("" for none), and run all in turns.

        Results are compared with those of the first one. Times are kept in the cache of the
        measurements. Where no time is left, the status of all is `timeout`.

        Raises `TokmillError` if the first one fails, and if no time is left for the first
        comparison.
        """
        request = {
            "ask": "race",
            "version": VERSION,
            "module": self.text,
            "tried": [(way.last, way.flags, spec) for way, spec in tried],
            # What they hold, not where they are.
            "parameters": self._digest(),
            "runs": max(RUNS, self.measure.settings.runs),
            "seed": self.measure.settings.seed,
            "length": self.length,
        }
        try:
            found = self.measure.kept(request, lambda: self._compared(request, tried, tick))
        except TokmillError:
            if not self._ran or time.monotonic() < self.measure.until:
                raise
            return [Timed(name=way.name, status=f"timeout: {NO_TIME}") for way, _ in tried]
        self._ran = True
        return msgspec.convert(found, list[Timed])

    def _compared(
        self, request: dict[str, Any], tried: Sequence[tuple[Way, str]], tick: Callable[[], None]
    ) -> list[dict[str, Any]]:
        made = []
        for way, spec in tried:
            made.append(msgspec.structs.replace(self._compile(way, spec)))
            tick()
        first, *others = [number for number, one in enumerate(made) if one.status == "ok"] or [-1]
        if first:
            raise self._failed(made[0])
        try:
            self._race(request, made, [first, *others], tried)
        except ChildDied:
            # One of them ends the process: each runs beside the first one, or that one alone.
            for number in (*others, first):
                if number == first and made[first].nanoseconds > 0:
                    break
                try:
                    self._race(request, made, sorted({first, number}), tried)
                except ChildDied as died:
                    made[number].status = _status(died)
        if made[0].status != "ok":
            raise self._failed(made[0])
        return [msgspec.to_builtins(one) for one in made]

    def _compile(self, way: Way, spec: str) -> Timed:
        """Compile the model, once."""
        known = self._compiled.get((way, spec))
        if known is not None:
            return known
        made, since = Timed(name=way.name), time.monotonic()
        try:
            answer = self._ask(
                {
                    "ask": "compile",
                    "module": self.module(way),
                    "schedule": spec,
                    "flags": list(way.flags),
                    "path": str(self._place(way, spec)),
                }
            )
            made.hits, made.dispatches = answer.get("hits", {}), answer.get("dispatches", 0)
            if "refused" in answer:
                made.status = f"refused: {answer['refused']}"
        except TokmillError as error:
            made.status = _status(error)
        made.seconds = time.monotonic() - since
        self._compiled[way, spec] = made
        return made

    def _place(self, way: Way, spec: str) -> Path:
        self._scratch = self._scratch or Scratch()
        digest = hashlib.sha256(repr((way, spec)).encode()).hexdigest()
        return Path(self._scratch.path, f"{digest}.vmfb")

    def _race(
        self,
        request: dict[str, Any],
        made: list[Timed],
        numbers: Sequence[int],
        tried: Sequence[tuple[Way, str]],
    ) -> None:
        """Run some of the compiled models in turns, the first of all among them."""
        paths = [str(self._place(*tried[number])) for number in numbers]
        where = path_to_text(str(self.parameters or ""))
        answers = self._ask(request | {"paths": paths, "parameters": where})
        for number, answer in zip(numbers, answers, strict=True):
            _tell(made[number], answer)

    def _failed(self, first: Timed) -> TokmillError:
        late = time.monotonic() > self.measure.until
        return TokmillError(
            f"IREE's {first.name} of the model gives nothing to compare with: {first.status}",
            hint="allow more minutes: one compilation takes longer" if late else "export it anew",
        )

    def _channels_last(self) -> str:
        if not self._last:
            self._last, _ = self._kept({"ask": LAST, "module": self.text})
        return self._last

    def _digest(self) -> str:
        if self.parameters is not None and not self._weights:
            self._weights = sha256_file(self.parameters)
        return self._weights

    def _kept(self, request: dict[str, Any]) -> Any:
        return self.measure.kept(request, lambda: self._ask(request))

    def _ask(self, request: dict[str, Any]) -> Any:
        left = self.measure.until - time.monotonic()
        if left <= 0:
            raise TokmillError(NO_TIME, hint="allow more minutes")
        return call(IreeSpace.child, request, limits=LIMITS._replace(seconds=left))


def _status(error: TokmillError) -> str:
    """Return the status of a candidate that failed: of what kind, and why."""
    if isinstance(error, ChildDied):
        died = dead(error)
        return f"{died.status}: {died.reason.partition(' calls ')[2].partition(' ')[2]}"
    return f"refused: {error.what}"


def _tell(one: Timed, answer: dict[str, Any]) -> None:
    times = answer["times"]
    one.nanoseconds, one.noise = min(times), noise_of(times)
    one.error, one.allowed, one.moved = answer["error"], answer["allowed"], answer["moved"]
    if not one.error <= one.allowed:
        one.status = "wrong"


def fastest(found: Sequence[tuple[Way, Timed]]) -> tuple[Way, Timed]:
    """Return the fastest of those whose results are right."""
    return min(
        (each for each in found if each[1].status == "ok"), key=lambda each: each[1].nanoseconds
    )


def helping(
    parts: Sequence[Any],
    slower: Callable[[Sequence[Any]], bool],
) -> list[Any]:
    """Return the parts that do not make the whole slower, by halves.

    `slower` says whether the whole is slower with some parts than without any.
    """
    kept: list[Any] = []
    waiting = [list(parts)]
    while waiting:
        some = waiting.pop()
        if not some:
            continue
        if not slower([*kept, *some]):
            kept += some
        elif len(some) > 1:
            middle = len(some) // 2
            waiting += [some[middle:], some[:middle]]
    return kept
