"""Programs of other languages that lifters are measured on, built here.

OCaml, D, Fortran and Go: small programs in this folder, with what static libraries bring along.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
MADE = [
    ("words", "OCaml", "ocamlopt", "O2"),
    *(("words", "D", "gdc", level) for level in ("O0", "O2")),
    ("words", "D", "ldc2", "O2"),
    *(("shapes", "Fortran", "gfortran", level) for level in ("O0", "O2")),
    *(("words", "Go", "go", mode) for mode in ("exe", "pie", "386")),
]
"""Name, language, compiler and level of each program; of Go the kind of program."""


def build(run: Callable[..., str], whole: Path, language: str, compiler: str, level: str) -> None:
    """Build one program of `MADE` with the given runner of tools."""
    scratch = whole.with_name(f"{whole.name}-made")
    scratch.mkdir(exist_ok=True)
    out = scratch / "made"
    _compile(run, scratch, out, language, compiler, level)
    out.rename(whole)


def _compile(
    run: Callable[..., str], scratch: Path, out: Path, language: str, compiler: str, level: str
) -> None:
    names = {"OCaml": "words.ml", "D": "words.d", "Fortran": "shapes.f90", "Go": "words.go"}
    name = names[language]
    source = scratch / name
    source.write_bytes((HERE / name).read_bytes())
    if language == "Go":
        small = level == "386"
        wanted = {"GOARCH": "386" if small else "amd64", "GO111MODULE": "off", "CGO_ENABLED": "0"}
        wanted["GOCACHE"] = str(scratch.resolve() / "cache")
        mode = "exe" if small else level
        command = ["go", "build", f"-buildmode={mode}", "-o", out, source]
        run(*command, env=os.environ | wanted)
        return
    options = {
        "ocamlopt": ["-o", out],
        "gdc": [f"-{level}", "-o", out],
        "ldc2": [f"-{level}", f"-of={out}"],
        "gfortran": [f"-{level}", "-static-libgfortran", "-J", scratch, "-o", out],
    }
    run(compiler, *options[compiler], source)
