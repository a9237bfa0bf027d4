"""Searches for functions outside of the ranges that tables describe.

A function is code that is called, that a pointer leads to, that is jumped to across other
functions, or that looks like an entry after padding.
"""

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, changes, distinct, expand, member, numbers_at
from tokmill.x86.lift.code import INT3, Code
from tokmill.x86.lift.decode import Flow, Instructions
from tokmill.x86.lift.findings import (
    ALIGNMENT,
    Findings,
    Ranges,
    gaps,
    is_padding,
    opcodes,
    skip_padding,
)
from tokmill.x86.lift.reach import Ways

LANDING = np.frombuffer(b"\xf3\x0f\x1e\xfa\xf3\x0f\x1e\xfb", np.uint8).reshape(2, 4)
FEW = 64
"""Gaps between two ranges of at most so many bytes are code as a whole, or no code."""
PUSH_FRAME = {64: b"\x55\x48\x89\xe5", 32: b"\x55\x89\xe5"}
# Opcodes that compilers do not use: input and output, system flags, decimal arithmetic, LOOP, …
RARE = np.isin(
    np.arange(256),
    [0x06, 0x07, 0x0E, 0x16, 0x17, 0x1E, 0x1F, 0x27, 0x2F, 0x37, 0x3F, 0x60, 0x61, 0x6C, 0x6D, 0x6E,
     0x6F, 0x9A, 0xC8, 0xCA, 0xCB, 0xCE, 0xCF, 0xD4, 0xD5, 0xD6, 0xD7, 0xE0, 0xE1, 0xE2, 0xE4, 0xE5,
     0xE6, 0xE7, 0xEA, 0xEC, 0xED, 0xEE, 0xEF, 0xF1, 0xF5, 0xFA, 0xFB],
)  # fmt: skip


def range_gaps(ways: Ways, ranges: Ranges) -> Array:
    """Return the beginnings (offsets) of unreached code in ranges."""
    instructions = ways.instructions
    begin, end = gaps(ways)
    # A gap may overlap several ranges.
    first = np.searchsorted(ranges.stop, begin, side="right")
    last = np.searchsorted(ranges.start, end)
    count = np.maximum(last - first, 0)
    number = expand(first, count)
    begin = np.maximum(np.repeat(begin, count), ranges.start[number])
    end = np.minimum(np.repeat(end, count), ranges.stop[number])
    begin, end = begin[end > begin], end[end > begin]
    # After an instruction that does not fall through, something new begins.
    fresh = instructions.start[np.minimum(ways.last + 1, len(instructions.start) - 1)]
    low, high = np.searchsorted(fresh, begin, side="right"), np.searchsorted(fresh, end)
    count = np.maximum(high - low, 0)
    begin = np.concatenate([begin, fresh[expand(low, count)]])
    end = np.concatenate([end, np.repeat(end, count)])
    begin = skip_padding(instructions, begin, end)
    begin, end = begin[begin < end], end[begin < end]
    keep = np.ones(len(begin), bool)
    rows = instructions.row(begin)
    decoded = np.flatnonzero(rows >= 0)
    stop = ways.last[ways.run[rows[decoded]]]
    keep[decoded] = instructions.flow[stop] != Flow.INVALID
    return distinct(begin[keep])


def trapped_starts(findings: Findings, functions: Array) -> Array:
    """Return offsets outside of the ranges at multiples of 16 after INT3.

    Linkers and some compilers fill the space between functions with it, but never align loops so.
    """
    instructions, code = findings.instructions, findings.code
    trap = np.flatnonzero(instructions.flow[:-1] == Flow.STOP)
    trap = trap[code.linked[instructions.start[trap]] == INT3]
    offsets = instructions.start[trap + 1].astype(np.int64)
    offsets = offsets[code.address(offsets) % ALIGNMENT == 0]
    offsets, rows = _fresh(findings, functions, code.address(offsets))
    return offsets[instructions.flow[rows] != Flow.STOP]


