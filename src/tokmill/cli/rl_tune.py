"""`tokmill rl tune`."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.cli import rl_problems, rl_tune_model
from tokmill.cli.options import AsJson, Quiet
from tokmill.cli.rl_tune_shown import print_choice, print_operations
from tokmill.errors import TokmillError, UsageError
from tokmill.files import write_file
from tokmill.progress import elapsed, human_count, human_time

MOST_MINUTES = 1e6
"""Nearly two years."""


def tune(
    modules: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A model (.onnx, .mlir), a folder of modules, or sizes such as "
            "'matmul 256 512 1024'.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="SPEC", help="The tuning spec is written there.")
    ],
    minutes: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=MOST_MINUTES,
            help="Time for the search, checks at the end not counted.",
        ),
    ] = 10.0,
    evaluations: Annotated[
        int, typer.Option(min=1, help="Tiles of an operation that are measured at most.")
    ] = 512,
    seed: Annotated[int, rl_problems.SEED] = 0,
    runs: rl_problems.Runs = 5,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where measurements are kept; SPEC.measurements if not."),
    ] = None,
    parameters: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's weights, if they are not in it (.irpa)."),
    ] = None,
    target_cpu: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Make code for this processor, which must run here too: x86-64-v3 has AVX2 and "
            "no AVX-512. Default: this machine's.",
        ),
    ] = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find flags and a tuning spec that make IREE's code for a model faster on this machine.

    The model is compiled with IREE's flags and with channels last, and the dispatches of the best
    are tuned within the time, most time where the model spends its own. Each result is compared
    with IREE's default; what gains nothing stays out of the spec. At the end the whole model is
    timed, and what makes it slower is dropped. Of several modules the operations are tuned one by
    one. A tuning that was ended goes on when it is started again with the same SPEC.
    """
    if out.name in ("", "..") or out.is_dir():
        raise UsageError("-o names no file but a folder", where=str(out), hint="-o model.spec.mlir")
    measure = plugins.require("tokmill.mlir.measure")
    processor = plugins.require("tokmill.mlir.iree.compiler").PROCESSOR
    flags = (f"{processor}{target_cpu}",) if target_cpu else ()
    space = plugins.require("tokmill.mlir.iree.tiles").IreeSpace(flags)
    state, kept = out.with_name(out.name + ".state"), out.with_name(out.name + ".measurements")
    kept = cache or kept
    rl_problems.check_files(
        [*modules, *([str(parameters)] if parameters else [])],
        {
            "-o": out, "--cache": kept, "the model in MLIR": rl_tune_model.beside(out, "mlir"),
            "its weights": rl_tune_model.beside(out, "irpa"),
        },
    )  # fmt: skip
    settings = measure.Settings(runs=runs, seed=seed)
    begin = partial(
        plugins.require("tokmill.mlir.iree.tuning_state").begin, state, seed=seed, flags=flags
    )
    told = _Told(60 * minutes)
    with rl_tune_model.alone(out):
        given = rl_tune_model.read(modules, out, parameters, begin)
        with (
            measure.Measurements(settings, kept, space) as measurements,
            contextlib.nullcontext() if quiet else elapsed(lambda: told.line),
        ):
            if target_cpu:
                _check_target(target_cpu, measurements)
            bounds = {"seconds": told.seconds, "most": evaluations, "seed": seed, "state": state}
            if given.text is None:
                found = plugins.require("tokmill.mlir.iree.tune").tune(
                    given.problems,
                    given.counts,
                    measurements,
                    tick=partial(told.hear, "tiles of operations"),
                    **bounds,
                )
                if found.spec:
                    write_file(out, found.spec)
            else:
                choice, line = _whole(given, measurements, flags, out, told, bounds)
    if given.text is None:
        print_operations(found, given.skipped, out, flags, as_json)
    else:
        print_choice(choice, out, line, as_json)


class _Told:
    """What the line of progress says."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.line = seconds, "tune"

    def hear(self, stage: str, spent: float, done: int) -> None:
        """Hear what is done now, of the seconds of the search, and of evaluations."""
        searched = f"{human_time(spent)} of {human_time(self.seconds)} of the search"
        self.line = f"tune: {stage}, {human_count(done, 'evaluation')}, {searched}"


def _whole(
    given: rl_tune_model.Given,
    measurements: Any,
    flags: tuple[str, ...],
    out: Path,
    told: _Told,
    bounds: dict[str, Any],
) -> tuple[Any, str]:
    """Tune a whole model; return what was chosen, and the line that compiles it."""
    # The printed line is for IREE, so what it reads is what is tuned.
    known = plugins.require("tokmill.mlir.iree.compiler").known(given.text)
    model = plugins.require("tokmill.mlir.iree.model").Model(
        known, measurements, parameters=given.parameters, length=given.length, flags=flags
    )
    choice = plugins.require("tokmill.mlir.iree.tune_model").tune_model(
        model, tick=told.hear, **bounds
    )
    path, text = given.path, model.module(choice.way)
    if path is None or text != given.text or path.suffix != ".mlir":
        path = write_file(rl_tune_model.beside(out, "mlir"), text)
    if choice.spec:
        write_file(out, choice.spec)
    line = rl_problems.iree_line(out if choice.spec else None, str(path), choice.way.flags)
    return choice, line


def _check_target(name: str, measurements: Any) -> None:
    """Refuse a processor that IREE does not know, or whose code does not run here."""
    small = rl_problems.problems_of(["matmul 16 16 16"])[0]
    try:
        result = measurements(small, ())
        why = "" if result.status == "ok" else f"{result.status} {result.reason}"
    except TokmillError as error:
        why = error.what
    if why:
        raise UsageError(
            f"--target-cpu {name}: a small product does not compile and run here: {why}",
            hint="x86-64-v2, x86-64-v3, x86-64-v4, or another name that LLVM has for a processor "
            "whose code this machine runs",
        )
