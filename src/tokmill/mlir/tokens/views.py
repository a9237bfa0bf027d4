"""What an observation of the environment consists of: three views of an operation and its schedule.

- `flat`: `operation`, `producer` and `history`, the vectors of `features` (float32);
- `fields`: `ids`, `segments`, `depths` and `mask` of `field_tokens` (T,), and `history`;
- `buckets`: `ids` and `mask` of `bucket_tokens` (T,), and `history`; bounds are divided by 4,096.

All arrays have fixed shapes. T is the longest sequence that the problems can have, so nothing is
cut: `[PAD]` stands behind.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import gymnasium
import msgspec
import numpy as np

from tokmill.base.errors import UsageError, check_name
from tokmill.mlir.loops import legal
from tokmill.mlir.loops.legal import LONGEST, State
from tokmill.mlir.modules.operations import Operation
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.tokens import bucket_tokens, features, field_tokens
from tokmill.mlir.tokens.features import Sizes

Array = np.ndarray[Any, Any]
Spaces = Mapping[str, gymnasium.spaces.Box]
"""Name of an array of an observation → its shape, type and limits."""
MOST_TOKENS, MOST_IDS = 1 << 16, 1 << 24
"""Tokens of a sequence, and ids, that may be asked for."""
LARGEST = float(1 << 40)
"""No number of an observation is larger."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A view and its options, which are keys of the embedding `distilbert` too."""

    kind: str = "flat"
    """flat, fields or buckets."""
    max_seq_length: int = 0
    vocab_size: int = 0
    truncate: bool = False
    seed_compatible: bool = False


class View(Protocol):
    """Makes observations."""

    def spaces(self) -> dict[str, gymnasium.spaces.Box]:
        """Return the shapes, types and limits of the arrays."""
        ...

    def __call__(self, state: State, producer: Operation | None) -> dict[str, Array]:
        """Return the arrays of an operation in the middle of its schedule."""
        ...


def make(wanted: Wanted | str, sizes: Sizes, problems: Iterable[Problem]) -> View:
    """Return a view of problems; raises `UsageError` for an unknown one, and for too short ones."""
    wanted = Wanted(kind=wanted) if isinstance(wanted, str) else wanted
    check_name("no view is", wanted.kind, VIEWS)
    for name, most in (("max_seq_length", MOST_TOKENS), ("vocab_size", MOST_IDS)):
        if not 0 <= getattr(wanted, name) <= most:
            raise UsageError(
                f"{name} = {getattr(wanted, name)}", hint=f"0 (as many as needed) to {most:,}"
            )
    return VIEWS[wanted.kind](wanted, sizes, list(problems))


def longest(problems: Iterable[Problem]) -> int:
    """Return the most tokens that an observation of these problems has in the view `fields`."""
    result = 0
    for problem in problems:
        for operation in problem.operations:
            # Packing doubles the loops of a product of matrices; a vectorization may come last.
            loops = len(operation.bounds) * (1 + (operation.kind == "matmul"))
            begun = field_tokens.tokens(legal.begin(operation), producer_of(problem, operation))
            more = loops - len(operation.bounds) + LONGEST * (1 + loops) + 1
            result = max(result, len(begun.ids) + more)
    return result


def producer_of(problem: Problem, operation: Operation) -> Operation | None:
    return problem.operations[operation.producers[-1][1]] if operation.producers else None


class Flat:
    """The vectors of MLIR-RL's environment."""

    def __init__(self, wanted: Wanted, sizes: Sizes, problems: list[Problem]) -> None:
        self.sizes = sizes

    def spaces(self) -> dict[str, gymnasium.spaces.Box]:
        flat = gymnasium.spaces.Box(-LARGEST, LARGEST, (self.sizes.operation,), np.float32)
        return {"operation": flat, "producer": flat, "history": _history(self.sizes)}

    def __call__(self, state: State, producer: Operation | None) -> dict[str, Array]:
        return {
            "operation": features.vector(state.operation, self.sizes),
            "producer": _vector(producer, self.sizes),
            "history": features.history(state.taken, self.sizes),
        }


class Fields:
    """A token for each field."""

    def __init__(self, wanted: Wanted, sizes: Sizes, problems: list[Problem]) -> None:
        self.sizes, needed = sizes, longest(problems)
        self.length = wanted.max_seq_length or needed
        if self.length < needed and not wanted.truncate:
            raise UsageError(
                f"max_seq_length = {self.length}, and a sequence can have {needed} tokens",
                hint=f"{needed} keeps all; truncate = true allows to cut",
            )

    def spaces(self) -> dict[str, gymnasium.spaces.Box]:
        return {
            "ids": _ids(len(field_tokens.VOCABULARY), self.length),
            "segments": _ids(2, self.length),
            "depths": _ids(field_tokens.DEEPEST + 1, self.length),
            "mask": _ids(2, self.length),
            "history": _history(self.sizes),
        }

    def __call__(self, state: State, producer: Operation | None) -> dict[str, Array]:
        batch, mask = field_tokens.padded([field_tokens.tokens(state, producer)], self.length)
        cut = np.s_[0, : self.length]
        return {
            "ids": batch.ids[cut],
            "segments": batch.segments[cut],
            "depths": batch.depths[cut],
            "mask": mask[cut],
            "history": features.history(state.taken, self.sizes),
        }


class Buckets:
    """A token for each number of the flat vectors, as MLIR-RL's DistilBERT has it."""

    def __init__(self, wanted: Wanted, sizes: Sizes, problems: list[Problem]) -> None:
        self.sizes = sizes
        self.scaled = msgspec.structs.replace(sizes, normalize="max")
        self.tokenizer = bucket_tokens.MLIROperationTokenizer(
            sizes.operation,
            max_seq_length=wanted.max_seq_length,
            vocab_size=wanted.vocab_size,
            truncate=wanted.truncate,
            seed_compatible=wanted.seed_compatible,
        )

    def spaces(self) -> dict[str, gymnasium.spaces.Box]:
        return {
            "ids": _ids(self.tokenizer.vocab_size, self.tokenizer.max_seq_length),
            "mask": _ids(2, self.tokenizer.max_seq_length),
            "history": _history(self.sizes),
        }

    def __call__(self, state: State, producer: Operation | None) -> dict[str, Array]:
        own = features.vector(state.operation, self.scaled)
        ids, mask = self.tokenizer(own, _vector(producer, self.scaled))
        return {
            "ids": ids[0],
            "mask": mask[0],
            "history": features.history(state.taken, self.sizes),
        }


VIEWS: dict[str, type[Flat] | type[Fields] | type[Buckets]] = {
    "flat": Flat,
    "fields": Fields,
    "buckets": Buckets,
}
"""Name of a view → what makes it."""


def _vector(operation: Operation | None, sizes: Sizes) -> Array:
    if operation is None:
        return np.zeros(sizes.operation, np.float32)
    return features.vector(operation, sizes)


def _ids(count: int, length: int) -> gymnasium.spaces.Box:
    return gymnasium.spaces.Box(0, count - 1, (length,), np.int64)


def _history(sizes: Sizes) -> gymnasium.spaces.Box:
    return gymnasium.spaces.Box(0.0, 1.0, (sizes.history,), np.float32)
