"""Functions of BinaryCorp (jTrans): `*_extract.pkl` of one program, `saved_index.pkl` of several.

An extract is {function: [address, asm, bytes, graph, feature]}, made by IDA; the graph is a
networkx.DiGraph of blocks by address, each with `asm` (list of str) and `raw` (bytes). An index is
{function: [such a list, one a program]}, of the functions that all programs of a project have. Its
programs have no names in it, least of all their optimisation level. An extract is called
PROJECT-PROGRAM-LEVEL-DIGEST_extract.pkl. Source of the formats: jTrans, `datautils/process.py` and
`datautils/util/pairdata.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.unpickle import Instance, Pickle, Room
from tokmill.x86.graph import Graph
from tokmill.x86.recorded import Recorded

EXTRACT = "_extract.pkl"
NAMES = ("networkx.classes.",)
"""Names that such pickles hold beside those of plain values."""
BLOCK = 64
"""Bytes that a block costs beside its code and edges, about."""
LEVELS = ("O0", "O1", "O2", "O3", "Os", "Oz", "Og", "Ofast")
UNKNOWN = "unknown"


def graphs_of(path: Path | str, levels: Sequence[str] | None = None) -> Iterator[Graph]:
    """Yield the graph of each program of an extract or an index, nothing of which is run.

    Args:
        path: the pickle.
        levels: the optimisation levels of an index's programs, in the order of its lists. Without
            them a program is looked for among the extracts beside the index: it is the one of
            which all functions have the same name, address and bytes.

    The graph of an extract has the name of its file, those of an index are PROJECT-LEVEL-NUMBER;
    `level_of` reads the level from either.

    Raises:
        TokmillError: the file holds something else, or names what is no data.
        UsageError: a level is unknown, there are not as many as programs, or the file is an
            extract.
    """
    path = Path(path)
    programs: list[Recorded] = []
    prints: list[int] = []
    names: set[str] = set()
    extract = False
    room = Pickle(path).room()
    for name, value in _functions(path):
        extract = _is_function(value)
        rows = [value] if extract else value
        if not isinstance(rows, list) or (programs and len(rows) != len(programs)):
            raise _unfit(path, name, f"it stands for {len(programs)} programs elsewhere")
        if not programs:
            programs, prints = [Recorded() for _ in rows], [0] * len(rows)
        names.add(name)
        for number, row in enumerate(rows):
            _add(programs[number], row, name, path, room)
            room.take(len(row[2]))
            prints[number] ^= _print(name, row)
    if extract or path.name.endswith(EXTRACT):
        if levels is not None:
            raise UsageError(
                "the level of an extract stands in the name of its file", where=str(path)
            )
        titles = [path.name.removesuffix(EXTRACT).removesuffix(path.suffix)]
        programs = programs or [Recorded()]
    else:
        levels = _levels_beside(path, prints, names) if levels is None else levels
        for level in levels:
            if level not in (*LEVELS, UNKNOWN):
                raise UsageError(
                    f"no optimisation level is called {level!r}", hint=nearest(level, LEVELS)
                )
        if len(levels) != len(programs):
            raise UsageError(
                f"{len(levels)} levels for {len(programs)} programs",
                where=str(path),
                hint="name one for each, in the order in which the index lists them",
            )
        project = path.absolute().parent.name if path.name == "saved_index.pkl" else path.stem
        titles = [f"{project}-{level}-{number}" for number, level in enumerate(levels)]
    while programs:
        yield programs.pop(0).graph(titles.pop(0))


def level_of(program: str) -> str:
    """Return the optimisation level in the name of a program of BinaryCorp, else "unknown"."""
    parts = program.split("-")
    return parts[-2] if len(parts) > 2 and parts[-2] in LEVELS else UNKNOWN


def _functions(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield name → value; "" for the functions without a symbol, whose key is -1."""
    for key, value in Pickle(path, NAMES).entries():
        if not isinstance(key, str) and key != -1:
            raise TokmillError(
                f"no functions of BinaryCorp: a key is a {type(key).__name__}, not a name",
                where=str(path),
                hint="`tokmill inspect` shows what it holds",
            )
        yield key if isinstance(key, str) else "", value


def _is_function(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 3 and isinstance(value[0], int)


def _add(program: Recorded, row: Any, name: str, path: Path, room: Room) -> None:
    """Add a function to its program."""
    if not _is_function(row) or not isinstance(row[2], bytes) or not isinstance(row[3], Instance):
        raise _unfit(path, name, "it is no list of address, asm, bytes and graph")
    state = row[3].state if isinstance(row[3].state, dict) else {}
    # The names of networkx 2 and 3, then those of 1.
    nodes, ways = (
        state.get(new, state.get(old)) for new, old in (("_node", "node"), ("_adj", "adj"))
    )
    if not isinstance(nodes, dict) or not isinstance(ways, dict):
        raise _unfit(path, name, f"its graph is a {row[3].kind} without nodes and edges")
    blocks = []
    for address, facts in nodes.items():
        raw = facts.get("raw", b"") if isinstance(facts, dict) else None
        targets = list(ways.get(address, ()))
        if not isinstance(raw, bytes) or not all(map(_is_address, (address, *targets))):
            raise _unfit(path, name, "a block of it has no address or no bytes")
        room.take(BLOCK + len(raw) + 8 * len(targets))
        blocks.append((address, raw, targets))
    if not _is_address(row[0]):
        raise _unfit(path, name, "its address is none")
    program.add(name, row[0], blocks)


def _is_address(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _unfit(path: Path, name: str, why: str) -> TokmillError:
    return TokmillError(
        f"no functions of BinaryCorp: {name or 'a function without a name'}: {why}",
        where=str(path),
        hint="`tokmill inspect` shows what it holds",
    )


def _print(name: str, row: list[Any]) -> int:
    """Return a digest of name, address and bytes; a program's is the exclusive or of them all."""
    digest = hashlib.blake2b(f"{row[0]} {name}\0".encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(row[2])
    return int.from_bytes(digest.digest(), "little")


def _levels_beside(path: Path, prints: list[int], names: set[str]) -> list[str]:
    """Return the level of each program of an index, from the extracts beside it."""
    extracts: dict[int, list[str]] = {}
    for file in sorted(path.absolute().parent.glob(f"*{EXTRACT}")):
        found, missing = 0, set(names)
        for name, row in _functions(file):
            if name in names and _is_function(row) and isinstance(row[2], bytes):
                found ^= _print(name, row)
                missing.discard(name)
        if not missing:
            level = level_of(file.name.removesuffix(EXTRACT))
            extracts.setdefault(found, []).append(level)
    levels = []
    for number, one in enumerate(prints):
        same = extracts.get(one, [])
        # Of programs that are equal any may have any of the levels, if there are as many.
        if len(same) == prints.count(one):
            levels.append(same[prints[:number].count(one)])
        else:
            levels.append(same[0] if len(set(same)) == 1 else UNKNOWN)
    return levels
