"""Changes outside of functions: data, imports and exports."""

from collections import Counter

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.diff.content.operand_references import DATA, NUMBERED, Compared, Operands, Pairs
from tokmill.x86.diff.result import DataChange, ProgramChanges
from tokmill.x86.features.function_features import bare_name

INITIALISERS = (".init_array", ".fini_array", ".preinit_array")
SHOWN = 8
"""Bytes that are shown from the first difference on."""


def program_changes(compared: Compared, pairs: Pairs, same: Array) -> ProgramChanges:
    """Return what changed in data with a name, in constants that functions use, and in the names
    that programs take from others and offer to them.
    """
    graphs = [side.graph for side in compared.sides]
    if not all(graph.facts for graph in graphs):
        return ProgramChanges()
    imports = [
        {*map(bare_name, (*graph.import_name, *graph.import_slot_name))} - {"", *graph.exports}
        for graph in graphs
    ]
    exports = [set(graph.exports) for graph in graphs]
    changes = _named(compared) if compared.named else []
    changes += _initialisers(compared) + _unnamed(compared, pairs, same)
    return ProgramChanges(
        data=changes,
        imports_deleted=sorted(imports[0] - imports[1]),
        imports_inserted=sorted(imports[1] - imports[0]),
        exports_deleted=sorted(exports[0] - exports[1]),
        exports_inserted=sorted(exports[1] - exports[0]),
    )


def _named(compared: Compared) -> list[DataChange]:
    in_files = [_symbols(side, in_file=True) for side in compared.sides]
    both = in_files[0].keys() & in_files[1].keys()
    # Of several variables of one name, those in the file are compared with each other.
    sides = [
        _symbols(side, in_file=False) | {name: rows[name] for name in both}
        for side, rows in zip(compared.sides, in_files, strict=True)
    ]
    names = sorted(sides[0].keys() & sides[1].keys())
    rows = [np.asarray([side[name] for name in names], np.int64) for side in sides]
    address, size = (
        [getattr(side.graph, field)[row] for side, row in zip(compared.sides, rows, strict=True)]
        for field in ("symbol_address", "symbol_size")
    )
    same = compared.same_content(address[0], address[1], np.zeros(len(names), np.int64))
    in_file = [s.memory.section(at) >= 0 for s, at in zip(compared.sides, address, strict=True)]
    same |= ~(in_file[0] | in_file[1])
    same &= size[0] == size[1]
    odd = np.flatnonzero(~same)
    columns = zip(
        *(one[odd].tolist() for one in (np.arange(len(same)), *address, *size)), strict=True
    )
    changes = (_change(compared, names[row], (a, b), (m, n)) for row, a, b, m, n in columns)
    return [change for change in changes if change is not None]


def _initialisers(compared: Compared) -> list[DataChange]:
    """Return the tables of what a loader calls that lead to other functions."""
    sections = [
        {
            name: (at, len(content))
            for name, at, content in zip(g.data_name, g.data_address.tolist(), g.data, strict=True)
            if name.startswith(INITIALISERS)
        }
        for g in (side.graph for side in compared.sides)
    ]
    result: list[DataChange] = []
    for name in sorted(sections[0].keys() | sections[1].keys()):
        (a, size_a), (b, size_b) = (side.get(name, (0, 0)) for side in sections)
        result += filter(None, [_change(compared, name, (a, b), (size_a, size_b))])
    return result


def _symbols(side: Operands, *, in_file: bool) -> dict[str, int]:
    """Return name → number of the symbols of data that have a size, and a name of their own."""
    graph, memory = side.graph, side.memory
    fits = (graph.symbol_size[memory.symbol] > 0) & ~memory.linked_at(memory.starts)
    there = memory.section(memory.starts) >= 0
    if in_file:
        fits &= there
    elif len(memory.code):
        # Bytes of what lies among code are not kept, so they are not known.
        fits &= there | (memory.starts < memory.code[0]) | (memory.starts > memory.code[-1])
    kept = memory.symbol[fits].tolist()
    counts = Counter(graph.symbol_name[row] for row in kept)
    names = {graph.symbol_name[row]: row for row in kept}
    return {n: row for n, row in names.items() if counts[n] == 1 and not NUMBERED.search(n)}


def _unnamed(compared: Compared, pairs: Pairs, same: Array) -> list[DataChange]:
    a, b = compared.sides
    odd = ~same & (a.kind[pairs.a] == DATA) & (b.kind[pairs.b] == DATA)
    odd &= compared.constant(0, a.address[pairs.a]) & compared.constant(1, b.address[pairs.b])
    if compared.named:
        odd &= a.memory.names(a.address[pairs.a])[0] < 0
    rows = np.flatnonzero(odd)
    places = a.address[pairs.a[rows]], b.address[pairs.b[rows]]
    width = a.width[pairs.a[rows]]
    sizes = [
        np.where(width > 0, width, side.memory.extent(at)[0]).tolist()
        for side, at in zip(compared.sides, places, strict=True)
    ]
    changes: dict[tuple[int, int], DataChange] = {}
    for one, other, *size in zip(*(p.tolist() for p in places), *sizes, strict=True):
        if (one, other) in changes:
            continue
        change = _change(compared, "", (one, other), (size[0], size[1]))
        if change is not None:
            changes[one, other] = change
    return [changes[key] for key in sorted(changes)]


def _change(
    compared: Compared, name: str, address: tuple[int, int], size: tuple[int, int]
) -> DataChange | None:
    places = zip(compared.sides, address, size, strict=True)
    contents = [side.memory.read(at, most) for side, at, most in places]
    if not any(map(len, contents)):
        # Neither is in the file: one has more zeros.
        least = min(size)
        old, new = ("00" * min(one - least, SHOWN) for one in size)
        return DataChange(name, *address, *size, least, old, new)
    for i, size_here in enumerate(size):
        if size_here and not len(contents[i]):
            # What is not in the file begins with zeros.
            contents[i] = np.zeros(min(size_here, len(contents[1 - i]) + SHOWN), np.uint8)
    first = compared.first_difference(*address, *contents)
    if first < 0:
        return None
    old, new = (one[first : first + SHOWN].tobytes().hex() for one in contents)
    return DataChange(name, *address, *size, first, old, new)
