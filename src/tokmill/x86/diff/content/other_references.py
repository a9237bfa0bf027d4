"""The operands of matched blocks that refer to something else, with what they refer to in words."""

import struct
from typing import NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.diff.content.data_changes import program_changes
from tokmill.x86.diff.content.operand_references import (
    CODE,
    DATA,
    FUNCTION,
    IMPORT,
    STRING,
    TABLE,
    Compared,
    Operands,
    Pairs,
)
from tokmill.x86.diff.match_blocks import BlockMatches
from tokmill.x86.diff.result import ProgramChanges, References
from tokmill.x86.features.function_features import bare_name, import_names
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import distinct, expand, member, numbered

SHOWN = 16
"""Bytes of data that are shown."""


def compare(
    compared: Compared, alone: tuple[Array, Array], blocks: BlockMatches, rows: Array
) -> tuple[References, ProgramChanges]:
    """Return the operands that differ in pairs of blocks with the same shape, and other changes.

    Args:
        alone: a hash of each function without the functions it leads to, (F,) u8 of each program.
        rows: i8, ascending: the pairs of blocks.
    """
    graphs = [side.graph for side in compared.sides]
    match, one, other = blocks.match[rows], blocks.a[rows], blocks.b[rows]
    pairs = compared.pair(match, rows, one, other)
    same = compared.equal(pairs)
    _accept_twins(compared, alone, pairs, same)
    slots = compare_slots(graphs[0], graphs[1], match, rows, one, other)
    odd, moved = np.flatnonzero(~same), np.flatnonzero(~slots.same)
    texts: list[list[str]] = []
    at = []
    operands = (pairs.a, slots.a), (pairs.b, slots.b)
    for number, (graph, (references, places)) in enumerate(zip(graphs, operands, strict=True)):
        stack = places[moved]
        texts.append(_texts(compared, number, references[odd]))
        texts[number] += [slot_text(graph, one) for one in stack.tolist()]
        rows = np.concatenate(
            [compared.sides[number].row[references[odd]], graph.slot_place[stack]]
        )
        at.append(addresses_of(graph, rows))
    texts[1] = [
        f"{new}, with other content" if old == new else new for old, new in zip(*texts, strict=True)
    ]
    of, block = (
        np.concatenate([getattr(pairs, name)[odd], getattr(slots, name)[moved]])
        for name in ("match", "block")
    )
    order = np.lexsort((at[0], of))
    return (
        References(
            of[order], block[order], at[0][order], at[1][order],
            *([one[i] for i in order.tolist()] for one in texts),
        ),
        program_changes(compared, pairs, same),
    )  # fmt: skip


def _accept_twins(
    compared: Compared, alone: tuple[Array, Array], pairs: Pairs, same: Array
) -> None:
    """Let functions count as the same that are not matched, but do the same in all respects.

    Of several equal functions it is not known which one is which.
    """
    a, b = compared.sides
    rows = np.flatnonzero(~same & (a.kind[pairs.a] == FUNCTION) & (b.kind[pairs.b] == FUNCTION))
    one, other = a.number[pairs.a[rows]], b.number[pairs.b[rows]]
    equal = alone[0][one] == alone[1][other]
    names = a.graph.function_name, b.graph.function_name
    if compared.named:
        equal &= np.asarray(
            [not (names[0][i] and names[1][j]) or names[0][i] == names[1][j]
             for i, j in zip(one.tolist(), other.tolist(), strict=True)], bool,
        )  # fmt: skip
    rows, one, other = rows[equal], one[equal], other[equal]
    width = len(names[1]) + 1
    key = one * width + other
    twins = distinct(key)
    one, other = np.divmod(twins, width)
    sizes = np.diff(a.graph.function_blocks)[one]
    fits = sizes == np.diff(b.graph.function_blocks)[other]
    twins, one, other, sizes = twins[fits], one[fits], other[fits], sizes[fits]
    number = np.repeat(np.arange(len(twins)), sizes)
    blocks = [expand(s.graph.function_blocks[f], sizes) for s, f in ((a, one), (b, other))]
    fits = np.diff(a.begin)[blocks[0]] == np.diff(b.begin)[blocks[1]]
    good = np.ones(len(twins), bool)
    good[number[~fits]] = False
    beside = number[fits], number[fits], blocks[0][fits], blocks[1][fits]
    inside = compared.pair(*beside)
    right = compared.equal(inside)
    slots = compare_slots(a.graph, b.graph, *beside)
    good[slots.match[~slots.same]] = False
    # A twin may lead to another one, as long as that is one.
    calls = (a.kind[inside.a] == FUNCTION) & (b.kind[inside.b] == FUNCTION) & ~right
    good[inside.match[~right & ~calls]] = False
    led = a.number[inside.a[calls]] * width + b.number[inside.b[calls]]
    caller = inside.match[calls]
    while True:
        wrong = distinct(caller[~member(led, twins[good])])
        if not good[wrong].any():
            break
        good[wrong] = False
    same[rows] = member(key, twins[good])


def addresses_of(graph: Graph, rows: Array) -> Array:
    block = np.searchsorted(graph.block_instructions, rows, side="right") - 1
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(graph.lengths, dtype=np.int64)])
    inside = begins[rows] - graph.block_bytes[block]
    return graph.block_address[block] + inside.astype(np.uint64)


