"""What `tokmill rl tune` tunes: one model with its weights."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
from tokmill.rl.commands import rl_problems


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


def beside(out: Path, suffix: str) -> Path:
    """Return the file for a model or its weights beside a spec."""
    return out.with_name(f"{out.name}.model.{suffix}")


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other processes from tuning into the same file."""
    with writing(out):
        remove_leftovers(out.parent, beside(out, "irpa").name)
        yield


def read(model: str, out: Path, parameters: Path | None, until: float) -> Given:
    """Return the model that a file or a line of sizes names; sizes that are not known are refused.

    An ONNX model is written beside the spec `out` in MLIR. Call it within `alone`.
    """
    path = Path(model)
    if path.is_dir():
        raise UsageError("a folder is no model", where=model, hint="name one of its files")
    if not path.exists():
        if parameters is not None:
            raise UsageError(
                "--parameters names the weights of a model", where=model, hint="name its file"
            )
        (problem,) = rl_problems.problems_of([model])
        return Given(problem.text, problem.length)
    from tokmill.mlir.modules import importing

    if path.suffix.lower() == importing.ONNX:
        text, parameters = _imported(path, out, parameters, until)
        path = write_file(beside(out, "mlir"), text)
    else:
        text = importing.text_of(path)
        importing.check_sizes(text, model)
    return Given(text, _length(text, path_to_text(model)), path, parameters)


def _imported(path: Path, out: Path, parameters: Path | None, until: float) -> tuple[str, Path]:
    """Return the text of an ONNX model, and the file of its weights, written if there is none."""
    from tokmill.mlir.modules import importing

    seconds = until - time.monotonic()
    if parameters is not None:
        return importing.of_onnx(path, None, seconds), parameters
    # IREE writes the weights while it reads the model.
    weights = beside(out, "irpa")
    private = private_path(weights)
    try:
        text = importing.of_onnx(path, private, seconds)
        publish(private, weights)
    finally:
        remove(private)
    return text, weights


def _length(text: str, where: str) -> int:
    """Return how many numbers the longest sum of a model adds."""
    from tokmill.mlir.modules import cut
    from tokmill.mlir.modules.guard import check

    check(text, where, whole=False)
    try:
        return max(int(problem.length) for problem in cut.cut(text, where).problems)
    except cut.NothingAlone:
        # What stands in a loop or a branch is a dispatch of the whole model all the same: no sum
        # over a dimension of its tensors is longer than the largest one.
        shapes = re.findall(r"tensor<((?:\d+x)+)", text)
        return max((int(side) for one in shapes for side in one.split("x")[:-1]), default=1)
