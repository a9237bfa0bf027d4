"""Element types of tensors: arrays of each, random numbers, and how far two results may differ."""

import re
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError

TYPES = ("f32", "f64", "f16", "bf16", "i64", "i32", "i16", "i8", "i1")
"""The element types that arguments and results may have."""
EXTRACT = re.compile(r"\btensor\.extract\b")
GATHER = re.compile(r"\b\w+\.(?:gather|scatter)\b")
TENSOR = re.compile(r"tensor<(\d+(?:x\d+)*)x")
DIVISION = re.compile(r"\barith\.(?:ceil|floor)?(?:div|rem)[su]i\b")
SHIFT = re.compile(r"\barith\.sh(?:li|rsi|rui)\b")
_SLACK = {2: (1.0, 4.0)}
"""By bytes of a float: how many times eps · √n results may differ, and how many eps at least."""
_USUAL_SLACK = (16.0, 8.0)


def of(element: str) -> np.dtype[Any]:
    """Return numpy's type of one of `TYPES`; raises `MissingExtraError` for bf16 without `mlir`."""
    if element == "bf16":
        # numpy has none: https://github.com/jax-ml/ml_dtypes, which IREE's runtime uses too.
        return np.dtype(plugins.require("ml_dtypes").bfloat16)
    if element == "i1":
        return np.dtype(np.bool_)
    return np.dtype(f"{'float' if element[0] == 'f' else 'int'}{element[1:]}")


def fill(buffers: list[np.ndarray[Any, Any]], seed: int, text: str) -> None:
    """Fill the input buffers of a module with random numbers, the same for the same seed.

    `text`: the module, which says which whole numbers it allows (`whole_numbers`). Floats of 16
    bits are -1, 0 or 1: sums of their products are whole numbers, which mostly are exact in any
    order. With others the allowed difference would hide what is wrong.
    """
    random = np.random.default_rng(seed)
    least, above = whole_numbers(text)
    for buffer in buffers:
        if not is_float(buffer.dtype):
            low, high = (0, 2) if buffer.dtype.kind == "b" else (least, above)
            buffer[...] = random.integers(low, high, buffer.shape)
        elif buffer.dtype.itemsize == 2:
            buffer[...] = random.integers(-1, 2, buffer.shape)
        else:
            buffer[...] = random.standard_normal(buffer.shape, np.float32)


def whole_numbers(text: str) -> tuple[int, int]:
    """Return the least whole number that is drawn for a module, and the first one above them.

    If the module indexes tensors by numbers that it computes, these are 0 to the least size of
    such a tensor; if it divides whole numbers, they are above 0; if it shifts any, not below.
    """
    low, high = -4, 5
    tables = [line for line in text.splitlines() if EXTRACT.search(line)]
    if GATHER.search(text):
        tables = [text]
    if tables:
        shapes = TENSOR.findall("\n".join(tables))
        low, high = 0, min([high, *(int(size) for shape in shapes for size in shape.split("x"))])
    if DIVISION.search(text):
        low = 1
    elif SHIFT.search(text):
        low = 0
    if low >= high:
        raise TokmillError(
            "the module divides whole numbers and indexes a tensor of one row by such",
            hint="no input is allowed by both",
        )
    return low, high


def poison(buffers: list[np.ndarray[Any, Any]]) -> None:
    """Overwrite output buffers with what no kernel computes: what is not written is seen."""
    for buffer in buffers:
        if is_float(buffer.dtype):
            buffer.fill(np.nan)
        else:
            buffer.fill(True if buffer.dtype.kind == "b" else -77)


def is_float(kind: np.dtype[Any]) -> bool:
    """Return whether numbers of a type are rounded; numpy says so of its own types alone."""
    return kind.kind not in "ib"


def difference(
    wanted: list[np.ndarray[Any, Any]], given: list[np.ndarray[Any, Any]], length: int
) -> tuple[float, float]:
    """Return the largest difference of results and the largest allowed one.

    Both are in units of the largest absolute result; of several results those count that differ by
    more than is allowed for their type, if any do. Sums of n numbers in another order differ by
    some eps · sqrt(n); 16 times that is allowed, once that for floats of 16 bits, and 8 or 4 eps
    at least. Whole numbers must be equal. A number that is no number on one side alone is an
    infinite difference.
    """
    each = [_difference(*pair, length) for pair in zip(wanted, given, strict=True)]
    each = [(error, allowed) for error, allowed in each if not error <= allowed] or each
    return max((one[0] for one in each), default=0.0), max((one[1] for one in each), default=0.0)


def _difference(left: Any, right: Any, length: int) -> tuple[float, float]:
    if not is_float(left.dtype):
        # IREE's types have no sign; other engines' have.
        right = right.view(left.dtype) if right.dtype.kind == "u" else right
        return float(np.any(left != right)), 0.0
    slack, least = _SLACK.get(left.dtype.itemsize, _USUAL_SLACK)
    own = np.finfo if left.dtype.kind == "f" else plugins.require("ml_dtypes").finfo
    eps = float(own(left.dtype).eps)
    allowed = max(slack * eps * float(np.sqrt(max(length, 1))), least * eps)
    left, right = left.astype(np.float64), right.astype(np.float64)
    odd = ~np.isfinite(left) | ~np.isfinite(right)
    if np.any(odd) and not np.array_equal(left[odd], right[odd], equal_nan=True):
        return float("inf"), allowed
    scale = float(np.max(np.abs(left[~odd]), initial=0.0)) or 1.0
    return float(np.max(np.abs(left[~odd] - right[~odd]), initial=0.0)) / scale, allowed
