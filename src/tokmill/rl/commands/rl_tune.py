"""`tokmill rl tune`."""

import contextlib
import re
import shlex
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tokmill.base.errors import UsageError
from tokmill.base.files import (
    path_to_text,
    private_path,
    publish,
    remove,
    remove_leftovers,
    write_file,
)
from tokmill.base.locks import writing
from tokmill.base.progress import elapsed, human_time, parse_seconds
from tokmill.rl.commands import rl_problems
from tokmill.terminal.frame import AsJson, Quiet
from tokmill.terminal.output import print_json, print_table, say


class Given(NamedTuple):
    """What is tuned."""

    text: str
    """As IREE compiles it."""
    length: int
    """How many numbers the longest sum of the model adds."""
    path: Path | None = None
    """Where the text stands; None for a line of sizes."""
    parameters: Path | None = None
    """The model's weights, if they are not in it (`.irpa`)."""
    onnx: Path | None = None
    """The model before it was imported, with its own weights; for other engines."""


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model (.onnx, .mlir), or sizes such as 'matmul 256 512 1024'."
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "-o",
        "--out",
        metavar="NAME",
        help="Write the module to compile to NAME.model.mlir, and the weights of an ONNX model "
        "to NAME.model.irpa.",
    ),
]
MaxTime = Annotated[str, typer.Option(metavar="TIME", help="Total time limit, such as 90s or 1h.")]
Parameters = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="External weights of the model (.irpa)."),
]


def tune(
    model: Model,
    out: Out,
    max_time: MaxTime = "10m",
    parameters: Parameters = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the flags and the layout by which IREE runs a model fastest on this machine.

    The model is compiled with IREE's flags and with channels last, and all run in turns. Each
    result is compared with that of IREE's default. Small gains are not recommended. An ONNX
    model is timed under onnxruntime and OpenVINO too, if they are installed.
    """
    until = time.monotonic() + (seconds := parse_seconds(max_time))
    if out.name in ("", "..") or out.is_dir():
        raise UsageError("-o names no file but a folder", where=str(out), hint="-o model")
    module, weights = (out.with_name(f"{out.name}.model.{end}") for end in ("mlir", "irpa"))
    rl_problems.check_files(
        [model, *([str(parameters)] if parameters else [])],
        {"the model in MLIR": module, "its weights": weights},
    )
    line = "tune"

    def tick(name: str) -> None:
        nonlocal line
        line = f"tune: {name}, of {human_time(seconds)}"

    with writing(module):
        remove_leftovers(out.parent, weights.name)
        given = _read(model, module, weights, parameters, until)
        from tokmill.mlir.iree import tune as tuning
        from tokmill.mlir.iree.compiler import FLAGS, generalized
        from tokmill.mlir.modules.importing import keep_f64_flags

        with contextlib.nullcontext() if quiet else elapsed(lambda: line):
            # The printed line is for IREE, so what it reads is what is tuned.
            result = tuning.tune(
                generalized(given.text),
                until=until,
                parameters=given.parameters,
                onnx=given.onnx,
                length=given.length,
                tick=tick,
            )
        path = given.path
        if path is None or result.module != given.text or path.suffix != ".mlir":
            path = write_file(module, result.module)
    flags = [*FLAGS, *keep_f64_flags(result.module), *result.best.way.flags]
    _print(result, shlex.join(["iree-compile", str(path), "-o", "MODULE.vmfb", *flags]), as_json)


def _read(model: str, module: Path, weights: Path, parameters: Path | None, until: float) -> Given:
    """Return the model that a file or a line of sizes names; sizes that are not known are refused.

    An ONNX model is written as MLIR.
    """
    path = Path(model)
    if path.is_dir():
        raise UsageError("a folder is not a model", where=model, hint="name one of its files")
    if not path.exists():
        if parameters is not None:
            raise UsageError(
                "--parameters names the weights of a model", where=model, hint="name its file"
            )
        (problem,) = rl_problems.problems_of([model])
        return Given(problem.text, problem.length)
    from tokmill.mlir.modules import importing

    onnx = None
    if path.suffix.lower() == importing.ONNX:
        onnx = path if parameters is None else None
        text = _imported(path, weights, parameters, until)
        path, parameters = write_file(module, text), parameters or weights
    else:
        text = importing.text_of(path, until)
        importing.check_sizes(text, model)
    length = _length(text, path_to_text(model), until)
    return Given(text, length, path, parameters, onnx)


def _imported(path: Path, weights: Path, parameters: Path | None, until: float) -> str:
    """Return the text of an ONNX model; write its weights if there is no file of them."""
    from tokmill.mlir.modules import importing

    if parameters is not None:
        return importing.of_onnx(path, None, until)
    # IREE writes the weights while it reads the model.
    private = private_path(weights)
    try:
        text = importing.of_onnx(path, private, until)
        publish(private, weights)
    finally:
        remove(private)
    return text


def _length(text: str, where: str, until: float) -> int:
    from tokmill.mlir.modules import cut
    from tokmill.mlir.modules.guard import check

    check(text, where, whole=False, seconds=max(0.0, until - time.monotonic()))
    try:
        return max(int(problem.length) for problem in cut.cut(text, where).problems)
    except cut.NotSchedulable:
        # What stands in a loop or a branch is part of the whole model all the same: no sum over a
        # dimension of its tensors is longer than the largest one.
        shapes = re.findall(r"tensor<((?:\d+x)+)", text)
        return max((int(side) for one in shapes for side in one.split("x")[:-1]), default=1)


def _print(result: Any, line: str, as_json: bool) -> None:
    default, best = result.tried[0], result.best
    if as_json:
        print_json(
            {
                "compile": line,
                "best": best.way.name,
                "flags": best.way.flags,
                "channels_last": best.way.last,
                "milliseconds": best.nanoseconds / 1e6,
                "default_milliseconds": default.nanoseconds / 1e6,
                "noise": default.noise,
                "error": best.error,
                "allowed_error": best.allowed,
                "other_input_difference": best.moved,
                "tried": _timed(result.tried),
                "engines": _timed(result.engines),
            }
        )
        return
    print_table(
        ["the whole model", "ms", "times as fast"],
        [
            [
                one.way.name,
                f"{one.nanoseconds / 1e6:.5g}",
                f"{default.nanoseconds / one.nanoseconds:.2f}"
                if one.status == "ok"
                else one.status,
            ]
            for one in [*result.tried, *result.engines]
        ],
    )
    for one in result.engines:
        if one.status == "wrong":
            say(
                f"note: {one.way.name} gives other results than IREE's default, by {one.error:.1e} "
                f"of the largest ({one.allowed:.1e} is allowed); either may compute the model "
                "wrong, or with less precision (OpenVINO computes f64 in f32)"
            )
    if best is default:
        say(
            f"nothing is faster than IREE's default, {default.nanoseconds / 1e6:.5g} ms, by more "
            f"than the noise of {default.noise:.1%}"
        )
        return
    say(
        f"{best.way.name}: {default.nanoseconds / best.nanoseconds:.2f} times as fast as IREE's "
        f"default (noise {default.noise:.1%}); results differ by {best.error:.1e} of the largest "
        f"({best.allowed:.1e} is allowed)"
    )
    if not best.moved > best.allowed:
        say(
            "note: another input gives the same results, so that they are equal proves little; are "
            "the weights those of a model that was trained?"
        )
    say(f"to apply it: {line}")


def _timed(rows: list[Any]) -> list[dict[str, Any]]:
    return [
        {"name": one.way.name, "status": one.status, "milliseconds": one.nanoseconds / 1e6}
        for one in rows
    ]
