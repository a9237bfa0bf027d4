"""Assigns blocks to functions, and makes the graph."""

from pathlib import Path

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import distinct, expand, member, offsets, without
from tokmill.x86.lift.blocks import Blocks
from tokmill.x86.lift.decode import Flow
from tokmill.x86.lift.findings import Findings
from tokmill.x86.lift.starts import branched_to

GATHER = 1 << 19
"""Values copied at a time."""
SHARED = 64
"""Largest average number of functions for shared blocks; beyond it, blocks go to one function."""
TANGLED = "functions share so much code that some of it stands under one of them only"


def assemble(findings: Findings, blocks: Blocks) -> Graph:
    """Return the graph of the blocks; `findings` is released."""
    entries = _entries(findings, blocks)
    function, block = _owners(findings, blocks, entries)
    code = blocks.code
    number = distinct(function)
    at = np.searchsorted(number, function)
    order = np.lexsort((block, block < number[at], at))
    at, block = at[order], block[order]
    names, unresolved = _names(findings, blocks, number), blocks.unresolved()
    findings.release()
    edge_count = np.diff(blocks.edge_begin)[block]
    sizes = (blocks.end - blocks.start)[block]
    program = findings.program
    address = code.address(blocks.start[number])
    tables = sorted(findings.entries)
    listed = [findings.entries[table][1] for table in tables]
    return Graph(
        program=Path(program.name).name,
        bits=program.bits,
        function_address=address,
        function_name=names,
        function_blocks=np.searchsorted(at, np.arange(len(number) + 1)).astype(np.int64),
        block_address=code.address(blocks.start[block]),
        block_bytes=offsets(sizes),
        code=_gather(code.raw, blocks.start[block], sizes),
        block_instructions=offsets(blocks.count[block]),
        lengths=_gather(blocks.lengths, blocks.first[block], blocks.count[block]),
        block_edges=offsets(edge_count),
        edge_target=_gather(blocks.edge_target, blocks.edge_begin[block], edge_count),
        edge_kind=_gather(blocks.edge_kind, blocks.edge_begin[block], edge_count),
        unresolved=unresolved,
        cut_short=tuple(findings.cut_short),
        table_address=np.asarray(tables, np.uint64),
        table_size=np.asarray([findings.entries[table][0] for table in tables], np.int64),
        table_entries=offsets(np.asarray([len(one) for one in listed], np.int64)),
        table_target=code.address(np.concatenate([np.zeros(0, np.int64), *listed])),
    )


def _gather(values: Array, begins: Array, counts: Array) -> Array:
    """Return values[begins[0] : begins[0] + counts[0]], then the same for begins[1], … ."""
    ends = np.cumsum(counts)
    result = np.empty(int(ends[-1]) if len(ends) else 0, values.dtype)
    done = first = 0
    while first < len(counts):
        # The indices may take eight times the memory of the values.
        last = max(first + 1, int(np.searchsorted(ends, done + GATHER)))
        rows = expand(begins[first:last], counts[first:last])
        result[done : done + len(rows)] = values[rows]
        done += len(rows)
        first = last
    return result


def _entries(findings: Findings, blocks: Blocks) -> Array:
    """Return the blocks at which functions begin, ascending.

    A range of code is a part of another function if its frame is set up before it begins, or if
    only conditional branches lead to it and compilers would not put a function there.
    """
    program, code, ways = findings.program, findings.code, findings.ways
    sure = [program.function_address, program.starts, np.asarray([program.entry], np.uint64)]
    sure_offsets = code.offset(np.concatenate(sure))
    called = ways.called
    certain = distinct(sure_offsets, called, findings.discovered)
    returns = np.sort(blocks.start[blocks.flow == Flow.RETURN])
    unwind = program.unwind
    starts = findings.ranges.unwind_start
    parts = [starts[unwind.fragment], code.offset(program.fragments)]
    parts.append(branched_to(findings, returns, without(starts, certain)))
    entries = without(findings.functions(), without(np.concatenate(parts), certain))
    numbers = blocks.at(entries)
    return numbers[numbers >= 0]


