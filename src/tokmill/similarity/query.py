"""The functions of a store that are nearest to one of its own."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from tokmill.base.errors import UsageError
from tokmill.similarity.functions import NAMES
from tokmill.similarity.index import best_of
from tokmill.similarity.vector_rows import Rows, products
from tokmill.store.schema import Array, Strings
from tokmill.store.store import Store

LISTED = 10
"""Functions that an error lists."""
MORE = 4
"""How many times more records are looked for at first: several may be of one function."""


class Named(msgspec.Struct, frozen=True):
    """One function of a store."""

    record: int
    project: str
    program: str
    version: str
    compiler: str
    level: str
    function: str
    address: int

    def __str__(self) -> str:
        keys = [self.project, self.version, self.compiler, self.level]
        parts = [key for key in keys if key not in ("", "unknown")]
        return f"{self.function} at {self.address:#x} in {self.program}" + (
            f" ({' '.join(parts)})" if parts else ""
        )


class Hit(msgspec.Struct, frozen=True):
    """A function that is near to the one asked for."""

    score: float
    function: Named


def named(store: Store, record: int) -> Named:
    number, local = store.find(record)
    shard = store.shard(number)
    texts = {name: shard.strings(name, local, local + 1)[0] for name in NAMES}
    return Named(record, address=int(shard["address"][local]), **texts)


def refuse_walks(store: Store) -> None:
    """Refuse a store of walks: several are of one function, and neighbours would be walks."""
    if "walk" in store.schema:
        raise UsageError(
            "the store holds walks, and several are of one function",
            where=str(store.path),
            hint="name a store of functions (`tokmill build x86 --unit function`); a run that "
            "learned from walks can read it",
        )


def find_function(
    store: Store,
    function: str = "",
    address: int | None = None,
    *,
    program: str = "",
    **keys: str,
) -> Named:
    """Return the one function of a store that has a name, an address, and some keys.

    `program` may be the end of its path; `keys` are other columns of `NAMES`. What is empty says
    nothing. Raises `UsageError` if there is none, or several.
    """
    for name in (*NAMES, "address"):
        if name not in store.schema:
            raise UsageError(
                f"the store has no column {name!r}",
                where=str(store.path),
                hint="`tokmill build x86` makes stores of functions",
            )
    refuse_walks(store)
    if not function and address is None:
        raise UsageError(
            "no function is named", hint="--function NAME, or --address with --program"
        )
    hits: list[Named] = []
    count, start = 0, 0
    for number, entry in enumerate(store.shards):
        shard = store.shard(number)
        good = np.ones(len(shard), bool)
        if function:
            good &= equal(shard.text("function", 0, len(shard)), function)
        if address is not None:
            good &= shard["address"] == np.uint64(address)
        if "part" in store.schema:
            good &= shard["part"] == 0
        for name, text in keys.items():
            if text:
                good &= equal(shard.text(name, 0, len(shard)), text)
        if program:
            good &= _ends_with(shard.text("program", 0, len(shard)), program)
        here = np.flatnonzero(good)
        count += len(here)
        hits += [named(store, start + int(row)) for row in here[: LISTED - len(hits)]]
        start += entry.records
    if count == 1:
        return hits[0]
    asked = [f"the name {function!r}"] if function else []
    asked += [] if address is None else [f"the address {address:#x}"]
    asked += [f"the {name} {one!r}" for name, one in {"program": program, **keys}.items() if one]
    raise _not_one(store, " and ".join(asked), hits, count)


def _not_one(store: Store, asked: str, functions: list[Named], count: int) -> UsageError:
    if not count:
        return UsageError(
            f"no function has {asked}",
            where=str(store.path),
            hint="`tokmill inspect STORE --where 'function ~ PART'` finds names; what --layout "
            "read of a path is in --compiler and --level, not in --program",
        )
    listed = "\n".join(f"  {one}" for one in functions)
    more = f"\n  … {count - len(functions):,} more" if count > len(functions) else ""
    return UsageError(
        f"{count:,} functions have {asked}:\n{listed}{more}",
        where=str(store.path),
        hint="say which by --program (the end of its path will do), --compiler, --level, --address",
    )


def equal(strings: Strings, text: str) -> Array:
    """Return which strings are equal to a text, (n,) bool, without making any of them."""
    wanted = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    lengths = np.diff(strings.offsets)
    rows = np.flatnonzero(lengths == len(wanted))
    place = strings.offsets[:-1][rows, None] + np.arange(len(wanted))
    rows = rows[(strings.data[place] == wanted).all(axis=1)]
    table = np.zeros(len(lengths) + 1, bool)
    table[rows] = True
    return table[strings.numbers.astype(np.int64)]


def _ends_with(strings: Strings, text: str) -> Array:
    distinct, place = strings.distinct()
    wanted = text.encode("utf-8", "surrogatepass")
    good = [one == wanted or one.endswith(b"/" + wanted) for one in distinct]
    return np.asarray(good, bool)[place] if distinct else np.zeros(len(strings), bool)


def nearest_rows(matrix: Any, record: int, most: int, *, unit: bool) -> tuple[Array, Array]:
    """Return the rows of a matrix that are nearest to one of them, and their scores.

    `matrix`: one, or two side by side. A score is a product, as a share of that of the row with
    itself: 1 for an equal one. Nothing is near to a row of zeros.
    """
    first, more = matrix if isinstance(matrix, tuple) else (matrix, None)
    rows = Rows(first, unit=unit, more=more)
    everything = np.arange(len(rows))
    ((_, block),) = products(rows, np.asarray([record]), rows, everything)
    own = float(block[0, record])
    if own <= 0:
        return everything[:0], block[0, :0]
    return best_of(everything, block[0] / own, most)


def hits_of(
    store: Store,
    asked: Named,
    nearest: Callable[[int], tuple[Array, Array]],
    most: int,
    *,
    other_programs: bool = False,
) -> list[Hit]:
    """Return the functions that are nearest, each once, without the one asked for.

    `nearest`: returns so many rows and their scores, or all that there are, the nearest first.
    `other_programs`: leave out functions of the same program.
    """
    result: list[Hit] = []
    seen = {_place(asked)}
    left_out = _same_program(store, asked) if other_programs else np.zeros(len(store), bool)
    looked_at, wanted = 0, most * MORE + 1
    while True:
        rows, scores = nearest(wanted)
        pairs = zip(rows.tolist(), scores.tolist(), strict=True)
        for row, score in islice(pairs, looked_at, None):
            if left_out[row] or _place(one := named(store, row)) in seen:
                continue
            seen.add(_place(one))
            result.append(Hit(round(score, 6), one))
            if len(result) == most:
                return result
        if len(rows) < wanted:
            return result
        looked_at, wanted = wanted, wanted * 16


def _same_program(store: Store, asked: Named) -> Array:
    same = []
    for number in range(len(store.shards)):
        shard = store.shard(number)
        columns = [(name, shard.text(name, 0, len(shard))) for name in NAMES if name != "function"]
        good = [equal(strings, getattr(asked, name)) for name, strings in columns]
        same.append(np.all(good, axis=0))
    return np.concatenate(same)


def _place(one: Named) -> tuple[object, ...]:
    return one.project, one.program, one.version, one.compiler, one.level, one.address
