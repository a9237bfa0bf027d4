"""Calls of a pickle as data: names, instances, and the calls whose results are plain values."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.base.errors import TokmillError

SPARE = 256 << 20
"""Bytes that any file may cost."""
TIMES = 16
"""More bytes for each byte of the file."""


class Budget:
    """Counts the bytes that are made from a pickle.

    A reference to an earlier value takes a few bytes in a pickle, however large the value is. Code
    that copies or counts the content of values must call `take` first, so that a small file cannot
    use up all memory or time.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.left = SPARE + TIMES * size

    def take(self, size: int) -> None:
        """Use some of the budget; raises `TokmillError` if it is used up."""
        self.left -= size
        if self.left < 0:
            raise TokmillError(
                "the pickle makes far more data than its size allows",
                where=str(self.path),
                hint="it is damaged, or was made to fill the memory of its readers",
            )


Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Name:
    """A function or class that a pickle names; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Instance:
    """A call in a pickle: the function or class, and the arguments."""

    kind: str
    """Name of the class or function."""
    args: tuple[Any, ...] = ()
    state: Any = None
    """Usually a dict: attribute → value."""
    items: list[Any] = field(default_factory=list)
    """Entries of a container: values, or (key, value)."""


def type_name(value: Any) -> str:
    """Return the name of a value's type; for an instance, of its class."""
    return value.kind if isinstance(value, Instance) else type(value).__name__


def check_key(key: Any, budget: Budget, deep: int = 2) -> None:
    """Refuse a key of a dict or set whose hash costs far more than reading it, or equals others.

    The hash of a tuple recurses, and reads all of it for each time that it is a key; integers that
    differ by a multiple of 2^61 - 1 share a hash. Raises `ValueError`, and `TokmillError` if the
    budget is used up. Keys without a hash are refused by Python.
    """
    if type(key) is tuple:
        if not deep:
            raise ValueError("a deep tuple is a key")
        budget.take(16 * len(key))
        for inner in key:
            check_key(inner, budget, deep - 1)
    elif type(key) is int and not -(1 << 64) < key < 1 << 64:
        raise ValueError("an integer of more than 64 bits is a key")


def array_of(value: Any) -> Array | None:
    """Return the numpy array of an `Instance`; None for other values, and arrays of objects.

    Both ways to pickle an array are known: `_reconstruct` with a state, `_frombuffer`.
    """
    if not isinstance(value, Instance):
        return None
    try:
        if value.kind == "numpy.ndarray" and value.state is not None:
            _, shape, dtype, fortran, data = value.state
        elif value.kind.endswith(".numeric._frombuffer"):
            data, dtype, shape, order = value.args
            fortran = order == "F"
        else:
            return None
        kind = _dtype(dtype)
        if kind is None or not isinstance(data, bytes | bytearray):
            return None
        flat: Array = np.frombuffer(data, kind)
        return flat.reshape(shape, order="F" if fortran else "C")
    except (ValueError, TypeError, OverflowError):
        return None


def _dtype(value: Any) -> np.dtype[Any] | None:
    """Return a dtype of numbers or strings; None for any other."""
    if not isinstance(value, Instance) or value.kind != "numpy.dtype" or not value.args:
        return None
    code, state = value.args[0], value.state
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
    if not isinstance(code, str) or not re.fullmatch(r"[biufcSU]\d{1,4}", code):
        return None
    return np.dtype(order + code if order in ("<", ">") else code)


def _set(args: tuple[Any, ...], budget: Budget) -> Any:
    (items,) = args or ((),)
    budget.take(72 * len(items))
    for item in items:
        check_key(item, budget)
    return set(items)


def _frozenset(args: tuple[Any, ...], budget: Budget) -> Any:
    return frozenset(_set(args, budget))


def _bytes(args: tuple[Any, ...], budget: Budget) -> Any:
    """`bytes()`, and `encode(text, "latin1")`, as protocols without bytes write them."""
    if not args:
        return b""
    text, encoding = args
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        return None
    budget.take(len(text))
    return text.encode("latin-1")


def _bytearray(args: tuple[Any, ...], budget: Budget) -> Any:
    content = args[0] if len(args) == 1 else _bytes(args, budget)
    if not isinstance(content, bytes):
        return None
    budget.take(len(content))
    return bytearray(content)


def _dict(args: tuple[Any, ...], budget: Budget) -> Any:
    """An OrderedDict or a Counter: of nothing, of pairs, or of a dict."""
    (content,) = args or ((),)
    if isinstance(content, dict):
        return content
    budget.take(72 * len(content))
    for key, _ in content:
        check_key(key, budget)
    return dict(content)


def _reconstructor(args: tuple[Any, ...], budget: Budget) -> Any:
    kind, _, value = args
    return Instance(str(kind), () if value is None else (value,)) if type(kind) is Name else None


def _newobj(args: tuple[Any, ...], budget: Budget) -> Any:
    return Instance(str(args[0]), args[1:]) if type(args[0]) is Name else None


def _array(args: tuple[Any, ...], budget: Budget) -> Any:
    return Instance("numpy.ndarray", args[1:]) if args[0] == Name("numpy", "ndarray") else None


def _scalar(args: tuple[Any, ...], budget: Budget) -> Any:
    dtype, data = args
    kind = _dtype(dtype)
    if kind is None or not isinstance(data, bytes) or len(data) != kind.itemsize:
        return None
    value = np.frombuffer(data, kind)[0].item()
    # A long double has no Python type.
    return value if isinstance(value, int | float | complex | str | bytes) else None


CALLS: dict[str, Callable[[tuple[Any, ...], Budget], Any]] = {
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "_codecs.encode": _bytes,
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": lambda args, budget: _dict(args[1:], budget),
    "copyreg._reconstructor": _reconstructor,
    "copyreg.__newobj__": _newobj,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
"""Name → function that returns the value of a call from its arguments; None: no plain value.

The functions raise `ValueError` or `TypeError` for wrong arguments.
"""

PLAIN = frozenset(CALLS) | {
    *(f"builtins.{kind.__name__}" for kind in (bool, complex, dict, float, int, list, object)),
    *(f"builtins.{kind.__name__}" for kind in (str, tuple)),
    *(f"numpy.{part}.numeric._frombuffer" for part in ("core", "_core")),
    "numpy.dtype",
    "numpy.ndarray",
}
"""Names that stand for plain values wherever they occur."""

OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Module of Python 2 → its name now."""


def call(called: Any, args: Any, budget: Budget) -> Any:
    """Return the result of a call as data: a plain value, or an `Instance`."""
    if not isinstance(args, tuple):
        raise TypeError("a call without a tuple of arguments")
    if isinstance(called, Instance):
        return Instance(f"the result of {called.kind}"[:200], args)
    if not isinstance(called, Name):
        raise TypeError(f"a call of a {type(called).__name__}")
    value = None
    maker = CALLS.get(str(called))
    if maker:
        # With wrong arguments the result is not a plain value; the pickle is not damaged.
        with contextlib.suppress(ValueError, TypeError):
            value = maker(args, budget)
    return Instance(str(called), args) if value is None else value
