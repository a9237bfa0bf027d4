"""A whole model under IREE: which layout and flags make it fastest.

A model is compiled in a child for each set of flags, as a flag stays for a process. The programs
run in turns in one child, and what they give is compared with what the default gives. A candidate
whose compilation or run ends its child is one that failed.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import ChildDied, Scratch, call
from tokmill.base.errors import TokmillError
from tokmill.base.files import path_to_text
from tokmill.mlir.iree import engines
from tokmill.mlir.measure import dead, noise_of

LIMITS = Limits(memory=16 << 30)
"""Limits of compiling a model, and of running several; the time is that of the whole tuning."""
_CONVOLUTION = "conv_2d_nchw"
FLAGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "O3": ("--iree-opt-level=O3",),
    "data tiling": ("--iree-opt-level=O3", "--iree-opt-data-tiling"),
    "im2col": ("--iree-opt-level=O3", "--iree-global-opt-use-im2col-for-convs"),
}
"""Flags that are tried."""
LAST = "channels last"
"""A layout that is tried too, with each of these flags but `im2col`."""
RUNS = 8
"""Rounds of a comparison, at least."""
LEAST = 1.02
"""A smaller gain over IREE's default would be noise, or not worth a flag to keep."""
CHILD = "tokmill.mlir.iree.executor:answer"


class Way(msgspec.Struct, frozen=True):
    """A layout of the model and flags to compile it with."""

    name: str
    flags: tuple[str, ...]
    last: bool = False
    """Whether convolutions work on channels last."""


class Timed(msgspec.Struct, kw_only=True):
    """A whole model that was compiled and run."""

    way: Way
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


class Tuned(msgspec.Struct, kw_only=True):
    """What is best for a model."""

    tried: list[Timed]
    """IREE's default first."""
    best: Timed
    """The fastest of them; the default if none is `LEAST` times as fast."""
    module: str
    """The model in the layout of the best."""
    engines: list[Timed]
    """Other engines on the same model, where it is ONNX and they are installed."""


def tune(
    text: str,
    *,
    until: float,
    parameters: Path | None = None,
    onnx: Path | None = None,
    length: int = 1,
    tick: Callable[[str], None] = lambda name: None,
) -> Tuned:
    """Return the fastest layout and flags of a model whose results are those of IREE's default.

    Args:
        text: the module, as IREE compiles it.
        until: when all ends (`time.monotonic`).
        parameters: an archive of its weights (`.irpa`).
        onnx: the model itself, for other engines.
        length: how many numbers the longest sum in it adds.
        tick: hears what is compiled now.

    Raises `TokmillError` if IREE's default fails, or if there is no time for it.
    """
    plugins.require("iree.compiler")
    # Of the time a quarter is for the comparison.
    compiled_by = until - (until - time.monotonic()) / 4
    texts = {False: text}
    with Scratch() as scratch:
        tried = [Timed(way=way) for way in ways(text)]
        paths = [Path(scratch.path, f"{number}.vmfb") for number in range(len(tried))]
        for one, path in zip(tried, paths, strict=True):
            tick(one.way.name)
            _compile(one, texts, path, compiled_by)
            if tried[0].status != "ok":
                raise _failed(tried[0], compiled_by)
        tick("comparison")
        request = {
            "ask": "race", "module": text, "parameters": path_to_text(str(parameters or "")),
            "runs": RUNS, "seed": 0, "length": length,
        }  # fmt: skip
        _compare(request, tried, paths, until)
        others = [Timed(way=Way(name, ())) for name in engines.installed() if onnx]
        for one in others:
            programs = [("iree", str(paths[0])), (one.way.name, path_to_text(str(onnx)))]
            try:
                default, answer = _ask(request | {"programs": programs}, until)
                # In its own race the default may be faster or slower than in the one before.
                speed = tried[0].nanoseconds / min(default["times"])
                _fill(one, answer | {"times": [time * speed for time in answer["times"]]})
            except TokmillError as error:
                one.status = _status(error)
    best = settled(tried)
    return Tuned(tried=tried, best=best, module=texts[best.way.last], engines=others)


def ways(text: str) -> list[Way]:
    """Return the layouts and flags that can be tried on a module, IREE's default first."""
    result = [Way(name, flags) for name, flags in FLAGS.items()]
    if _CONVOLUTION not in text:
        return result[:-1]
    return result + [Way(f"{LAST}, {way.name}", way.flags, True) for way in result[1:-1]]


def settled(tried: Sequence[Timed]) -> Timed:
    """Return the fastest whose results are right; the first, if no gain is above its noise."""
    best = min((one for one in tried if one.status == "ok"), key=lambda one: one.nanoseconds)
    least = max(LEAST, 1 + tried[0].noise)
    return best if best.nanoseconds * least <= tried[0].nanoseconds else tried[0]


def _compile(one: Timed, texts: dict[bool, str], path: Path, until: float) -> None:
    """Compile a model; `texts` has it in its layout, and gets it in channels last."""
    try:
        if one.way.last not in texts:
            texts[True], _ = _ask({"ask": LAST, "module": texts[False]}, until)
        request = {"ask": "compile", "module": texts[one.way.last], "flags": one.way.flags}
        answer = _ask(request | {"path": str(path)}, until)
    except TokmillError as error:
        one.status = _status(error)
    else:
        if "refused" in answer:
            one.status = f"refused: {answer['refused']}"


def _compare(
    request: dict[str, Any], tried: Sequence[Timed], paths: Sequence[Path], until: float
) -> None:
    """Run what was compiled in turns; raises `TokmillError` if the first one gives no result."""

    def race(numbers: Sequence[int]) -> None:
        programs = [("iree", str(paths[number])) for number in numbers]
        answers = _ask(request | {"programs": programs}, until)
        for number, answer in zip(numbers, answers, strict=True):
            _fill(tried[number], answer)

    first, *rest = [number for number, one in enumerate(tried) if one.status == "ok"]
    try:
        race([first, *rest])
    except ChildDied:
        # One of them ends the process: each runs beside the first one, or that one alone.
        for number in (*rest, first):
            if number == first and tried[first].nanoseconds > 0:
                break
            try:
                race(sorted({first, number}))
            except ChildDied as died:
                tried[number].status = _status(died)
    if tried[0].status != "ok":
        raise _failed(tried[0], until)


def _failed(first: Timed, until: float) -> TokmillError:
    late = time.monotonic() > until
    return TokmillError(
        f"IREE's default of the model gives nothing to compare with: {first.status}",
        hint="one compilation takes longer: allow more by --max-time" if late else "export it anew",
    )


def _ask(request: dict[str, Any], until: float) -> Any:
    left = until - time.monotonic()
    if left <= 0:
        raise _NoTimeError("no time is left", hint="allow more by --max-time")
    return call(CHILD, request, limits=LIMITS._replace(seconds=left))


class _NoTimeError(TokmillError):
    """All time is over."""


def _status(error: TokmillError) -> str:
    if isinstance(error, ChildDied):
        died = dead(error)
        return f"{died.status}: {died.reason.partition(' calls ')[2].partition(' ')[2]}"
    return f"{'timeout' if isinstance(error, _NoTimeError) else 'refused'}: {error.what}"


def _fill(one: Timed, answer: dict[str, Any]) -> None:
    times = answer["times"]
    one.nanoseconds, one.noise = min(times), noise_of(times)
    one.error, one.allowed, one.moved = answer["error"], answer["allowed"], answer["moved"]
    if not one.error <= one.allowed:
        one.status = "wrong"
