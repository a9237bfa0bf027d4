"""`tokmill rl tune`."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.cli import rl_problems
from tokmill.cli.options import AsJson, Quiet
from tokmill.cli.output import print_json, print_table, say
from tokmill.errors import TokmillError, UsageError
from tokmill.files import (
    locked,
    machine_errors,
    make_folder,
    path_to_text,
    private_path,
    remove,
    write_file,
)
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
    tuning = plugins.require("tokmill.mlir.iree.tune")
    measure = plugins.require("tokmill.mlir.measure")
    processor = plugins.require("tokmill.mlir.iree.compiler").PROCESSOR
    flags = (f"{processor}{target_cpu}",) if target_cpu else ()
    space = plugins.require("tokmill.mlir.iree.tiles").IreeSpace(flags)
    kept = cache or out.with_name(out.name + ".measurements")
    rl_problems.check_files(
        [*modules, *([str(parameters)] if parameters else [])],
        {
            "-o": out, "--cache": kept, "the model in MLIR": _beside(out, "mlir"),
            "its weights": _beside(out, "irpa"),
        },
    )  # fmt: skip
    with _alone(out):
        state = out.with_name(out.name + ".state")

        def check(text: str) -> None:
            plugins.require("tokmill.mlir.iree.tuning_state").begin(state, text, seed, flags)

        model, parameters = _model(modules, out, parameters, check)
        try:
            problems, counts, skipped = _operations(modules)
        except plugins.require("tokmill.mlir.modules.cut").NothingAlone:
            # What stands in a loop or a branch is a dispatch of the whole model all the same.
            if model is None:
                raise
            problems, counts, skipped = [], [], []
        if model is None and len(problems) == 1:
            model = problems[0].text
            check(model)
        seconds = 60 * minutes
        said = "tune"
        with (
            measure.Measurements(
                measure.Settings(runs=runs, seed=seed), kept, space
            ) as measurements,
            contextlib.nullcontext() if quiet else elapsed(lambda: said),
        ):
            if target_cpu:
                _check_target(target_cpu, measurements)

            def tick(stage: str, spent: float, done: int) -> None:
                nonlocal said
                searched = f"{human_time(spent)} of {human_time(seconds)} of the search"
                said = f"tune: {stage}, {human_count(done, 'evaluation')}, {searched}"

            given: dict[str, Any] = {"seconds": seconds, "most": evaluations, "seed": seed}
            given["state"] = state
            if model is None:
                stage = partial(tick, "tiles of operations")
                found = tuning.tune(problems, counts, measurements, tick=stage, **given)
            else:
                length = max((problem.length for problem in problems), default=_side(model))
                # The printed line is for IREE, so what it reads is what is tuned.
                known = plugins.require("tokmill.mlir.iree.compiler").known(model)
                whole = plugins.require("tokmill.mlir.iree.model").Model(
                    known, measurements, parameters=parameters, length=length, flags=flags
                )
                choice = plugins.require("tokmill.mlir.iree.tune_model").tune_model(
                    whole, tick=tick, **given
                )
                module = whole.module(choice.way)
        if model is None:
            if found.spec:
                write_file(out, found.spec)
            _print(found, skipped, out, flags, as_json)
            return
        name = modules[0] if Path(modules[0]).is_file() else "MODULE.mlir"
        if module != model or not name.endswith(".mlir") or name == "MODULE.mlir":
            name = str(_beside(out, "mlir"))
            write_file(Path(name), module)
        if choice.spec:
            write_file(out, choice.spec)
        line = rl_problems.iree_line(out if choice.spec else None, name, choice.way.flags)
        _print_choice(choice, out, line, as_json)


def _side(text: str) -> int:
    """Return the largest dimension of a module's tensors: no sum over one of them is longer."""
    shapes = re.findall(r"tensor<((?:\d+x)+)", text)
    return max((int(side) for shape in shapes for side in shape.split("x")[:-1]), default=1)


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


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep other processes from tuning into the same file."""
    make_folder(out.parent)
    lock = out.with_name(out.name + ".lock")
    with locked(lock, f"another process tunes {out.name}", "wait for it, or choose another file"):
        try:
            yield
        finally:
            remove(lock)


def _model(
    modules: list[str], out: Path, parameters: Path | None, check: Callable[[str], None]
) -> tuple[str | None, Path | None]:
    """Return the text of the one model that is given, as IREE compiles it, and its weights.

    None for sizes, and for several. `check` refuses a text before anything is written. An ONNX
    model is written beside the spec in MLIR.
    """
    path = Path(modules[0])
    if len(modules) != 1 or path.is_dir() or not path.exists():
        return None, parameters
    reading = plugins.require("tokmill.mlir.modules.reading")
    if path.suffix.lower() != reading.ONNX:
        text = reading.text_of(path)
        check(text)
        return text, parameters
    importing = plugins.require("tokmill.mlir.modules.importing")
    if parameters is not None:
        check(text := importing.of_onnx(path))
    else:
        # IREE writes the weights as it reads the model. They replace others at the end.
        parameters = _beside(out, "irpa")
        begun = private_path(parameters)
        try:
            check(text := importing.of_onnx(path, begun))
            with machine_errors("write", parameters):
                os.replace(begun, parameters)
        finally:
            remove(begun)
    write_file(_beside(out, "mlir"), text)
    return text, parameters


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
            text, where = reading.text_of(path), path_to_text(name)
            guard.check(text, where, whole=False)
            made = cut.cut(text, where)
            skipped += made.skipped
            pairs = list(zip(made.problems, made.counts, strict=True))
        else:
            pairs = [(problem, 1) for problem in rl_problems.problems_of([name])]
        for problem, count in pairs:
            problems.setdefault(problem.text, problem)
            counts[problem.text] = counts.get(problem.text, 0) + count
    return list(problems.values()), [counts[text] for text in problems], skipped


def _print(
    found: Any, skipped: list[tuple[str, str]], out: Path, flags: tuple[str, ...], as_json: bool
) -> None:
    line = rl_problems.iree_line(out, extra=flags)
    if as_json:
        print_json(
            {
                "spec": str(out) if found.spec else None,
                "compile": line if found.spec else None,
                "operations": [_row(part) for part in found.parts],
                "skipped": [{"operation": name, "reason": why} for name, why in skipped],
                "whole": None,
            }
        )
        return
    _print_parts(found.parts, skipped)
    if not found.spec:
        say("no operation is faster with other tiles: no spec is written")
        _say_if_stale(out)
        return
    say(f"wrote {out}")
    say("note: operations were compared one by one; a whole is compared where one is named")
    say(f"to apply it: {line}")


def _say_if_stale(out: Path) -> None:
    if out.exists():
        say(f"note: {out} is of an earlier tuning and no part of this result")


def _print_parts(parts: list[Any], skipped: list[tuple[str, str]]) -> None:
    tuning = plugins.require("tokmill.mlir.iree.tune")
    print_table(
        ["operation", "runs", "ms", "IREE's default", "times as fast", "evaluations"],
        [
            [
                part.name,
                str(part.count),
                _milliseconds(part.tuned),
                _milliseconds(part.default),
                f"{part.gain:.2f}" if part.status == "tuned" else part.status,
                str(part.evaluations),
            ]
            for part in parts
        ],
    )
    if missed := sum(part.status == tuning.NOT_REACHED for part in parts):
        say(
            f"{human_count(missed, 'operation')} not reached: the same command with more --minutes "
            "goes on from here"
        )
    for why, names in _reasons(skipped).items():
        say(f"left out: {human_count(len(names), 'operation')} ({', '.join(names[:3])}): {why}")


def _print_choice(choice: Any, out: Path, line: str, as_json: bool) -> None:
    """Print what was found for a whole model."""
    default, untuned, tuned = choice.default, choice.untuned, choice.tuned
    if as_json:
        print_json(
            {
                "spec": str(out) if choice.spec else None,
                "compile": line,
                "flags": list(choice.way.flags),
                "channels_last": choice.way.last,
                "operations": [_row(part) for part in choice.parts],
                "skipped": [{"operation": name, "reason": why} for name, why in choice.skipped],
                "tried": [
                    {"name": one.name, "status": one.status, "milliseconds": one.nanoseconds / 1e6}
                    for one in choice.flags
                ],
                "whole": {
                    "default_milliseconds": default.nanoseconds / 1e6,
                    "best_flags": untuned.name,
                    "best_flags_milliseconds": untuned.nanoseconds / 1e6,
                    "milliseconds": tuned.nanoseconds / 1e6,
                    "noise": default.noise,
                    "obeyed": choice.obeyed if choice.spec else None,
                    "dispatches": tuned.dispatches if choice.spec else None,
                    "error": tuned.error,
                    "allowed_error": tuned.allowed,
                    "other_input_difference": tuned.moved,
                },
            }
        )
        return
    _print_parts(choice.parts, choice.skipped)
    print_table(
        ["the whole model", "ms", "times as fast"],
        [
            [
                one.name,
                f"{one.nanoseconds / 1e6:.3f}",
                f"{choice.flags[0].nanoseconds / one.nanoseconds:.2f}"
                if one.status == "ok"
                else one.status,
            ]
            for one in choice.flags
        ],
    )
    if not choice.spec:
        least = plugins.require("tokmill.mlir.iree.tune").LEAST
        simpler = "these flags alone" if choice.way.flags else "IREE's default"
        say(f"no spec makes the whole {least - 1:.0%} faster than {simpler}: no spec is written")
        _say_if_stale(out)
    else:
        say(f"wrote {out}: {choice.obeyed} of {tuned.dispatches} dispatches obey it")
    ratio = default.nanoseconds / tuned.nanoseconds
    say(
        f"whole: {tuned.nanoseconds / 1e6:.3f} ms ({choice.way.name}"
        f"{', tuned' if choice.spec else ''}), IREE's default {default.nanoseconds / 1e6:.3f} ms "
        f"({ratio:.2f} times as fast, noise {default.noise:.1%}), best flags alone "
        f"{untuned.nanoseconds / 1e6:.3f} ms ({untuned.name}); results are equal within "
        f"{tuned.allowed:.1e}"
    )
    if not tuned.moved > tuned.allowed:
        say(
            "note: another input gives the same results, so that they are equal proves little; are "
            "the weights those of a model that was trained?"
        )
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


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}" if math.isfinite(nanoseconds) else "-"


def _reasons(skipped: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in skipped:
        found.setdefault(why, []).append(name)
    return found
