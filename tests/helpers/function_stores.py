"""Stores of functions with the keys of programs, and plain-Python twins of what mining says."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from making import rec, write_store
from tokmill.store.schema import Column
from tokmill.store.store import Store


class Function(NamedTuple):
    """A record: its keys, and its tokens."""

    project: str
    program: str
    compiler: str
    level: str
    function: str
    tokens: tuple[int, ...]

    @property
    def same(self) -> tuple[str, ...]:
        """What it has in common with its positives."""
        return self.project, self.program, self.function

    @property
    def build(self) -> tuple[str, ...]:
        """What its positives differ in."""
        return self.compiler, self.level


KEYS = Function._fields[:5]


def write_keyed(path: Path, shards: Sequence[Sequence[Function]]) -> Store:
    """Write a store of functions."""
    schema = {"token": Column("u2"), **{name: Column("utf8", per="record") for name in KEYS}}
    rows = [
        [rec(one.tokens, **dict(zip(KEYS, one, strict=False))) for one in shard] for shard in shards
    ]
    return write_store(path, schema, rows)


def many(count: int = 60, seed: int = 0) -> list[list[Function]]:
    """Functions of three programs under four builds, with all that goes wrong among them.

    Some builds of a function have the content of another build, or of another function; some
    programs have a name twice; some functions have no name, no tokens or one build alone; a name
    stands in several programs.
    """
    draw = np.random.default_rng(seed)
    shards: list[list[Function]] = []
    for level in ("O0", "O1", "O2", "O3"):
        shard = []
        for number in range(count):
            tokens = tuple(draw.integers(1, 50, draw.integers(1, 9)).tolist())
            name, odd = f"f{number}", number % 12
            if odd == 1 and shards:
                tokens = shards[-1][number].tokens
            if odd == 2:
                tokens = (7, 8)
            if odd == 3 and level in ("O2", "O3"):
                tokens = (7, 9, number // 24)
            if odd == 4:
                name = f"f{number - number % 3 - 1}" if number % 24 == 4 else "main"
            if odd == 5:
                name = f"sub_{number:x}"
            if odd == 6 and level == "O1":
                tokens = ()
            if odd == 7 and level != "O0":
                name = f"only_{level}_{number}"
            shard.append(Function(f"p{number % 3}", "prog", "gcc", level, name, tokens))
        shards.append(shard)
    return shards


def reasons(rows: Sequence[Function]) -> list[str]:
    """Return why each record is left out, or ""."""
    found = []
    for one in rows:
        twice = sum(one[:5] == other[:5] for other in rows) > 1
        nameless = one.function.startswith("sub_")
        found.append(
            "no tokens"
            if not one.tokens
            else "no name"
            if nameless
            else "a name that one build has twice"
            if twice
            else ""
        )
    return found


def families(rows: Sequence[Function]) -> list[int]:
    """Return the smallest record that each is linked to by equal keys or equal tokens."""
    left = reasons(rows)
    label = list(range(len(rows)))
    changed = True
    while changed:
        changed = False
        for a, one in enumerate(rows):
            for b, other in enumerate(rows):
                similar = one.same == other.same or one.tokens == other.tokens
                if similar and not left[a] and not left[b] and label[b] < label[a]:
                    label[a], changed = label[b], True
    return label
