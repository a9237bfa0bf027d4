"""A whole model under IREE: which layout and flags are best, and which matchers of a spec help.

A model is compiled in a child for each set of flags, as a flag stays for a process. Compiled ones
run in turns in one child, and what they give is compared with what the default gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokmill.child import Limits
from tokmill.child_calls import call
from tokmill.errors import TokmillError
from tokmill.files import path_to_text, sha256_file
from tokmill.mlir.iree import dispatches
from tokmill.mlir.iree.dispatches import Cut
from tokmill.mlir.iree.tiles import IreeSpace
from tokmill.mlir.measure import Measurements, noise_of
from tokmill.scratch import Scratch

LIMITS = Limits(seconds=1800, memory=16 << 30)
"""Limits of compiling a model, and of running several."""
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


VERSION = 4
"""Of what a comparison says; kept ones of another version are made again."""


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
    """`ok`, `wrong`, or why it was refused."""
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


class Model:
    """A model to be tuned as a whole."""

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

        Results are compared with those of the first one, which must compile. Times are kept in
        the cache of the measurements.
        """
        request = {
            "ask": "race",
            "version": VERSION,
            "module": self.text,
            "tried": [
                (hashlib.sha256(self.module(way).encode()).hexdigest(), way.flags, spec)
                for way, spec in tried
            ],
            # What they hold, not where they are.
            "parameters": self._digest(),
            "runs": max(RUNS, self.measure.settings.runs),
            "seed": self.measure.settings.seed,
            "length": self.length,
        }
        found = self.measure.kept(request, lambda: self._compared(request, tried, tick))
        return msgspec.convert(found, list[Timed])

    def _compared(
        self, request: dict[str, Any], tried: Sequence[tuple[Way, str]], tick: Callable[[], None]
    ) -> list[dict[str, Any]]:
        made = [Timed(name=way.name) for way, _ in tried]
        with Scratch() as scratch:
            ran, paths = [], []
            for number, (way, spec) in enumerate(tried):
                path = Path(scratch.path, f"{number}.vmfb")
                answer = self._ask(
                    {
                        "ask": "compile",
                        "module": self.module(way),
                        "schedule": spec,
                        "flags": list(way.flags),
                        "path": str(path),
                    }
                )
                tick()
                if "refused" in answer:
                    made[number].status = f"refused: {answer['refused']}"
                    continue
                made[number].hits = answer["hits"]
                made[number].dispatches = answer["dispatches"]
                ran.append(made[number])
                paths.append(str(path))
            if made[0].status != "ok":
                raise TokmillError(
                    f"IREE does not compile the model: {made[0].status}", hint="export it anew"
                )
            where = path_to_text(str(self.parameters or ""))
            answers = self._ask(request | {"paths": paths, "parameters": where})
            for one, answer in zip(ran, answers, strict=True):
                _tell(one, answer)
        return [msgspec.to_builtins(one) for one in made]

    def _channels_last(self) -> str:
        if not self._last:
            self._last, _ = self._ask({"ask": LAST, "module": self.text})
        return self._last

    def _digest(self) -> str:
        if self.parameters is not None and not self._weights:
            self._weights = sha256_file(self.parameters)
        return self._weights

    def _kept(self, request: dict[str, Any]) -> Any:
        return self.measure.kept(request, lambda: self._ask(request))

    def _ask(self, request: dict[str, Any]) -> Any:
        return call(IreeSpace.child, request, limits=LIMITS)


def _tell(one: Timed, answer: dict[str, Any]) -> None:
    times = answer["times"]
    one.nanoseconds, one.noise = min(times), noise_of(times)
    one.error, one.allowed, one.moved = answer["error"], answer["allowed"], answer["moved"]
    if not one.error <= one.allowed:
        one.status = "wrong"


def fastest(found: Sequence[tuple[Way, Timed]]) -> tuple[Way, Timed]:
    """Return the fastest of those whose results are right."""
    good = [each for each in found if each[1].status == "ok"]
    return min(good, key=lambda each: each[1].nanoseconds)


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
