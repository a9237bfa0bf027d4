"""What `tokmill rl tune` tunes: one model with its weights, or operations one by one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokmill import plugins
from tokmill.cli import rl_problems
from tokmill.errors import UsageError
from tokmill.files import (
    path_to_text,
    private_path,
    publish,
    remove,
    remove_leftovers,
    write_file,
    writing,
)


class Given(NamedTuple):
    """What is tuned."""

    problems: list[Any]
    """The operations."""
    counts: list[int]
    """How often each runs."""
    skipped: list[tuple[str, str]]
    """Operations that are left out, and why."""
    text: str | None = None
    """The one model, as IREE compiles it; None where operations are tuned one by one."""
    path: Path | None = None
    """Where the text stands; None for a line of sizes."""
    parameters: Path | None = None
    """The model's weights, if they are not in it (`.irpa`)."""

    @property
    def length(self) -> int:
        """Return how many numbers the longest sum of the model adds."""
        return max((problem.length for problem in self.problems), default=_side(self.text or ""))


def beside(out: Path, suffix: str) -> Path:
    """Return the file for a model or its weights beside a spec."""
    return out.with_name(f"{out.name}.model.{suffix}")


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other processes from tuning into the same file."""
    with writing(out):
        remove_leftovers(out.parent, beside(out, "irpa").name)
        yield


def read(
    modules: list[str], out: Path, parameters: Path | None, check: Callable[[str], None]
) -> Given:
    """Return what models, modules and lines of sizes name.

    `check` refuses the text of a model before anything is written. An ONNX model is written
    beside the spec `out` in MLIR. Call it within `alone`.
    """
    path = Path(modules[0])
    one = len(modules) == 1 and path.exists() and not path.is_dir()
    if parameters is not None and not one:
        raise UsageError(
            "--parameters names the weights of one model",
            where=", ".join(modules[:3]),
            hint="name one .mlir or .onnx file with it",
        )
    if not one:
        given = _operations(modules, {})
        if len(given.problems) == 1:
            check(given.problems[0].text)
            return given._replace(text=given.problems[0].text)
        return given
    reading = plugins.require("tokmill.mlir.modules.reading")
    if path.suffix.lower() == reading.ONNX:
        text, parameters = _imported(path, out, parameters, check)
        path = beside(out, "mlir")
        write_file(path, text)
    else:
        check(text := reading.text_of(path))
    try:
        given = _operations(modules, {modules[0]: text})
    except plugins.require("tokmill.mlir.modules.cut").NothingAlone:
        # What stands in a loop or a branch is a dispatch of the whole model all the same.
        given = Given([], [], [])
    return given._replace(text=text, path=path, parameters=parameters)


def _imported(
    path: Path, out: Path, parameters: Path | None, check: Callable[[str], None]
) -> tuple[str, Path]:
    """Return the text of an ONNX model, and the file of its weights, written if there is none."""
    importing = plugins.require("tokmill.mlir.modules.importing")
    if parameters is not None:
        check(text := importing.of_onnx(path))
        return text, parameters
    # IREE writes the weights while it reads the model.
    weights = beside(out, "irpa")
    private = private_path(weights)
    try:
        check(text := importing.of_onnx(path, private))
        publish(private, weights)
    finally:
        remove(private)
    return text, weights


def _operations(modules: list[str], texts: dict[str, str]) -> Given:
    """Return the operations of models and modules; `texts`: those that were read already."""
    cut = plugins.require("tokmill.mlir.modules.cut")
    guard = plugins.require("tokmill.mlir.modules.guard")
    reading = plugins.require("tokmill.mlir.modules.reading")
    problems: dict[str, Any] = {}
    counts: dict[str, int] = {}
    skipped: list[tuple[str, str]] = []
    for name in modules:
        path = Path(name)
        if path.is_file():
            text, where = texts.get(name) or reading.text_of(path), path_to_text(name)
            guard.check(text, where, whole=False)
            made = cut.cut(text, where)
            skipped += made.skipped
            pairs = list(zip(made.problems, made.counts, strict=True))
        else:
            pairs = [(problem, 1) for problem in rl_problems.problems_of([name])]
        for problem, count in pairs:
            problems.setdefault(problem.text, problem)
            counts[problem.text] = counts.get(problem.text, 0) + count
    return Given(list(problems.values()), [counts[text] for text in problems], skipped)


def _side(text: str) -> int:
    """Return the largest dimension of a module's tensors: no sum over one of them is longer."""
    shapes = re.findall(r"tensor<((?:\d+x)+)", text)
    return max((int(side) for shape in shapes for side in shape.split("x")[:-1]), default=1)
