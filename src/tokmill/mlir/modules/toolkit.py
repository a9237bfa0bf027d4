"""MLIR as the wheel `torch-mlir` has it: modules are read with errors that name the line."""

import re
from pathlib import Path
from typing import Any

from tokmill import plugins
from tokmill.base import files
from tokmill.base.errors import TokmillError

LARGEST = 64 << 20
"""Bytes of text that a module may have: weights belong in a file beside it."""
_OLDER = {
    r"\btensor\.((?:un)?pack)\b": r"linalg.\1",
    r"\barith\.(max|min)f\b": r"arith.\1imumf",
    r"\blinalg\.init_tensor *\[[\d, ]*\]": "tensor.empty()",
}
"""Names of operations in earlier versions of MLIR → how the same is written now."""


def text_of(path: Path) -> str:
    """Return the text of a file, in the names of today (`_OLDER`)."""
    data = files.read_file(path, LARGEST + 1)
    if len(data) > LARGEST:
        raise _too_large(str(path))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise TokmillError(
            f"byte {error.start} is not UTF-8",
            where=str(path),
            hint="a module is text; bytecode becomes text by `mlir-opt`",
        ) from None
    for old, new in _OLDER.items():
        text = re.sub(old, new, text)
    return text


def ir() -> Any:
    return plugins.require("torch_mlir.ir")


def context() -> Any:
    """Return a new context. Modules and what was found in them live in it."""
    return ir().Context()


def parse(text: str, inside: Any, where: str) -> Any:
    """Return a verified module, parsed in a context; `where` names the file in errors."""
    if len(text) > LARGEST:
        raise _too_large(where)
    bindings = ir()
    try:
        with inside:
            module = bindings.Module.parse(text)
            module.operation.verify()
    except bindings.MLIRError as error:
        message = first_error(str(error))
        line = re.match(r"(\d+):\d+: ", message)
        raise TokmillError(
            f"this is not a valid MLIR module: {message[line.end() :] if line else message}",
            where=f"{where}:{line[1]}" if line else where,
            hint="the syntax is that of LLVM 24; `tokmill rl` reads what its `mlir-opt` reads",
        ) from None
    return module


def _too_large(where: str) -> TokmillError:
    return TokmillError(
        f"the module has more than {LARGEST >> 20} MiB of text",
        where=where,
        hint="export it with its weights in a file of their own (externalized parameters)",
    )


def first_error(text: str) -> str:
    """Return the first error of MLIR's report in one line, `line:column: message`."""
    for line in text.splitlines():
        match = re.match(r'error: (?:"[^"]*":)?(.*)', line.strip())
        if match:
            return match[1].strip()
    return " ".join(text.split())[:200]