def _texts(compared: Compared, number: int, operands: Array) -> list[str]:
    side = compared.sides[number]
    graph = side.graph
    slots = dict(zip(graph.import_slot.tolist(), graph.import_slot_name, strict=True))
    slots |= dict(zip(graph.import_address.tolist(), import_names(graph), strict=True))
    symbol, inside = side.memory.names(side.address[operands])
    extent = side.memory.extent(side.address[operands])[0]
    result = []
    rows = zip(
        operands.tolist(), side.kind[operands].tolist(), side.address[operands].tolist(),
        symbol.tolist(), inside.tolist(), extent.tolist(), strict=True,
    )  # fmt: skip
    for operand, kind, address, name, offset, free in rows:
        if kind == FUNCTION:
            result.append(_function_text(compared, number, int(side.number[operand])))
        elif kind == IMPORT:
            result.append(bare_name(slots[address]))
        elif kind == STRING:
            result.append(f'"{graph.strings[int(side.text[operand])]}"')
        elif name >= 0 and compared.named:
            result.append(graph.symbol_name[name] + (f"+{offset:#x}" if offset else ""))
        else:
            result.append(_data_text(side, operand, free))
    return result


def _function_text(compared: Compared, side: int, function: int) -> str:
    """Return the name of a function; of one without a name, in B, also that of its partner."""
    graph, old = compared.sides[side].graph, compared.sides[0].graph
    partner = int(compared.functions[side][function])
    (text,) = graph.names([function])
    if graph.function_name[function] or not side or partner >= len(old.function_name):
        return text
    return f"{text} (old {old.names([partner])[0]})"


def _data_text(side: Operands, operand: int, free: int) -> str:
    """Return data without a name in words; `free`: bytes before something else may begin."""
    address, width, kind = (
        int(column[operand]) for column in (side.address, side.width, side.kind)
    )
    what = {TABLE: "jump table", CODE: "code"}.get(kind, "data")
    size = width if width > 0 else free
    content = side.memory.read(address, min(size, SHOWN)) if kind == DATA else np.zeros(0, "u1")
    raw = content.tobytes()
    if width > 0 and len(raw) == width and (number := _number(side, operand, raw)):
        return f"{number} at {address:x}"
    head, zero, _ = raw.partition(b"\0")
    if zero and head and width <= 0 and head.isascii() and head.decode().isprintable():
        return f'"{head.decode()}"'
    return f"{what} at {address:x}" + (f" ({raw.hex(' ')})" if raw.strip(b"\0") else "")


def _number(side: Operands, operand: int, raw: bytes) -> str:
    """Return the number that an instruction reads, in words; "" where it is none."""
    graph, row, iced = side.graph, int(side.row[operand]), plugins.require("iced_x86")
    block = int(np.searchsorted(graph.block_instructions, row, side="right")) - 1
    begin = int(graph.block_bytes[block])
    begin += int(graph.lengths[int(graph.block_instructions[block]) : row].sum())
    code = graph.code[begin : begin + int(graph.lengths[row])].tobytes()
    sizes = iced.MemorySize
    layout = {sizes.FLOAT32: "<f", sizes.FLOAT64: "<d"}.get(
        iced.Decoder(graph.bits, code).decode().memory_size, ""
    )
    return f"{struct.unpack(layout, raw)[0]!r}" if layout else ""


class Slots(NamedTuple):
    """N operands on the stack of matched blocks; the first four fields are those of `Pairs`."""

    match: Array
    block: Array
    a: Array
    b: Array
    same: Array
    """(N,) bool."""


def compare_slots(
    a: Graph, b: Graph, match: Array, block: Array, one: Array, other: Array
) -> Slots:
    """Return the operands on the stack of pairs of blocks (one, other) that have equally many.

    In a pair of functions, arguments are the same at the same place. Of other places each must have
    one partner, with as many bytes behind it where its address is taken. Where this does not hold,
    those places differ that did not move as most did.
    """
    bounds = [np.searchsorted(graph.slot_place, graph.block_instructions) for graph in (a, b)]
    sizes = bounds[0][one + 1] - bounds[0][one]
    first, second = expand(bounds[0][one], sizes), expand(bounds[1][other], sizes)
    owner, pair = np.repeat(match, sizes), np.repeat(block, sizes)
    left, right = a.slot[first], b.slot[second]
    argument = (left >= 0) | (right >= 0)
    same = ~argument | (left == right)
    local = np.flatnonzero(~argument)
    if not len(local):
        return Slots(owner, pair, first, second, same)
    of, left, right = owner[local], left[local], right[local]
    sized = a.slot_size[first[local]] == b.slot_size[second[local]]
    moved = right - left
    count = int(owner.max()) + 1
    # Places and moves as numbers of each function.
    keys = [_in_function(of, values) for values in (left, right, moved)]
    width = int(keys[1].max()) + 1
    pairs, row = np.unique(keys[0] * width + keys[1], return_index=True)
    clash = np.zeros(count, bool)
    for number in np.divmod(pairs, width):
        twice = np.bincount(number)[number] > 1
        clash[of[row[twice]]] = True
    clash[of[~sized]] = True
    # The most frequent move of each function.
    many = np.bincount(keys[2])
    where = np.zeros(len(many), np.int64)
    where[keys[2]] = of
    order = np.lexsort((-many, where))
    most = np.full(count, -1, np.int64)
    most[where[order][::-1]] = order[::-1]
    stays = keys[2] == most[of]
    odd = clash[of] & ~(stays & sized)
    # If all moved by the same distance, the sizes alone differ, or none is known to be the one.
    silent = clash.copy()
    silent[of[odd]] = False
    same[local] = ~(odd | silent[of])
    return Slots(owner, pair, first, second, same)


def _in_function(function: Array, values: Array) -> Array:
    """Return a number (i8) for each different pair of function and value."""
    span = np.int64(1 << 34)
    return numbered((function * span + values + (span >> 1)).astype(np.uint64))[1]


def slot_text(graph: Graph, number: int) -> str:
    place, size = int(graph.slot[number]), int(graph.slot_size[number])
    if place >= 0:
        return f"argument at +{place:#x}"
    return f"stack at -{-place:#x}" + (f" ({size:,} bytes)" if size else "")
