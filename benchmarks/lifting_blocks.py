"""Two graphs of one program compared: blocks, jump tables; each difference gets a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from iced_x86 import Decoder, FlowControl, Instruction, Mnemonic, OpKind, Register

from symbol_truth import Truth
from tokmill.store.schema import Array
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.ranges import distinct, member, offsets

FIXED = (Register.NONE, Register.RIP, Register.EIP)
IDLE = (Mnemonic.NOP, Mnemonic.INT3)
PADDING, OUTSIDE, MIDDLE = "padding", "outside every function", "inside an instruction"


@dataclass(slots=True)
class View:
    """A graph by addresses: distinct blocks, instructions, what leads where."""

    graph: Graph
    start: Array
    """(B,) u8, ascending, each block once."""
    stop: Array
    """(B,) u8, where each ends."""
    reach: Array
    """(B,) u8, where the blocks up to this one end at most."""
    row: Array
    """(B,) i8, its row in the graph."""
    instruction: Array
    """(I,) u8, ascending, each once."""
    size: Array
    """(I,) u1."""
    ways: dict[int, set[tuple[int, bool]]]
    """Address → kinds of the edges to it, and whether the block that they leave ends in a call."""

    def covers(self, address: int) -> bool:
        """Say whether a byte lies in a block."""
        at = int(np.searchsorted(self.start, np.uint64(address), side="right")) - 1
        return at >= 0 and address < int(self.reach[at])

    def idle(self, address: int) -> bool:
        """Say whether a block begins with padding: a no-operation, a breakpoint, zeros."""
        code = self._code(int(np.searchsorted(self.start, np.uint64(address))))
        return not any(code) or next(self._decode(code)).mnemonic in IDLE

    def repeats(self, address: int) -> bool:
        """Say whether a block begins with an instruction that repeats, or behind one."""
        at = int(np.searchsorted(self.start, np.uint64(address)))
        found = [next(self._decode(self._code(at)))]
        if at and self.stop[at - 1] == address:
            found += list(self._decode(self._code(at - 1)))[-1:]
        return any(one.has_rep_prefix or one.has_repne_prefix for one in found)

    def _code(self, at: int) -> bytes:
        row, graph = int(self.row[at]), self.graph
        return bytes(graph.code[graph.block_bytes[row] : graph.block_bytes[row + 1]])

    def _decode(self, code: bytes) -> Iterator[Instruction]:
        return iter(Decoder(self.graph.bits, code))


def view(graph: Graph) -> View:
    """Return a graph by addresses."""
    sizes = np.diff(graph.block_bytes).astype(np.uint64)
    start, row = np.unique(graph.block_address, return_index=True)
    stop = start + sizes[row]
    instruction, size = instructions(graph)
    source = np.repeat(np.arange(len(sizes)), np.diff(graph.block_edges))
    calls = np.zeros(len(sizes), bool)
    calls[source[graph.edge_kind == Edge.CALL]] = True
    calls |= last_flow(graph, FlowControl.INDIRECT_CALL)
    ways: dict[int, set[tuple[int, bool]]] = {}
    for target, kind, call in zip(
        graph.edge_target.tolist(), graph.edge_kind.tolist(), calls[source].tolist(), strict=True
    ):
        ways.setdefault(target, set()).add((kind, call))
    return View(graph, start, stop, np.maximum.accumulate(stop), row, instruction, size, ways)


def instructions(graph: Graph) -> tuple[Array, Array]:
    """Return addresses (u8, ascending, each once) and lengths of all instructions."""
    count = np.diff(graph.block_instructions)
    place = offsets(graph.lengths.astype(np.int64))[:-1]
    first = np.repeat(graph.block_bytes[:-1], count)
    address = np.repeat(graph.block_address, count) + (place - first).astype(np.uint64)
    found, at = np.unique(address, return_index=True)
    return found, graph.lengths[at]


def last_flow(graph: Graph, flow: int) -> Array:
    """Return which blocks with an edge `INDIRECT` end in an instruction of a kind: (B,) bool."""
    found = np.zeros(len(graph.block_address), bool)
    source = np.repeat(np.arange(len(found)), np.diff(graph.block_edges))
    for block in distinct(source[graph.edge_kind == Edge.INDIRECT]).tolist():
        stop = int(graph.block_bytes[block + 1])
        size = int(graph.lengths[graph.block_instructions[block + 1] - 1])
        last = Decoder(graph.bits, graph.code[stop - size : stop].tobytes()).decode()
        found[block] = last.flow_control == flow
    return found


def differences(mine: View, other: View, truth: Truth | None, swept: Array) -> dict[str, list[int]]:
    """Return class → addresses of the blocks that begin in `other` and not in `mine`.

    `swept` has the addresses of instructions as another decoder sees them (u8, ascending).
    """
    found: dict[str, list[int]] = {}
    only = other.start[~member(other.start, mine.start)]
    inside = truth.inside(only) if truth is not None else np.zeros(len(only), bool)
    known = member(only, mine.instruction)
    begins = member(only, other.graph.function_address)
    sound = member(only, swept) if truth is not None else np.ones(len(only), bool)
    columns = (only, inside, known, begins, sound)
    for address, true, border, function, seen in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        ways = other.ways.get(address, set())
        kinds = {kind for kind, _ in ways}
        if Edge.INDIRECT in kinds:
            via = "target of a jump table"
        elif kinds & {Edge.JUMP, Edge.BRANCH}:
            via = "target of a jump"
        elif function:
            via = "beginning of a function"
        elif (Edge.FALL, True) in ways:
            via = "behind a call"
        else:
            via = "behind no jump" if kinds else "nothing leads there"
            via = "around REP" if other.repeats(address) else via
        if mine.covers(address):
            name = f"cut: {via}" if border else MIDDLE
        elif other.idle(address):
            name = PADDING
        elif truth is not None and not true:
            name = OUTSIDE
        elif not seen:
            name = MIDDLE
        else:
            name = f"code: {via}"
        found.setdefault(name, []).append(address)
    return found


def shares(mine: View, other: View, truth: Truth | None) -> Counter[str]:
    """Return how many blocks of `other` are code of functions, and begin in `mine` too."""
    both = member(other.start, mine.start)
    real = truth.inside(other.start) if truth is not None else np.ones(len(other.start), bool)
    # Padding that both begin a block with is reached as code.
    real &= both | ~np.asarray([other.idle(address) for address in other.start.tolist()], bool)
    return Counter(
        blocks=len(other.start), both=int(both.sum()), code=int(real.sum()),
        code_both=int((real & both).sum()),
    )  # fmt: skip


def jumps(graph: Graph) -> dict[int, set[int]]:
    """Return address of each indirect jump → where it goes, nothing if that is not known.

    Jumps through a fixed place in memory, which imports are, are left out.
    """
    found: dict[int, set[int]] = {}
    for block in np.flatnonzero(last_flow(graph, FlowControl.INDIRECT_BRANCH)).tolist():
        edges = slice(int(graph.block_edges[block]), int(graph.block_edges[block + 1]))
        stop = int(graph.block_bytes[block + 1])
        size = int(graph.lengths[graph.block_instructions[block + 1] - 1])
        last = Decoder(graph.bits, graph.code[stop - size : stop].tobytes()).decode()
        fixed = last.memory_base in FIXED and last.memory_index == Register.NONE
        if last.op0_kind == OpKind.MEMORY and fixed:
            continue
        address = int(graph.block_address[block]) + stop - size - int(graph.block_bytes[block])
        found.setdefault(address, set()).update(set(graph.edge_target[edges].tolist()) - {0})
    return found


def compare_jumps(
    mine: dict[int, set[int]], other: dict[int, set[int]], swept: Array
) -> Counter[str]:
    """Return counts of indirect jumps: seen and resolved by each, and how tables agree.

    `swept` has the addresses of instructions as another decoder sees them (u8, ascending); a table
    of `other` that leads elsewhere was read too far.
    """
    true = [
        address
        for address, targets in other.items()
        if targets and member(np.asarray(sorted(targets), np.uint64), swept).all()
    ]
    both = [address for address, targets in other.items() if targets and mine.get(address)]
    return Counter(
        seen=len(mine),
        resolved=sum(bool(targets) for targets in mine.values()),
        other_seen=len(other),
        other_resolved=sum(bool(targets) for targets in other.values()),
        both_resolved=len(both),
        all_targets=sum(mine[address] >= other[address] for address in both),
        true=len(true),
        true_resolved=sum(mine.get(address, set()) >= other[address] for address in true),
    )


def without_conflict(graph: Graph, truth: Truth, swept: Array) -> tuple[int, int, int]:
    """Return how many true functions were found, have no conflict, and agree with `swept`.

    A conflict: two instructions of the graph overlap. `swept` has the addresses of instructions as
    another decoder sees them (u8, ascending).
    """
    address, size = instructions(graph)
    overlaps = address[:-1] + size[:-1] > address[1:]
    bad = distinct(address[:-1][overlaps], address[1:][overlaps])
    strange = address[~member(address, swept)]
    owner = {one: i for i, one in enumerate(graph.function_address.tolist())}
    found = sound = agreed = 0
    for start in truth.start.tolist():
        if start not in owner:
            continue
        first, last = graph.function_blocks[owner[start] : owner[start] + 2].tolist()
        low = graph.block_address[first:last]
        high = low + np.diff(graph.block_bytes[first : last + 1]).astype(np.uint64)

        def none_of(these: Array, low: Array = low, high: Array = high) -> bool:
            return bool((np.searchsorted(these, low) == np.searchsorted(these, high)).all())

        found += 1
        sound += none_of(bad)
        agreed += none_of(bad) and none_of(strange)
    return found, sound, agreed
