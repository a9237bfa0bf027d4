"""Programs of other languages that lifters are measured on, built here.

Haskell: alex, from Debian's source package, with GHC, static and with shared libraries. Its
libraries are linked in without the symbols of local functions, so only alex's own code counts.
OCaml, D, Fortran and Go: small programs in this folder, with what static libraries bring along.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
PATHS = """\
module Paths_alex where
import Data.Version
version :: Version
version = makeVersion [1]
getDataDir :: IO FilePath
getDataDir = return "."
"""
"""What Cabal would write."""
MADE = [
    *(("alex", "Haskell", "ghc", level) for level in ("O0", "O2")),
    ("alex-shared", "Haskell", "ghc", "O1"),
    ("words", "OCaml", "ocamlopt", "O2"),
    *(("words", "D", "gdc", level) for level in ("O0", "O2")),
    ("words", "D", "ldc2", "O2"),
    *(("shapes", "Fortran", "gfortran", level) for level in ("O0", "O2")),
    *(("words", "Go", "go", mode) for mode in ("exe", "pie", "386")),
]
"""Name, language, compiler and level of each program; of Go the kind of program."""


def build(
    run: Callable[..., str], whole: Path, alex: Path, language: str, compiler: str, level: str
) -> None:
    """Build one program of `MADE` with the given runner of tools."""
    scratch = whole.with_name(f"{whole.name}-made")
    scratch.mkdir(exist_ok=True)
    out = scratch / "made"
    _compile(run, scratch, out, alex, language, compiler, level)
    out.rename(whole)


def _compile(
    run: Callable[..., str],
    scratch: Path,
    out: Path,
    alex: Path,
    language: str,
    compiler: str,
    level: str,
) -> None:
    if language == "Haskell":
        (scratch / "Paths_alex.hs").write_text(PATHS)
        flags = ["-dynamic"] if "shared" in scratch.name else []
        assembler = ["-pgma", sys.executable, "-opta", HERE / "ghc_assembler.py"]
        extensions = ["-XHaskell98", "-XCPP", "-XMagicHash", "-XDatatypeContexts"]
        folders = [f"-i{alex / 'src'}", f"-i{scratch}", "-outputdir", scratch]
        words = [f"-{level}", "-w", *flags, *extensions, *folders, *assembler]
        run("ghc", *words, "-o", out, alex / "src" / "Main.hs")
        return
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


def own_code(whole: Path) -> tuple[int, int] | None:
    """Return between which addresses all functions have symbols; None where all code has them.

    Static programs of Haskell begin with their own modules; libraries come behind.
    """
    scratch = whole.with_name(f"{whole.name}-made")
    objects = sorted(scratch.rglob("*.o")) if "-ghc-" in whole.name else []
    names = {name for path in objects for _, name in _symbols(path)}
    found = [address for address, name in _symbols(whole) if name in names] if names else []
    return (min(found), max(found)) if found else None


def _symbols(path: Path) -> list[tuple[int, str]]:
    """Return the global functions of a file."""
    text = subprocess.run(
        ["nm", "--defined-only", path], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in text.stdout.splitlines()]
    return [(int(line[0], 16), line[2]) for line in lines if line[1] == "T"]
