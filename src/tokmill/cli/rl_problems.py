"""What the commands of `tokmill rl` share: modules and options."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.cli.output import check_outputs, say
from tokmill.errors import Interrupted, MachineError, UsageError
from tokmill.files import read_file

OWN = b"// tokmill "
"""What a schedule or a spec that was written here begins with."""

Modules = Annotated[
    list[str],
    typer.Argument(
        metavar="MODULE...",
        help="A .mlir file, a folder of them, or sizes such as 'matmul 256 512 1024' or "
        "'matmul 64 64 64, relu'.",
    ),
]
MOST_RUNS = 1_000_000
Runs = Annotated[
    int,
    typer.Option(min=1, max=MOST_RUNS, help="Runs of each schedule; the least time counts."),
]
MOST_SEED = (1 << 63) - 1
"""As of recipes (`training.recipe.check.SEEDS`), but none below 0."""
SEED = typer.Option(min=0, max=MOST_SEED, help="Of random choices and of the inputs' numbers.")
CacheFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Measurements are kept there and not made twice."),
]


def iree_line(spec: Path | None, module: str = "MODULE.mlir", extra: tuple[str, ...] = ()) -> str:
    """Return the command that compiles a module with a spec, if any, and other flags."""
    flags = plugins.require("tokmill.mlir.iree.compiler").complete(extra)
    if spec is not None:
        flags.append(f"--iree-codegen-tuning-spec-path={spec}")
    return shlex.join(["iree-compile", module, "-o", "MODULE.vmfb", *flags])


@contextlib.contextmanager
def continuing(cache: Path | None) -> Iterator[None]:
    """Say of an interrupted command what continues it: only a cache keeps measurements."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            "by a signal",
            hint="run the same command again: it continues"
            if cache is not None
            else "nothing is kept; with --cache FILE the same command continues",
        ) from None


def check_files(modules: list[str], outputs: Mapping[str, Path | None]) -> None:
    """Refuse an output that is a module, or another output; `outputs`: option → file."""
    inputs: list[Path] = []
    for name in map(Path, modules):
        inputs += filter(_is_module, name.glob("*.mlir")) if name.is_dir() else [name]
    check_outputs(outputs, inputs)


def _is_module(path: Path) -> bool:
    """Say whether a file in a folder of modules is none of tokmill's own results."""
    return path.is_file() and not read_file(path, len(OWN)).startswith(OWN)


def problems_of(modules: list[str]) -> list[Any]:
    """Return the problems that files, folders and lines of sizes name."""
    problem = plugins.require("tokmill.mlir.modules.problem")
    importing = plugins.require("tokmill.mlir.modules.importing")
    found: list[Any] = []
    for name in modules:
        path = Path(name)
        if path.suffix.lower() == importing.ONNX and not path.exists():
            raise MachineError("there is no such file", where=name, hint="check the path")
        if path.suffix.lower() == importing.ONNX:
            raise UsageError(
                "a model is no single module",
                where=name,
                hint="`tokmill rl tune` and `tokmill build mlir` cut it into operations",
            )
        if path.is_dir():
            folder = problem.of_folder(path)
            for line in folder.said(name):
                say(f"note: {line}")
            found += folder.problems
        elif path.suffix == ".mlir" or path.exists():
            found.append(problem.of_file(path))
        else:
            found.append(problem.of_line(name))
    return found
