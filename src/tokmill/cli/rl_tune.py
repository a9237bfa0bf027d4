"""`tokmill rl tune`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.cli import rl_problems
from tokmill.cli.options import AsJson, Quiet
from tokmill.cli.output import print_json, print_table, say
from tokmill.errors import TokmillError, UsageError
from tokmill.files import write_file
from tokmill.progress import Progress, human_count


def tune(
    modules: rl_problems.Modules,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="SPEC", help="The tuning spec is written there.")
    ],
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Time for the search, checks at the end not counted.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Of random choices and of the inputs' numbers.")] = 0,
    runs: rl_problems.Runs = 5,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where measurements are kept; SPEC.measurements if not."),
    ] = None,
    parameters: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's weights, if they are not in it (.irpa)."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find a tuning spec that makes IREE's code for a model faster on this machine.

    The operations of the model are tuned within the time, most time where the model spends its
    own. Each result is compared with IREE's default; an operation that gains nothing stays out of
    the spec. At the end the whole model is compiled with and without the spec and compared. A
    tuning that was ended goes on when it is started again with the same SPEC.
    """
    if not math.isfinite(minutes):
        raise UsageError(f"--minutes {minutes}: this is no time", hint="--minutes 10")
    tuning = plugins.require("tokmill.mlir.iree.tune")
    measure = plugins.require("tokmill.mlir.measure")
    space = rl_problems.space_called("iree")
    model, parameters = _model(modules, out, parameters)
    problems, counts, skipped = _operations(modules)
    seconds = 60 * minutes
    state = out.with_name(out.name + ".state")
    with (
        measure.Measurements(
            measure.Settings(runs=runs, seed=seed),
            cache or out.with_name(out.name + ".measurements"),
            space,
        ) as measurements,
        Progress("tune", int(seconds), unit="seconds", quiet=quiet) as progress,
    ):
        shown = 0

        def tick(spent: float, evaluations: int) -> None:
            nonlocal shown
            step = min(int(spent), int(seconds)) - shown
            if step > 0:
                progress.advance(step)
                shown += step

        found = tuning.tune(
            problems, counts, measurements, seconds=seconds, seed=seed, state=state, tick=tick
        )
    whole = None
    if found.spec:
        length = max(problem.length for problem in problems)
        text = model if model is not None else problems[0].text
        if model is not None or len(problems) == 1:
            whole = tuning.whole(
                text, found.spec, runs=runs, seed=seed, length=length, parameters=parameters
            )
        if whole is not None and whole.status != "ok":
            raise TokmillError(
                f"the model with the spec gives other results: {whole.error:.2g} of the largest, "
                f"and {whole.allowed:.2g} is allowed; no spec is written",
                where=", ".join(modules),
                hint="tune fewer operations, and report it",
            )
        write_file(out, found.spec)
    _print(found, whole, skipped, out, modules, as_json)


def _model(
    modules: list[str], out: Path, parameters: Path | None
) -> tuple[str | None, Path | None]:
    """Return the text of the one model that is given, as IREE compiles it, and its weights.

    None for sizes, and for several. An ONNX model is written beside the spec in MLIR.
    """
    path = Path(modules[0])
    if len(modules) != 1 or path.is_dir() or not path.exists():
        return None, parameters
    reading = plugins.require("tokmill.mlir.modules.reading")
    if path.suffix.lower() != reading.ONNX:
        return reading.text_of(path), parameters
    weights = parameters or _beside(out, "irpa")
    text = plugins.require("tokmill.mlir.modules.importing").of_onnx(
        path, None if parameters else weights
    )
    write_file(_beside(out, "mlir"), text)
    return text, weights


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(f"{out.name}.model.{suffix}")


def _operations(modules: list[str]) -> tuple[list[Any], list[int], list[tuple[str, str]]]:
    """Return the operations of models and modules, how often each runs, and what is skipped."""
    cut = plugins.require("tokmill.mlir.modules.cut")
    guard = plugins.require("tokmill.mlir.modules.guard")
    reading = plugins.require("tokmill.mlir.modules.reading")
    problems: dict[str, Any] = {}
    counts: dict[str, int] = {}
    skipped: list[tuple[str, str]] = []
    for name in modules:
        path = Path(name)
        if path.is_file():
            text = reading.text_of(path)
            guard.check(text, name, whole=False)
            made = cut.cut(text, name)
            skipped += made.skipped
            pairs = list(zip(made.problems, made.counts, strict=True))
        else:
            pairs = [(problem, 1) for problem in rl_problems.problems_of([name])]
        for problem, count in pairs:
            problems.setdefault(problem.text, problem)
            counts[problem.text] = counts.get(problem.text, 0) + count
    return list(problems.values()), [counts[text] for text in problems], skipped


def _print(
    found: Any,
    whole: Any,
    skipped: list[tuple[str, str]],
    out: Path,
    modules: list[str],
    as_json: bool,
) -> None:
    name = modules[0] if Path(modules[0]).is_file() else "MODULE.mlir"
    if name.lower().endswith(".onnx"):
        name = str(_beside(out, "mlir"))
    line = rl_problems.iree_line(out, name)
    if as_json:
        print_json(
            {
                "spec": str(out) if found.spec else None,
                "compile": line if found.spec else None,
                "operations": [_row(part) for part in found.parts],
                "skipped": [{"operation": name, "reason": why} for name, why in skipped],
                "whole": None
                if whole is None
                else {
                    "default_milliseconds": whole.default / 1e6,
                    "milliseconds": whole.tuned / 1e6,
                    "noise": whole.noise,
                    "obeyed": whole.obeyed,
                    "dispatches": whole.dispatches,
                    "error": whole.error,
                    "allowed_error": whole.allowed,
                },
            }
        )
        return
    print_table(
        ["operation", "runs", "ms", "IREE's default", "times as fast", "evaluations"],
        [
            [
                part.name,
                str(part.count),
                f"{part.tuned / 1e6:.3f}",
                f"{part.default / 1e6:.3f}",
                f"{part.gain:.2f}" if part.status == "tuned" else part.status,
                str(part.evaluations),
            ]
            for part in found.parts
        ],
    )
    for why, names in _reasons(skipped).items():
        say(f"left out: {human_count(len(names), 'operation')} ({', '.join(names[:3])}): {why}")
    if not found.spec:
        say("no operation is faster with other tiles: no spec is written")
        return
    say(f"wrote {out}")
    if whole is None:
        say("note: operations were compared one by one; a whole is compared where one is named")
    else:
        ratio = whole.default / whole.tuned
        say(
            f"whole: {whole.tuned / 1e6:.3f} ms, IREE's default {whole.default / 1e6:.3f} ms "
            f"({ratio:.2f} times as fast, noise {whole.noise:.1%}); results are equal within "
            f"{whole.allowed:.1e}; {whole.obeyed} of {whole.dispatches} dispatches obey the spec"
        )
        if ratio < 1 - whole.noise:
            say("note: the whole is slower with the spec than without it")
    say(f"to apply it: {line}")


def _row(part: Any) -> dict[str, Any]:
    return {
        "operation": part.name,
        "runs": part.count,
        "status": part.status,
        "milliseconds": part.tuned / 1e6,
        "default_milliseconds": part.default / 1e6,
        "speedup": part.gain,
        "evaluations": part.evaluations,
    }


def _reasons(skipped: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in skipped:
        found.setdefault(why, []).append(name)
    return found
