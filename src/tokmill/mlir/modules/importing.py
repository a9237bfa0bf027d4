"""Models of other forms as modules that `cut` reads, by IREE's tools in children with limits.

An `.onnx` file becomes torch's dialect by `iree-import-onnx`, and linalg on tensors by
`iree-compile --compile-to=input`, which folds batch norms. Weights stay outside: shapes are all
that is read. What comes out is printed in the generic form, which a context without IREE's
dialects can parse.
"""

import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tokmill import plugins
from tokmill.base import files
from tokmill.base.children.child import Limits, run
from tokmill.base.children.child_calls import Scratch
from tokmill.base.errors import MachineError, TokmillError
from tokmill.mlir.modules import toolkit

LIMITS = Limits(seconds=300, memory=8 << 30)
GENERIC = "--mlir-print-op-generic"
IMPORT, COMPILE, OPT = "iree-import-onnx", "iree-compile", "iree-opt"
ONNX = ".onnx"
SUFFIXES = (".mlir", ONNX)


def text_of(path: Path, until: float = math.inf) -> str:
    """Return a file as the text of a module that `cut` reads.

    `until`: when its tools end at the latest (`time.monotonic`).
    """
    if path.suffix.lower() == ONNX:
        return of_onnx(path, None, until)
    text = toolkit.text_of(path)
    # Functions of IREE's dialects in their own syntax.
    own = re.search(r"^\s*util\.(?:func|global)\b", text, re.MULTILINE)
    return of_iree(text, str(path), until) if own else text


def check_sizes(text: str, where: str) -> None:
    """Raise `TokmillError` if a module's function takes tensors of sizes that are not known."""
    for line in text.splitlines():
        head, _, result = line.partition("->")
        if '"hal.tensor.import"' in line:
            head = result
        elif "func.func" not in head or "private" in head:
            continue
        if match := re.search(r"!?(?:torch\.v)?tensor<\[?[^<>]*\?[^<>]*>", head):
            raise TokmillError(
                f"the model takes a {match[0]}: its sizes are not all known",
                where=where,
                hint="export it with fixed sizes, that of the batch too: torch.onnx.export without "
                "dynamic_shapes or dynamic_axes",
            )


def of_onnx(path: Path, parameters: Path | None = None, until: float = math.inf) -> str:
    """Return an ONNX model as the text of a module; write its weights to `parameters` (`.irpa`).

    Raises `MissingExtraError` without the packages `iree-base-compiler` and `onnx`, `TokmillError`
    with the tool's reason for what is not a model, and for operations that it does not know.
    """
    for package in ("onnx", "iree.compiler.ir"):
        plugins.require(package)
    files.read_file(path, 0)
    with Scratch() as scratch:
        torch, linalg = Path(scratch.path, "torch.mlir"), Path(scratch.path, "linalg.mlir")
        # Without its own path the importer could not find weights in files beside the model.
        given = path.absolute()
        kept = ["--no-save-params"]
        if parameters is not None:
            kept = ["--save-params-to", str(parameters.absolute())]
        _tool(
            IMPORT,
            [given, "-o", torch, "--externalize-params", *kept],
            path,
            "IREE imports no such model",
            "export it with `torch.onnx.export(…, dynamo=True, opset_version=18)` and fixed sizes",
            until,
        )
        imported = _read(torch)
        check_sizes(imported, str(path))
        _tool(
            COMPILE,
            [torch, "--compile-to=input", GENERIC, *keep_f64_flags(imported), "-o", linalg],
            path,
            "IREE makes no linalg operations of it",
            "another opset, or simpler operations, may pass",
            until,
        )
        return _declared(_read(linalg), imported)


def _declared(linalg: str, imported: str) -> str:
    """Return a module whose function says what it takes, if it does not use all of it.

    IREE keeps no type of what is not used.
    """
    # The bodies of loops take values too.
    line = re.search(r"^ *func\.func (public )?@.*", imported, re.MULTILINE)
    head = line[0] if line else ""
    given = re.findall(r"%arg\d+: !torch\.vtensor<\[([\d,]*)\],[su]?(\w+)>", head)
    if linalg.count('"hal.tensor.import"') >= len(given):
        return linalg
    kinds = ["x".join([*filter(None, sizes.split(",")), kind]) for sizes, kind in given]
    inputs = ", ".join(f"%input{i}: tensor<{kind}>" for i, kind in enumerate(kinds))
    said = f'iree.reflection = {{iree.abi.declaration = "sync func @main({inputs}) -> ()"}}'
    head, _, tail = linalg.rpartition("{iree.abi.stub}")
    return f"{head}{{iree.abi.stub, {said}}}{tail}"


def keep_f64_flags(module: str) -> list[str]:
    """Return the flag that keeps tensors of f64 as they are, if a module has any.

    IREE's default makes them f32, also those that functions take and return.
    """
    return ["--iree-input-demote-f64-to-f32=false"] if "f64>" in module else []


def of_iree(text: str, where: str, until: float = math.inf) -> str:
    """Return a module of IREE's dialects in the generic form; raises `TokmillError`."""
    plugins.require("iree.compiler.ir")
    with Scratch() as scratch:
        given, generic = Path(scratch.path, "given.mlir"), Path(scratch.path, "made.mlir")
        given.write_text(text, "utf-8")
        _tool(
            OPT,
            [given, GENERIC, "-o", generic],
            Path(where),
            "this is not a valid MLIR module",
            "`iree-compile MODEL --compile-to=input` writes modules that are read",
            until,
        )
        return _read(generic)


def _read(path: Path) -> str:
    return files.read_file(path, toolkit.LARGEST + 1).decode("utf-8", "replace")


def _program(tool: str) -> list[str]:
    """Return what starts a tool.

    The importer is Python. The Python modules of the others would start the programs as children
    of their own, whose memory no limit counts.
    """
    if tool == IMPORT:
        return [sys.executable, "-P", "-m", "iree.compiler.tools.import_onnx"]
    try:
        return [str(plugins.require("iree.compiler.tools.binaries").find_tool(tool))]
    except ValueError as error:
        raise MachineError(
            f"{tool} cannot be started: {error}", hint="install iree-base-compiler anew"
        ) from None


def _tool(
    tool: str,
    arguments: Sequence[Path | str],
    where: Path,
    what: str,
    hint: str,
    until: float,
) -> None:
    command = [*_program(tool), *map(str, arguments)]
    left = until - time.monotonic()
    try:
        limits = LIMITS._replace(seconds=max(0, min(LIMITS.seconds, left)))
        ended = run(command, limits, lifeline=False)
    except OSError as error:
        raise MachineError(
            f"{tool} cannot be started: {error}", hint="are there too many processes?"
        ) from None
    if ended.passed or ended.code:
        why = ended.why() if ended.passed or ended.code < 0 else _reason(ended.stderr)
        hint = "allow more by --max-time" if time.monotonic() > until else hint
        raise TokmillError(f"{what}: {why}", where=str(where), hint=hint)


def _reason(output: str) -> str:
    match = re.search(r"error: (.*)", output)
    lines = [line for line in output.strip().splitlines() if line and not line.startswith(" ")]
    return (match[1] if match else lines[-1] if lines else "it does not say why")[:300]
