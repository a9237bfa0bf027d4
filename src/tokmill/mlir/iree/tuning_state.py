"""How far a tuning came: a small file beside its spec, so that the same command goes on.

The measurements themselves are in their cache. The file says of what model, seed and processor
the tuning is, so that another one into the same file is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokmill import files
from tokmill.errors import TokmillError, UsageError
from tokmill.headers import loads_json, refused

FAR = 1 << 20
"""More evaluations of one operation than anybody asks for."""
LONGEST = 64 << 20
"""Bytes of a file that are read."""


class State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How far a tuning came."""

    version: int = 2
    model: str = ""
    """sha256 of the text of a model that is tuned as a whole; the rest says nothing then."""
    problems: list[str] = []
    """sha256 of the texts of the operations."""
    seed: int
    measured: str = ""
    """How operations are measured: results of another way are not in the cache."""
    flags: list[str] = []
    """They are compiled with."""
    seconds: float = 0.0
    """Time that was spent."""
    evaluations: list[int] = []
    """Of each operation."""


def begin(path: Path, model: str, seed: int, flags: Sequence[str]) -> None:
    """Keep in a file which model is tuned as a whole, given by its text.

    Raises what `begun` raises: another tuning was begun there.
    """
    write(path, begun(path, State(model=digest(model), seed=seed, flags=list(flags))))


def digest(text: str) -> str:
    """Return what stands for the text of a model or an operation in a state."""
    return hashlib.sha256(text.encode()).hexdigest()


def begun(path: Path | None, new: State) -> State:
    """Return the state in a file, which must be of the same tuning as `new`; `new` without one.

    Raises `TokmillError` for a file that cannot be read or says what cannot be, and `UsageError`
    for one of another tuning.
    """
    if path is None or not path.exists():
        return new
    with refused(
        "the state of the tuning cannot be read",
        path,
        hint="remove it: the measurements are in their cache",
    ):
        kept: State = loads_json(files.read_file(path, LONGEST), State)
    if not 0 <= kept.seconds < math.inf or not all(0 <= n <= FAR for n in kept.evaluations):
        raise TokmillError(
            "the state of the tuning says what cannot be: of time spent, or of evaluations",
            where=str(path),
            hint="remove it: the measurements are in their cache",
        )
    same = ("version", "model", "problems", "seed", "measured", "flags")
    if any(getattr(kept, name) != getattr(new, name) for name in same) or len(
        kept.evaluations
    ) != len(new.evaluations):
        raise UsageError(
            "a tuning of something else was begun there, or with another seed, processor or number "
            "of runs, or by another version",
            where=str(path),
            hint="choose another file for the spec, or remove this one",
        )
    return kept


def write(path: Path | None, state: State) -> None:
    """Keep a state in a file, if there is to be one."""
    if path is not None:
        files.write_file(path, msgspec.json.encode(state).decode())
