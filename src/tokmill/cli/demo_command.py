"""`tokmill demo`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tokmill import plugins


def demo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where all is written.")] = Path(
        "demo"
    ),
) -> int:
    """From real text and real programs to two trained models and a report, in some four minutes.

    It runs a short shell script, which says each command that it runs. The same command again
    continues where it was stopped.
    """
    for package in ("gigatoken", "torch", "iced_x86", "matplotlib"):
        with plugins.extras():
            if find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
    here = Path(__file__).parents[1]
    # In a wheel the examples are in the package, in a clone of the repository at its root.
    root = here if (here / "examples").is_dir() else here.parents[1]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        ["sh", str(root / "examples/demo/demo.sh"), str(folder)],
        env={**os.environ, "PATH": programs},
    ).returncode
