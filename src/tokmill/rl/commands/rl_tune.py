"""`tokmill rl tune`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import read_file, write_file
from tokmill.base.progress import elapsed, human_count, human_time
from tokmill.rl.commands import rl_problems, rl_tune_model
from tokmill.rl.commands.rl_tune_tables import print_choice
from tokmill.terminal.options import AsJson, Quiet

MOST_MINUTES = 1e6
"""Nearly two years."""


def tune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model (.onnx, .mlir), or sizes such as 'matmul 256 512 1024'."
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="SPEC", help="The tuning spec is written there.")
    ],
    minutes: Annotated[
        float,
        typer.Option(min=0.01, max=MOST_MINUTES, help="Time for all: compiling, search, checks."),
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
    timed, and what makes it slower is dropped. The same command goes on where an earlier one ended:
    what was measured is not measured again.
    """
    seconds = 60 * minutes
    until = time.monotonic() + seconds
    _check_out(out)
    from tokmill.mlir import measure
    from tokmill.mlir.iree import tuned_model as models
    from tokmill.mlir.iree.compiler import PROCESSOR

    flags = (f"{PROCESSOR}{target_cpu}",) if target_cpu else ()
    from tokmill.mlir.iree.tiles import IreeSpace

    space = IreeSpace(flags)
    kept = cache or out.with_name(out.name + ".measurements")
    rl_problems.check_files(
        [model, *([str(parameters)] if parameters else [])],
        {
            "-o": out, "--cache": kept, "the model in MLIR": rl_tune_model.beside(out, "mlir"),
            "its weights": rl_tune_model.beside(out, "irpa"),
        },
    )  # fmt: skip
    line = "tune"

    def tick(stage: str, done: int) -> None:
        nonlocal line
        line = f"tune: {stage}, {human_count(done, 'evaluation')}, of {human_time(seconds)}"

    with rl_tune_model.alone(out):
        given = rl_tune_model.read(model, out, parameters, until)
        with (
            measure.Measurements(measure.Settings(runs=runs, seed=seed), kept, space) as made,
            contextlib.nullcontext() if quiet else elapsed(lambda: line),
        ):
            made.until = until
            if target_cpu:
                _check_target(target_cpu, made)
            # The printed line is for IREE, so what it reads is what is tuned.
            from tokmill.mlir.iree.compiler import known as known_sizes

            known = known_sizes(given.text)
            with models.Model(
                known, made, parameters=given.parameters, length=given.length, flags=flags
            ) as whole:
                from tokmill.mlir.iree.tune_model import tune_model

                choice = tune_model(whole, until=until, most=evaluations, seed=seed, tick=tick)
                text = whole.module(choice.way)
        path = given.path
        if path is None or text != given.text or path.suffix != ".mlir":
            path = write_file(rl_tune_model.beside(out, "mlir"), text)
        if choice.spec:
            write_file(out, choice.spec)
    command = rl_problems.iree_line(out if choice.spec else None, str(path), choice.way.flags)
    print_choice(choice, out, command, as_json)


def _check_out(out: Path) -> None:
    """Refuse a place for a spec where something else is."""
    if out.name in ("", "..") or out.is_dir():
        raise UsageError("-o names no file but a folder", where=str(out), hint="-o model.spec.mlir")
    from tokmill.mlir.iree.spec import HEADER

    header = HEADER.encode()
    if out.exists() and read_file(out, len(header)) != header:
        raise UsageError(
            "-o would replace a file that is no spec of tokmill",
            where=str(out),
            hint="name another file",
        )


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