def _owners(findings: Findings, blocks: Blocks, entries: Array) -> tuple[Array, Array]:
    """Return pairs (entry block of a function, block of the function).

    Blocks that are connected without passing the entry of a function form a part. A part with one
    entry is a function. In a part with several entries, each function has the blocks that it can
    reach. A part without an entry becomes a function.
    """
    count = len(blocks.start)
    target, kind = blocks.edge_to, blocks.edge_kind
    begun = np.zeros(count, bool)
    begun[entries] = True
    inner = np.flatnonzero((target >= 0) & (kind != Edge.CALL) & (kind != Edge.RETURN))
    inner = inner[~begun[target[inner]]]
    source = np.searchsorted(blocks.edge_begin, inner, side="right") - 1
    target = target[inner]
    # Targets of exceptions and of unknown jumps belong to the range in which they are.
    head, root = _roots(findings, blocks)
    no_entry = ~member(root, entries)
    source = np.concatenate([source, head[no_entry]], dtype=np.int32, casting="same_kind")
    target = np.concatenate([target, root[no_entry]], dtype=np.int32, casting="same_kind")
    del inner
    part = components(count, source, target)
    beginnings = np.bincount(part[entries], minlength=count)
    # A part is named by its first block, which is the entry if it has none.
    owner = np.arange(count)
    owner[part[entries]] = entries
    owner = owner[part]
    single = beginnings[part] <= 1
    several = beginnings > 1
    function, block = [owner[single]], [np.flatnonzero(single)]
    if several.any():
        pairs = _shared(part, several, entries, source, target, findings.cut_short)
        function.append(pairs[0])
        block.append(pairs[1])
    return np.concatenate(function), np.concatenate(block)


def _roots(findings: Findings, blocks: Blocks) -> tuple[Array, Array]:
    """Return pairs of blocks: the beginning of a range, and unreached code in the range."""
    unwind, code, ranges = findings.program.unwind, findings.code, findings.ranges
    pad = code.offset(unwind.pad)
    served = ranges.unwind_start[unwind.pad_range]
    no_pads = findings.roots[~member(findings.roots, distinct(pad))]
    number = ranges.number(no_pads)
    behind = no_pads[number < 0]
    head = blocks.at(np.concatenate([served, ranges.start[number[number >= 0]]]))
    # Outside of ranges it comes directly after a block of its function.
    head = np.concatenate([head, blocks.at(behind) - 1])
    root = blocks.at(np.concatenate([pad, no_pads[number >= 0], behind]))
    keep = (head >= 0) & (root >= 0)
    return head[keep], root[keep]


def components(count: int, a: Array, b: Array) -> Array:
    """Return for each of `count` nodes the lowest node of its connected component (i4).

    Edges connect a[i] and b[i].
    """
    label = np.arange(count, dtype=np.int32)
    while True:
        left, right = label[a], label[b]
        apart = left != right
        if not apart.any():
            return label
        a, b, left, right = a[apart], b[apart], left[apart], right[apart]
        np.minimum.at(label, np.maximum(left, right), np.minimum(left, right))
        while True:
            further = label[label]
            if (further == label).all():
                break
            label = further


def _shared(
    part: Array,
    several: Array,
    entries: Array,
    source: Array,
    target: Array,
    cut_short: list[str],
) -> tuple[Array, Array]:
    """Return pairs (entry, block) of the parts that several functions share.

    `part`: the part of each block; `several`: whether a part is shared. If it costs too much, a
    note is added to `cut_short`.
    """
    inside = several[part[source]]
    ways: dict[int, list[int]] = {}
    for one, other in zip(source[inside].tolist(), target[inside].tolist(), strict=True):
        ways.setdefault(one, []).append(other)
    blocks = np.flatnonzero(several[part])
    begins = entries[several[part[entries]]]
    budget = SHARED * len(blocks)
    function, block = [], []
    seen_by_any: set[int] = set()
    for entry in begins.tolist():
        seen = {entry}
        todo = [entry]
        while todo and budget > 0:
            for other in ways.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
            budget -= 1
        function += [entry] * len(seen)
        block += sorted(seen)
        seen_by_any |= seen
    if budget <= 0:
        cut_short.append(TANGLED)
    # Blocks that no function reaches, or that cost too much, go to the nearest entry before them.
    rest = blocks[~np.isin(blocks, np.fromiter(seen_by_any, np.int64, len(seen_by_any)))]
    order = np.lexsort((begins, part[begins]))
    begin_part, rest_part = part[begins][order].astype(np.int64), part[rest].astype(np.int64)
    keys = begin_part * (len(part) + 1) + begins[order]
    at = np.searchsorted(keys, rest_part * (len(part) + 1) + rest, side="right") - 1
    low = np.searchsorted(begin_part, rest_part)
    nearest = begins[order][np.maximum(at, low)]
    return (
        np.concatenate([np.asarray(function, np.int64), nearest]),
        np.concatenate([np.asarray(block, np.int64), rest]),
    )


def _names(findings: Findings, blocks: Blocks, entries: Array) -> list[str]:
    program = findings.program
    names = dict(zip(program.function_address.tolist(), program.function_name, strict=True))
    jumps = np.flatnonzero(
        (blocks.flow[entries] == Flow.JUMP_INDIRECT) & (blocks.count[entries] <= 2)
    )
    pointers = blocks.named(entries[jumps])
    slots = dict(zip(program.slot_address.tolist(), program.slot_name, strict=True))
    result = [names.get(one, "") for one in blocks.code.address(blocks.start[entries]).tolist()]
    for i, pointer in zip(jumps.tolist(), pointers.tolist(), strict=True):
        result[i] = result[i] or slots.get(pointer, "")
    return result