def hidden_starts(findings: Findings) -> Array:
    """Return offsets outside of the ranges with a known address, which must be decoded.

    Because of data before them, the linear pass may not have found an instruction there.
    """
    code, ways, ranges = findings.code, findings.ways, findings.ranges
    offsets = distinct(code.offset(np.concatenate([_taken(findings), _pointed(findings)])))
    offsets = offsets[offsets >= 0]
    offsets = offsets[(ranges.number(offsets) < 0) & (findings.instructions.row(offsets) < 0)]
    begin, end = gaps(ways)
    at = np.searchsorted(begin, offsets, side="right") - 1
    offsets = offsets[(at >= 0) & (offsets < np.append(end, 0)[at])]
    begins = (code.address(offsets) % ALIGNMENT == 0) | _looks(code, offsets)
    return offsets[begins]


def _taken(findings: Findings) -> Array:
    tables = findings.tables
    value = tables.constant[findings.ways.reached(findings.instructions.row(tables.at))]
    labels = np.asarray(sorted(tables.labels), np.uint64)
    return value[~member(value, labels)]


def taken_starts(findings: Findings, functions: Array) -> Array:
    """Return offsets outside of the ranges whose address reached code takes."""
    return _fresh(findings, functions, _taken(findings))[0]


def pointed_starts(findings: Findings, functions: Array, *, doubtful: bool = False) -> Array:
    """Return offsets outside of the ranges that pointers in memory lead to.

    Such a pointer may also lead to a label within a function. So offsets that do not look like an
    entry are only returned if `doubtful`: the first in each gap, when the code before it is known.
    """
    offsets, _ = _fresh(findings, functions, _pointed(findings))
    begin, _ = gaps(findings.ways)
    gap = np.searchsorted(begin, offsets, side="right") - 1
    first = changes(gap)
    no_label = _no_jump_between(findings.instructions, begin[gap], offsets)
    return offsets[(first & doubtful) | no_label | _looks(findings.code, offsets)]


def _pointed(findings: Findings) -> Array:
    # Which pointers are jump tables depends on the decoded instructions, which change rarely.
    decoded = len(findings.instructions.start)
    if findings.pointed[0] != decoded:
        findings.pointed = decoded, distinct(findings.program.pointers, _words(findings))
    return findings.pointed[1]


