"""Files of modules and models: `.mlir` text, and `.onnx` by IREE's importer."""

from __future__ import annotations

from pathlib import Path

from tokmill.mlir.modules import importing, toolkit

ONNX = ".onnx"
SUFFIXES = (".mlir", ONNX)


def text_of(path: Path) -> str:
    """Return a file as the text of a module that `cut` reads.

    Raises `TokmillError` for what is no text, and for models that cannot be imported.
    """
    if path.suffix.lower() == ONNX:
        return importing.of_onnx(path)
    text = toolkit.text_of(path)
    return importing.of_iree(text, str(path)) if importing.is_of_iree(text) else text
