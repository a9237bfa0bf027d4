"""Where the instructions of a function refer to its stack frame."""

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import distinct, expand, find, member, numbered, offsets
from tokmill.x86.lift.switches.operands import FRAME, NO_REGISTER, STACK, Operands

LEA = 0x8D


def sets_frame(ops: Operands) -> Array:
    """Return which instructions set RBP from RSP: `mov rbp, rsp`, `lea rbp, [rsp + …]`, ENTER."""
    one = ops.map == 0
    sets: Array = one & (ops.opcode == 0x89) & (ops.first == STACK) & (ops.second == FRAME)
    sets |= one & (ops.opcode == 0x8B) & (ops.first == FRAME) & (ops.second == STACK)
    sets |= one & (ops.opcode == LEA) & (ops.first == FRAME) & (ops.base == STACK)
    sets |= one & (ops.opcode == 0xC8)
    return sets


def copies(ops: Operands) -> Array:
    """Return which instructions take the address in the stack pointer: `mov register, rsp`."""
    takes = (ops.opcode == 0x89) & (ops.first == STACK) & (ops.second < NO_REGISTER)
    takes |= (ops.opcode == 0x8B) & (ops.second == STACK)
    return (ops.map == 0) & takes & ~sets_frame(ops)


def growth(ops: Operands, word: int) -> Array:
    """Return by how many bytes each instruction lets the stack grow: (n,) i8."""
    one, opcode, middle = ops.map == 0, ops.opcode, ops.form >> 3 & 7
    pushes = (opcode & 0xF8 == 0x50) | np.isin(opcode, (0x68, 0x6A, 0x9C))
    pushes |= (opcode == 0xFF) & (middle == 6)
    pops = (opcode & 0xF8 == 0x58) | (opcode == 0x9D) | ((opcode == 0x8F) & (middle == 0))
    steps = (opcode == LEA) & (ops.first == STACK) & (ops.base == STACK)
    grows = word * pushes.astype(np.int64) - word * pops
    return np.where(one, grows - ops.displacement * steps, 0) + _reserved(ops)


def _reserved(ops: Operands) -> Array:
    """Return what instructions subtract from the stack pointer, less what they add: (n,) i8."""
    moves = (ops.map == 0) & np.isin(ops.opcode, (0x81, 0x83)) & (ops.second == STACK)
    middle = ops.form >> 3 & 7
    return ops.immediate * (moves & (middle == 5)) - ops.immediate * (moves & (middle == 0))


def slots(
    ops: Operands, rows: Array, depth: Array, function: Array, first: int
) -> tuple[Array, Array, Array]:
    """Return `slot`, `slot_place` and `slot_size` as of a `Graph`.

    Args:
        rows: i8, those with a place on the stack.
        depth: (n,) i8, as `depths` returns.
        function: (n,) i8, ascending.
    """
    # The frame pointer stands where the stack pointer stood when it was set.
    sets = np.flatnonzero(sets_frame(ops))
    where = depth[sets] - np.where(ops.opcode[sets] == LEA, ops.displacement[sets], 0)
    frame = np.zeros(int(function[-1]) + 1 if len(function) else 0, np.int64)
    frame[function[sets[::-1]]] = where[::-1]
    by_frame = (ops.base == FRAME) & (len(function) > 0)
    base = np.where(by_frame, frame[np.where(by_frame, function, 0)] if len(frame) else 0, depth)
    slot = (ops.displacement - base)[rows]
    # A place ends where the next one begins that the function uses, or its arguments.
    span = np.int64(1 << 33)
    used = distinct(function[rows] * span + slot, np.unique(function[rows]) * span)
    at = np.minimum(np.searchsorted(used, function[rows] * span + slot, "right"), len(used) - 1)
    taken = ((ops.opcode == LEA) & (ops.map == 0) | ops.indexed | copies(ops))[rows]
    taken &= slot < 0
    size = np.where(taken, used[at] - function[rows] * span - slot, 0)
    # Where an address is taken, what lies there may be as large as the frame.
    reserved = _reserved(ops)
    frames = np.flatnonzero((reserved > 0) & member(function, distinct(function[rows[taken]])))
    bottom = depth[frames] + reserved[frames]
    places = np.concatenate([rows, frames])
    order = np.argsort(places, kind="stable")
    slot, size = np.append(slot, -bottom)[order], np.append(size, bottom)[order]
    return slot, places[order] + first, size.astype(np.int64)


def depths(
    graph: Graph, grows: Array, blocks: slice, begins: Array, function: Array, block: Array
) -> Array:
    """Return how many bytes the stack has grown since the function's entry: (n,) i8.

    Before each instruction, on some way to it: all ways of a sound function agree. What sets
    the stack pointer from another register (an epilogue) is left out.

    Args:
        blocks: the blocks of the graph that the instructions are in.
        begins: u8, where the functions of these begin.
        function: (B,) i8, the function of each of these blocks.
        block: (n,) i8, the block of each instruction.
    """
    count = blocks.stop - blocks.start
    before = offsets(grows)
    first = np.searchsorted(block, np.arange(count))
    inside = before[:-1] - before[first][block]
    total = np.bincount(block, grows, count).astype(np.int64)
    ways = slice(*graph.block_edges[[blocks.start, blocks.stop]].tolist())
    source = np.repeat(np.arange(count), np.diff(graph.block_edges[blocks.start : blocks.stop + 1]))
    kind, wanted = graph.edge_kind[ways], graph.edge_target[ways]
    addresses, rank = numbered(graph.block_address[blocks])
    width = max(len(addresses), 1)
    at, inner = find(addresses, wanted)
    inner &= kind != Edge.CALL
    source, kind, aim = source[inner], kind[inner], at[inner] + function[source[inner]] * width
    key = function * width + rank
    order = np.argsort(key, kind="stable")
    place, there = find(key[order], aim)
    source, kind, target = source[there], kind[there], order[place[there]]
    # Blocks that only follow one another form a chain, whose beginning gives all depths.
    follows = np.zeros(count, bool)
    follows[target[(kind == Edge.FALL) & (target == source + 1)]] = True
    chain = np.cumsum(~follows) - 1
    entered = np.concatenate([np.zeros(1, np.int64), np.cumsum(total)])[:count]
    entered -= entered[np.flatnonzero(~follows)][chain] if count else entered
    shift = entered[source] + total[source] - entered[target]
    source, target = chain[source], chain[target]
    order = np.argsort(source, kind="stable")
    target, shift = target[order], shift[order]
    bounds = np.searchsorted(source[order], np.arange(count + 1))
    base, done = np.zeros(count, np.int64), np.zeros(count, bool)
    entry = np.flatnonzero(graph.block_address[blocks] == begins[function])
    base[chain[entry]], done[chain[entry]] = -entered[entry], True
    front = distinct(chain[entry])
    while len(front):
        sizes = bounds[front + 1] - bounds[front]
        edge, from_ = expand(bounds[front], sizes), np.repeat(front, sizes)
        fresh = ~done[target[edge]]
        edge, from_ = edge[fresh], from_[fresh]
        front, one = np.unique(target[edge], return_index=True)
        base[front], done[front] = base[from_[one]] + shift[edge[one]], True
    return (base[chain] + entered)[block] + inside
