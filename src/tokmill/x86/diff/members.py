"""Members of structures: what functions read and write at fixed distances from pointers."""

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.x86.features.bags import Bag, bag, grams
from tokmill.x86.features.instruction_features import Instructions
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import owners
from tokmill.x86.lift.decode import LONGEST
from tokmill.x86.lift.switches.operands import FRAME, NO_REGISTER, NOP, STACK, operands

MEMBERS = ("members", "member pairs")
FURTHEST = 1 << 16
"""Bytes from a pointer to a member; what is further away is data at a fixed place."""


def members_of(graph: Graph, instructions: Instructions) -> dict[str, Bag]:
    """Return bags of the distances and widths of members, and of two that follow in a block."""
    ends = np.cumsum(graph.lengths, dtype=np.int64)
    data = np.concatenate([graph.code, np.zeros(LONGEST + 1, np.uint8)])
    found = operands(data, ends - graph.lengths, graph.lengths, graph.bits)
    size = len(graph.function_address)
    owner = np.repeat(owners(graph.function_blocks), np.diff(graph.block_instructions))
    # `mov rbp, rsp` in both encodings.
    sets = (found.opcode == 0x89) & (found.first == STACK) & (found.second == FRAME)
    sets |= (found.opcode == 0x8B) & (found.first == FRAME) & (found.second == STACK)
    framed = np.bincount(owner[sets & (found.map == 0)], minlength=size)[owner] > 0
    there = (instructions.width > 0) & (found.base != NO_REGISTER) & (found.base != STACK)
    there &= ~found.relative & ~(framed & (found.base == FRAME))
    there &= (abs(found.displacement) < FURTHEST) & ~((found.map == 1) & (found.opcode == NOP))
    kept = np.flatnonzero(there)
    key = (2 * found.displacement + found.indexed) * 256 + instructions.width
    key = mix(key[kept].astype(np.uint64))
    pair, first = grams(key, 2, np.searchsorted(kept, graph.block_instructions[1:]))
    bags = bag(size, owner[kept], key), bag(size, owner[kept][first], pair)
    return dict(zip(MEMBERS, bags, strict=True))