def _words(findings: Findings) -> Array:
    """Return possible pointers to code in the data of a program with a fixed address (u8).

    Successive pointers that an instruction reads at a scaled index are a jump table.
    """
    program, pointers = findings.program, [np.zeros(0, np.uint64)]
    tables = _scaled_tables(findings.instructions)
    for section in program.sections:
        if not program.fixed or section.execute:
            continue
        count = len(section.data) // program.word
        words = section.linked[: count * program.word].view(f"<u{program.word}").astype(np.uint64)
        code = findings.code.offset(words) >= 0
        # The beginning of the successive pointers to which each word belongs.
        number = np.arange(count)
        begin = np.maximum.accumulate(np.where(code, 0, number + 1))
        table = ((tables - np.uint64(section.address)) // np.uint64(program.word)).astype(np.int64)
        table = distinct(table[(table >= 0) & (table < count)])
        last = np.append(-1, table)[np.searchsorted(table, number, side="right")]
        pointers.append(words[code & (last < begin)])
    return np.concatenate(pointers)


def _scaled_tables(instructions: Instructions) -> Array:
    """Return the addresses (u8) of jumps and loads with a scaled index: `[8 * index + table]`.

    These are FF /4 or 8B with a SIB byte without base, so the instruction ends in 4 bytes of
    address.
    """
    data, bits = instructions.code.linked, instructions.code.bits
    end = instructions.start.astype(np.int64) + instructions.length
    end = end[instructions.length >= 7]
    opcode, form, scale = data[end - 7], data[end - 6], data[end - 5]
    rows = ((opcode == 0x8B) & ((form & 0xC7) == 4)) | ((opcode == 0xFF) & (form == 0x24))
    rows &= ((scale & 7) == 5) & (scale >> 6 == (3 if bits == 64 else 2))
    value: Array = numbers_at(data, end[rows] - 4, "<i4").astype(np.uint64)
    return value & np.uint64((1 << bits) - 1)


def _no_jump_between(instructions: Instructions, begin: Array, end: Array) -> Array:
    """Return where no indirect jump is between two offsets, so that no jump table leads there."""
    jumps = instructions.start[instructions.indirect_jumps()]
    return np.searchsorted(jumps, begin) == np.searchsorted(jumps, end)


def _fresh(findings: Findings, functions: Array, address: Array) -> tuple[Array, Array]:
    """Return offsets and rows of those addresses that are unreached code outside of the ranges."""
    offsets = distinct(findings.code.offset(address))
    offsets = offsets[offsets >= 0]
    offsets = offsets[(findings.ranges.number(offsets) < 0) & ~member(offsets, functions)]
    rows = findings.instructions.row(offsets)
    offsets, rows = offsets[rows >= 0], rows[rows >= 0]
    ways = findings.ways
    keep = ~ways.reached(rows) & _sound(findings, rows) & ~is_padding(findings.instructions, rows)
    return offsets[keep], rows[keep]


def _looks(code: Code, offsets: Array) -> Array:
    head = code.linked[offsets[:, None] + np.arange(4)]
    frame = np.frombuffer(PUSH_FRAME[code.bits], np.uint8)
    looks = (head[:, None, :] == LANDING).all(axis=2).any(axis=1) & ~_saves(code, offsets + 4)
    return looks | (head[:, : len(frame)] == frame).all(axis=1)


def _saves(code: Code, offsets: Array) -> Array:
    """Return where RAX is saved first, as in landing pads: `mov register, rax`."""
    head = code.linked[offsets[:, None] + np.arange(3)]
    return ((head[:, 0] & 0xFE) == 0x48) & (head[:, 1] == 0x89) & ((head[:, 2] & 0xF8) == 0xC0)


def tail_starts(findings: Findings, functions: Array) -> Array:
    """Return offsets outside of the ranges that are only jumped to, and only across functions."""
    instructions, ways = findings.instructions, findings.ways
    # Most ways lead to places that cannot be one; these are removed first.
    wanted = np.zeros(len(instructions.start), bool)
    wanted[ways.target[instructions.flow[ways.source] == Flow.JUMP]] = True
    rows = np.flatnonzero(wanted)
    offsets = instructions.start[rows].astype(np.int64)
    wanted[rows] = (findings.ranges.number(offsets) < 0) & ~member(offsets, functions)
    kept = np.flatnonzero(wanted[ways.target])
    kept = kept[ways.reached(ways.source[kept])]
    source, target = ways.source[kept], ways.target[kept]
    flow = instructions.flow[source]
    offset = instructions.start[target].astype(np.int64)
    from_ = instructions.start[source].astype(np.int64)
    crossing = np.searchsorted(functions, from_, side="right") != np.searchsorted(
        functions, offset, side="right"
    )
    # A jump over padding leads to another function.
    end = from_ + instructions.length[source]
    aligned = (offset > end + 1) & (findings.code.address(offset) % ALIGNMENT == 0)
    crossing |= aligned & (skip_padding(instructions, end, offset) == offset)
    # Jumps to retpolines may have a jump table, whose targets are not functions. The function
    # before a retpoline may jump to it too.
    thunk = instructions.flow[target] == Flow.CALL_LOCAL
    far = crossing & (flow == Flow.JUMP) & (thunk | ~member(source, instructions.gates))
    candidates = distinct(target[far])
    candidates = candidates[~member(candidates, distinct(target[~far & ~thunk]))]
    # Only padding may fall through to it.
    before = np.maximum(candidates - 1, 0)
    fallen = (ways.run[before] == ways.run[candidates]) & ~is_padding(instructions, before)
    return instructions.start[candidates[~fallen]].astype(np.int64)


def gap_starts(findings: Findings, functions: Array) -> Array:
    """Return offsets outside of the ranges at which unreached code begins like a function.

    It begins at a multiple of 16, after padding or at the beginning of a gap; or with ENDBR, or by
    setting up a frame pointer. In a program without landing pads, unreached code is a function in
    any case, if the whole gap is plausible.
    """
    instructions, code, ways = findings.instructions, findings.code, findings.ways
    begin, end = gaps(ways)
    if not len(begin):
        return begin
    plausible = _plausible(ways, begin, end)
    whole = plausible & (not _has_landing_pads(findings.program))
    gap = np.arange(len(begin))
    # After an instruction that does not fall through something new begins. It is a function if no
    # decoded code leads there.
    targets = np.zeros(len(instructions.start), bool)
    targets[ways.target] = True
    rows = ways.last[:-1] + 1
    rows = rows[~targets[rows]]
    inner = instructions.start[rows].astype(np.int64)
    at = np.searchsorted(begin, inner) - 1
    inside = (at >= 0) & (inner < end[at])
    first = np.concatenate([np.ones(len(begin), bool), np.zeros(int(inside.sum()), bool)])
    place, gap = np.concatenate([begin, inner[inside]]), np.concatenate([gap, at[inside]])
    start = skip_padding(instructions, place, end[gap])
    padded = start > place
    rows = instructions.row(start)
    keep = (start < end[gap]) & (findings.ranges.number(start) < 0) & (rows >= 0)
    # If a jump leads to unknown places of its function, the following code may be these places.
    unknown = np.fromiter(findings.computed, np.int64, len(findings.computed))
    doubtful = distinct(np.searchsorted(functions, unknown, side="right"))
    keep &= ~member(np.searchsorted(functions, start), doubtful)
    looks = _looks(code, start)
    # After a call that does not return comes more code of the caller.
    keep &= padded | looks | ~member(start, _behind_quiet(findings))
    aligned = code.address(start) % ALIGNMENT == 0
    free = ~targets[rows]
    no_label = (looks & aligned) | _no_jump_between(instructions, begin[gap], start)
    keep &= first | (free & no_label)
    start, first, padded, gap = start[keep], first[keep], padded[keep], gap[keep]
    looks, aligned, rows = looks[keep], aligned[keep], rows[keep]
    # Up to the place where the next function may begin.
    ordered = np.sort(place)
    behind = np.append(ordered, end[-1])[np.searchsorted(ordered, start, side="right")]
    good = _plausible(ways, start, np.minimum(behind, end[gap]), ends=False)
    is_start = looks | (aligned & (padded | (first & ~_saves(code, start))) & good)
    is_start |= whole[gap]
    # A small gap between two ranges is code as a whole, or not code.
    between = member(end, findings.ranges.start) & (end - begin <= FEW)
    is_start &= plausible[gap] | ~between[gap]
    is_start &= _sound(findings, rows) & (instructions.flow[rows] != Flow.STOP)
    called = _called_from(findings, functions, begin[plausible], end[plausible])
    return distinct(start[is_start], called)


def _called_from(findings: Findings, functions: Array, begin: Array, end: Array) -> Array:
    """Return offsets outside of the ranges that are called by code between some offsets."""
    ways = findings.ways
    call = findings.instructions.start[ways.call].astype(np.int64)
    gap = np.searchsorted(begin, call, side="right") - 1
    inside = (gap >= 0) & (call < np.append(end, 0)[gap])
    called = ways.callee[inside]
    return _fresh(findings, functions, findings.code.address(called[called >= 0]))[0]


def silent_gaps(findings: Findings, functions: Array) -> Array:
    """Return offsets, outside of the ranges, of code after calls that do not return.

    The compiler did not know that they do not return, so it wrote code there.
    """
    begin, _ = gaps(findings.ways)
    begin = begin[(findings.ranges.number(begin) < 0) & member(begin, _behind_quiet(findings))]
    begin = begin[~member(begin, functions) & ~_looks(findings.code, begin)]
    rows = findings.instructions.row(begin)
    begin, rows = begin[rows >= 0], rows[rows >= 0]
    return begin[~is_padding(findings.instructions, rows) & _sound(findings, rows)]


def _behind_quiet(findings: Findings) -> Array:
    instructions = findings.instructions
    rows = instructions.row(findings.quiet)
    return findings.quiet + instructions.length[rows]


def _has_landing_pads(program: Program) -> bool:
    return any(section.name == ".gcc_except_table" for section in program.sections) or any(
        "_Unwind_Resume" in names for names in (program.slot_name, program.function_name)
    )


def _plausible(ways: Ways, begin: Array, end: Array, *, ends: bool = True) -> Array:
    """Return for each gap whether all of it may be code of a compiler.

    It has no rare instruction, no jump into the middle of another instruction and, if `ends`, it
    does not fall through its end.
    """
    instructions = ways.instructions
    low, high = np.searchsorted(instructions.start, begin), np.searchsorted(instructions.start, end)
    inside = expand(low, high - low)
    gap = np.repeat(np.arange(len(begin)), high - low)
    first, _ = opcodes(instructions, inside)
    bad = RARE[first] | (instructions.flow[inside] == Flow.INVALID)
    bad |= member(inside, ways.missing_source[ways.missing >= 0])
    # An instruction must end where the next one begins.
    start = instructions.start[inside].astype(np.int64)
    over = (start + instructions.length[inside])[:-1] > start[1:]
    bad[:-1] |= over & (gap[1:] == gap[:-1])
    solid = ~is_padding(instructions, inside)
    final = np.full(len(begin), -1)
    np.maximum.at(final, gap[solid], inside[solid])
    result: Array = np.bincount(gap[bad], minlength=len(begin)) == 0
    result &= (final >= 0) & ((ways.last[ways.run[final]] == final) | (not ends))
    result &= instructions.start[final] + instructions.length[final] <= end
    return result


def _sound(findings: Findings, rows: Array) -> Array:
    """Return which rows begin a run with a valid end, no part of which is used as data."""
    instructions, ways = findings.instructions, findings.ways
    last = ways.last[ways.run[rows]] if len(rows) else rows
    result: Array = instructions.flow[last] != Flow.INVALID
    if result.any():
        used = findings.data_uses.find(findings.code, findings.ways, findings.tables)
        end = instructions.start[last].astype(np.int64) + instructions.length[last]
        result &= np.searchsorted(used, instructions.start[rows]) == np.searchsorted(used, end)
    return result


def branched_to(findings: Findings, returns: Array, candidates: Array) -> Array:
    """Return which starts of ranges are only reached by conditional branches of other code.

    `returns`: ascending offsets of the blocks that return.
    """
    ways, instructions, code = findings.ways, findings.instructions, findings.code
    reached = ways.reached(ways.source)
    branch = reached & (instructions.flow[ways.source] == Flow.BRANCH)
    target = instructions.start[ways.target].astype(np.int64)
    candidates = candidates[member(candidates, distinct(target[branch]))]
    taken = code.offset(findings.program.pointers)
    tables = findings.tables
    used = ways.reached(instructions.row(tables.at))
    taken = np.concatenate([taken, code.offset(tables.constant[used])])
    candidates = candidates[~member(candidates, distinct(taken))]
    rows = instructions.row(candidates)
    before = np.maximum(rows - 1, 0)
    padded = is_padding(instructions, before) & (code.address(candidates) % ALIGNMENT == 0)
    candidates = candidates[~padded]
    # A conditional branch can also be a tail call of a function, which then returns itself.
    number = findings.ranges.number(candidates)
    stop = (findings.ranges.stop if len(findings.ranges.stop) else np.asarray([code.size]))[number]
    ends = np.searchsorted(returns, candidates) < np.searchsorted(returns, stop)
    from_ = instructions.start[ways.source].astype(np.int64)
    inside = findings.ranges.number(from_)
    leaves = (inside >= 0) & (inside != findings.ranges.number(target))
    back = member(candidates, findings.ranges.start[distinct(inside[leaves])])
    return candidates[~ends | back]
