"""Files of modules and models: `.mlir` text, and `.onnx` by IREE's importer."""

from __future__ import annotations

from pathlib import Path

from tokmill import files
from tokmill.errors import TokmillError
from tokmill.mlir.modules import importing, toolkit

ONNX = ".onnx"
SUFFIXES = (".mlir", ONNX)


def text_of(path: Path) -> str:
    """Return a file as the text of a module that `cut` reads.

    Raises `TokmillError` for what is no text, and for models that cannot be imported.
    """
    if path.suffix.lower() == ONNX:
        return importing.of_onnx(path)
    data = files.read_start(path, toolkit.LARGEST + 1)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise TokmillError(
            f"byte {error.start} is not UTF-8",
            where=str(path),
            hint="a module is text; bytecode becomes text by `mlir-opt`",
        ) from None
    return importing.of_iree(text, str(path)) if importing.is_of_iree(text) else text
