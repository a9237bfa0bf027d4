"""Functions of BinaryCorp (jTrans): `*_extract.pkl` of one program, `saved_index.pkl` of several.

An extract is {function: [address, asm, bytes, graph, feature]}, made by IDA; the graph is a
networkx.DiGraph of blocks by address, each with `asm` (list of str) and `raw` (bytes). An index is
{function: [one such list for each program]}, of the functions that all programs of a project have.
It has neither the names of its programs nor their optimisation levels. The name of an extract is
PROJECT-PROGRAM-LEVEL-DIGEST_extract.pkl (`tokmill.x86.image.program`). Source of the formats:
jTrans, `datautils/process.py` and `datautils/util/pairdata.py`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokmill.base.errors import TokmillError, UsageError, check_name
from tokmill.base.progress import human_count
from tokmill.base.unpickle import Budget, Instance, Pickle, type_name
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.recorded_blocks import Recorded
from tokmill.x86.image.program import LEVELS, UNKNOWN

EXTRACT = "_extract.pkl"
NAMES = ("networkx.classes.",)
"""Names of classes and functions that such pickles may hold."""
BLOCK = 64
"""About how many bytes of memory a block takes, without its code and edges."""
FIELDS = ("address", "asm", "bytes", "graph")
"""The first fields of a function; features follow."""
ADDRESS = "an int below 2^64"
MOST_SHOWN = 80
"""Most characters of a name in a message."""


def graphs_of(path: Path | str, levels: Sequence[str] | None = None) -> Iterator[Graph]:
    """Yield the graph of each program of an extract or an index; no code in it is run.

    Args:
        levels: the optimisation levels of an index's programs, in the order of its lists; without
            them they are unknown.

    The graph of an extract has the name of its file, those of an index are
    PROJECT-saved_index-LEVEL-NUMBER; `level_of` reads the level from either.
    """
    path = Path(path)
    programs: list[Recorded] = []
    extract: bool | None = None
    budget = Pickle(path).budget()
    for name, value in _functions(path):
        if extract is None:
            extract = path.name.endswith(EXTRACT) or _is_function(value)
        rows = _placed(name, value, extract, len(programs), path)
        if not programs:
            programs = [Recorded() for _ in rows]
        for number, (place, row) in enumerate(rows):
            _add(programs[number], row, name, place, path, budget)
            budget.take(len(row[2]))
    if extract or path.name.endswith(EXTRACT):
        if levels is not None:
            raise UsageError(
                "the level of an extract is in the name of its file",
                where=str(path),
                hint="NAME-O2-…_extract.pkl, for example",
            )
        titles = [path.name.removesuffix(EXTRACT).removesuffix(path.suffix)]
        programs = programs or [Recorded()]
    else:
        levels = [UNKNOWN] * len(programs) if levels is None else levels
        for level in levels:
            check_name("no optimisation level is", level, (*LEVELS, UNKNOWN))
        if len(levels) != len(programs):
            raise UsageError(
                f"{human_count(len(levels), 'level')} for {human_count(len(programs), 'program')}",
                where=str(path),
                hint="name one for each, in the order in which the index lists them",
            )
        project = path.absolute().parent.name if path.name == "saved_index.pkl" else path.stem
        titles = [f"{project}-saved_index-{level}-{i}" for i, level in enumerate(levels)]
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
            raise _unfit(path, f"a key is {_kind(key)}, not a name")
        yield key if isinstance(key, str) else "", value


def _is_function(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 3 and not isinstance(value[0], list)


def _placed(
    name: str, value: Any, extract: bool, programs: int, path: Path
) -> list[tuple[str, Any]]:
    """Return the place of each program's function in an entry, and the function.

    In an index every entry must have as many as the first one (`programs`); 0: this is the first.
    """
    entry = f"[{name[:MOST_SHOWN]!r}]" if name else "[-1]"
    if extract:
        return [(entry, value)]
    if not isinstance(value, list):
        raise _unfit(
            path, f"{entry} is {_kind(value)}, not a list of functions, one for each program"
        )
    if programs and len(value) != programs:
        raise _unfit(
            path, f"{entry} is a list of {len(value):,}, where the first entry has {programs:,}"
        )
    return [(f"{entry}[{number}]", row) for number, row in enumerate(value)]


def _add(program: Recorded, row: Any, name: str, place: str, path: Path, budget: Budget) -> None:
    if not isinstance(row, list) or len(row) < len(FIELDS):
        kind = f"a list of {len(row)}" if isinstance(row, list) else _kind(row)
        raise _unfit(path, f"{place} is {kind}, not a list of {', '.join(FIELDS)}, …")
    address, _, code, graph = row[: len(FIELDS)]
    if not _is_address(address):
        raise _unfit(path, f"{place}[0] (address) is {_kind(address)}, not {ADDRESS}")
    if not isinstance(code, bytes):
        raise _unfit(path, f"{place}[2] (bytes) is {_kind(code)}, not bytes")
    if not isinstance(graph, Instance):
        raise _unfit(path, f"{place}[3] (graph) is {_kind(graph)}, not a networkx.DiGraph")
    place = f"{place}[3] (graph)"
    state = graph.state if isinstance(graph.state, dict) else {}
    # The names of networkx 2 and 3, then those of 1.
    parts: list[Any] = [
        state.get(new, state.get(old)) for new, old in (("_node", "node"), ("_adj", "adj"))
    ]
    for part, field in zip(parts, ("_node", "_adj"), strict=True):
        if not isinstance(part, dict):
            what = f"whose {field} is {_kind(part)}, not a dict"
            raise _unfit(path, f"{place} is {_kind(graph)} {what}")
    nodes, ways = parts
    blocks = []
    for start, facts in nodes.items():
        if not _is_address(start):
            raise _unfit(path, f"{place} has a block at {_kind(start)}, not at {ADDRESS}")
        block = f"{place}, block {start:#x}:"
        if not isinstance(facts, dict):
            raise _unfit(path, f"{block} its attributes are {_kind(facts)}, not a dict")
        raw, targets = facts.get("raw", b""), ways.get(start, {})
        if not isinstance(raw, bytes):
            raise _unfit(path, f"{block} its raw is {_kind(raw)}, not bytes")
        if not isinstance(targets, dict | list):
            raise _unfit(path, f"{block} its successors are {_kind(targets)}, not a dict")
        for target in targets:
            if not _is_address(target):
                raise _unfit(path, f"{block} a successor is {_kind(target)}, not {ADDRESS}")
        budget.take(BLOCK + len(raw) + 8 * len(targets))
        blocks.append((start, raw, list(targets)))
    program.add(name, address, blocks)


def _is_address(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _kind(value: Any) -> str:
    """Return the kind of a value in words: an int, None, a networkx.classes.graph.Graph."""
    if value is None:
        return "None"
    if type(value) is int and not _is_address(value):
        return "a negative int" if value < 0 else f"an int of {value.bit_length():,} bits"
    name = type_name(value)
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def _unfit(path: Path, why: str) -> TokmillError:
    return TokmillError(
        f"this is not a file of BinaryCorp: {why}",
        where=str(path),
        hint="`tokmill inspect` shows what it holds",
    )
