"""True partners of blocks of two programs: blocks that share a line of source.

Partners are in functions that are partners; lines of A are translated to lines of B by the
difference of the sources. Lines cannot tell blocks of one line apart, so a block may have several
partners; at most the size of a largest matching can be right at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.diff.truth.ground_truth import GroundTruth, LeftOut, Score, Side
from tokmill.x86.image.debug.debug_info import DebugInfo
from tokmill.x86.image.ranges import distinct, expand, member

MOST_OF_A_LINE = 1 << 20
"""Lines that more pairs of blocks of one function share are not judged."""
LINE_BITS = 24

# Why a block has no partner.
NO_FUNCTION = "of a function without a partner"
NO_LINE = "without a line"
ELSEWHERE = "of lines whose code is in another function of the other (inlined in one of them)"
NOWHERE = "of lines that are not in the other, or have no code there"
WHY = ("", NO_FUNCTION, NO_LINE, ELSEWHERE, NOWHERE)


@dataclass(slots=True)
class _Lines:
    """The lines of the blocks of one program; B blocks, n pairs of a block and a line."""

    first: Array
    """(B,) i8: the first block at the same address, because functions may share blocks."""
    match: Array
    """(B,) i8: the true match of the function that it is in; -1 for none."""
    has_line: Array
    """(B,) bool."""
    block: Array
    """(n,) i8."""
    line: Array
    """(n,) i8: file << 24 | line."""


def judge_blocks(truth: GroundTruth, a: Array, b: Array) -> tuple[Score, LeftOut]:
    """Return how many matches of blocks are right, wrong and lost, and what was not judged.

    `a` and `b` (i8, of equal length) are blocks of the two graphs. A match is judged if one of the
    two has a partner and both have a line; it is right if they are partners. Lost is the size of a
    largest matching of partners minus the right matches.
    """
    lines_a, lines_b = _lines(truth.a), _lines(truth.b)
    file, number = truth.source.lines(*_split(lines_a.line))
    to_b = np.where(number >= 0, (file << LINE_BITS) | number, -1)
    left_out = LeftOut()
    partners_a, partners_b = _partners(lines_a, lines_b, to_b, left_out)
    why_a = _why(lines_a, partners_a, to_b, distinct(_rows(truth.b.info)))
    file, number = truth.source.lines(*_split(_rows(truth.a.info)))
    code_a = distinct(((file << LINE_BITS) | number)[number >= 0])
    why_b = _why(lines_b, partners_b, lines_b.line, code_a)
    for why, lines, count in ((why_a, lines_a, left_out.a), (why_b, lines_b, left_out.b)):
        numbers = np.bincount(why[distinct(lines.first)], minlength=len(WHY)).tolist()
        count.update({WHY[i]: n for i, n in enumerate(numbers) if i and n})
    width = max(1, len(lines_b.first))
    found = distinct(lines_a.first[a] * width + lines_b.first[b])
    one, other = found // width, found % width
    lineless = (why_a[one] == WHY.index(NO_LINE)) | (why_b[other] == WHY.index(NO_LINE))
    counts = ((why_a[one] == 0) | (why_b[other] == 0)) & ~lineless
    right = int(member(found, distinct(partners_a * width + partners_b)).sum())
    for i in why_a[one][~counts].tolist():
        left_out.matches[WHY[i] or NO_LINE] += 1
    most = _largest(partners_a, partners_b, len(lines_a.first), width)
    return Score(right, int(counts.sum()) - right, max(0, most - right)), left_out


def _lines(side: Side) -> _Lines:
    graph, info = side.graph, side.info
    blocks = len(graph.block_address)
    _, first, same = np.unique(graph.block_address, return_index=True, return_inverse=True)
    function = info.function_at(graph.block_address)
    match = np.where(function >= 0, np.append(side.label, -1)[function], -1)
    counts = np.diff(graph.block_instructions)
    block = np.repeat(np.arange(blocks), counts)
    begins = np.cumsum(graph.lengths, dtype=np.int64) - graph.lengths
    inside = begins - graph.block_bytes[:-1][block]
    row = info.row_at(graph.block_address[block] + inside.astype(np.uint64))
    has_line = np.zeros(blocks, bool)
    has_line[block[row >= 0]] = True
    counted = (row >= 0) & (match[block] >= 0) & (first[same][block] == block)
    number, place = np.unique(_rows(info)[row[counted]], return_inverse=True)
    pairs = distinct(block[counted] * max(1, len(number)) + place)
    return _Lines(
        first[same],
        match,
        has_line,
        pairs // max(1, len(number)),
        number[pairs % max(1, len(number))],
    )


def _rows(info: DebugInfo) -> Array:
    lines: Array = (info.row_file << LINE_BITS) | (info.row_line & ((1 << LINE_BITS) - 1))
    return lines


def _split(lines: Array) -> tuple[Array, Array]:
    return lines >> LINE_BITS, lines & ((1 << LINE_BITS) - 1)


def _partners(a: _Lines, b: _Lines, to_b: Array, left_out: LeftOut) -> tuple[Array, Array]:
    """Return the pairs of blocks that share a line in functions that are partners (i8 each)."""
    mine = np.flatnonzero(to_b >= 0)
    number, place = np.unique(np.concatenate([to_b[mine], b.line]), return_inverse=True)
    place += np.concatenate([a.match[a.block[mine]], b.match[b.block]]) * len(number)
    keys_a, keys_b = place[: len(mine)], place[len(mine) :]
    order = np.argsort(keys_b, kind="stable")
    low = np.searchsorted(keys_b[order], keys_a, side="left")
    counts = np.searchsorted(keys_b[order], keys_a, side="right") - low
    sorted_a = np.sort(keys_a)
    times = np.searchsorted(sorted_a, keys_a, side="right") - np.searchsorted(sorted_a, keys_a)
    many = counts * times > MOST_OF_A_LINE
    if many.any():
        left_out.a["of lines that too many blocks share"] = int(many.sum())
        counts[many] = 0
    left = np.repeat(a.block[mine], counts)
    right = b.block[order[expand(low, counts)]]
    width = max(1, len(b.first))
    pairs = distinct(left * width + right)
    return pairs // width, pairs % width


def _why(lines: _Lines, partners: Array, mapped: Array, code: Array) -> Array:
    """Return why each block has no partner: (B,) numbers of `WHY`."""
    why = np.full(len(lines.first), WHY.index(NOWHERE), np.int64)
    why[lines.block[member(mapped, code)]] = WHY.index(ELSEWHERE)
    why[~lines.has_line] = WHY.index(NO_LINE)
    why[lines.match < 0] = WHY.index(NO_FUNCTION)
    why[partners] = 0
    found: Array = why[lines.first]
    return found


def _largest(a: Array, b: Array, height: int, width: int) -> int:
    """Return the size of a largest matching: each block is in at most one pair."""
    sparse = plugins.require("scipy.sparse")
    graph = sparse.csr_matrix((np.ones(len(a), bool), (a, b)), shape=(max(1, height), width))
    found = plugins.require("scipy.sparse.csgraph").maximum_bipartite_matching(graph)
    return int((found >= 0).sum())
