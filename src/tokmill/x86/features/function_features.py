"""Features of the functions of a program: what they do, hold, call, and what calls them.

All features come from the graph. They do not depend on addresses or names, except that functions
are in the order of their addresses. `tokmill.x86.features.bags.matrices` makes the features of two
programs comparable.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.features.bags import Bag, bag, grams, hash_texts, ones_at
from tokmill.x86.features.instruction_features import Instructions, instructions_of
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import find, owners
from tokmill.x86.lift.decode import LONGEST
from tokmill.x86.lift.switches.operands import FRAME, NO_REGISTER, NOP, STACK, operands
from tokmill.x86.walks import Flow, flow_of

SHAPE = ("blocks", "instructions", "edges", "loops", "calls", "callees", "callers")
"""Columns of `Functions.shape`, each ln(1 + count)."""
MEMBERS = ("members", "member pairs")
FURTHEST = 1 << 16
"""Bytes from a pointer to a member; what is further away is data at a fixed place."""
BAGS = ("mnemonics", "forms", "form pairs", "constants", "strings", "imports")


@dataclass(slots=True)
class Functions:
    """Features of F functions."""

    bags: dict[str, Bag]
    """A bag for each of `BAGS`."""
    shape: Array
    """(F, 7) f4, as `SHAPE` names them."""
    calls: Any
    """(F, F) CSR, f4: 1 where a function calls another, or jumps to its beginning."""
    instructions: Instructions
    """Instructions of the whole graph."""
    texts: Array
    """u8, a hash of each string of the graph."""
    imports: Array
    """u8, a hash of each of `import_names`."""


def functions_of(graph: Graph) -> Functions:
    instructions = instructions_of(graph)
    size = len(graph.function_address)
    owner = owners(graph.function_blocks)
    of_instruction = np.repeat(owner, np.diff(graph.block_instructions))
    pair, first = grams(instructions.form, 2, graph.block_instructions[1:])
    texts, imports = hash_texts(graph.strings), hash_texts(import_names(graph))
    calls, imported = _calls(graph, owner, imports)
    bags = {
        "mnemonics": bag(size, of_instruction, instructions.mnemonic.astype(np.uint64)),
        "forms": bag(size, of_instruction, instructions.form),
        "form pairs": bag(size, of_instruction[first], pair),
        "constants": bag(
            size, np.repeat(owner, np.diff(graph.block_constants)), graph.constant.astype(np.uint64)
        ),
        "strings": bag(size, np.repeat(owner, np.diff(graph.block_strings)), texts[graph.string]),
        "imports": bag(size, *imported),
    }
    return Functions(bags, _shape(graph, owner, calls), calls, instructions, texts, imports)


def import_names(graph: Graph) -> list[str]:
    return [bare_name(name) for name in graph.import_name]


def bare_name(name: str) -> str:
    """Return the name of an import without its library (PE) and the version of its symbol (ELF)."""
    name = name.rpartition("!")[2]
    # C++ and `__fastcall` of Microsoft have `@` in their names.
    return name if name.startswith(("?", "@")) else name.partition("@")[0]


def _calls(graph: Graph, owner: Array, imports: Array) -> tuple[Any, tuple[Array, Array]]:
    size = len(graph.function_address)
    caller = np.repeat(owner, np.diff(graph.block_edges))
    leads = np.isin(graph.edge_kind, (Edge.CALL, Edge.JUMP, Edge.BRANCH)) & (graph.edge_target > 0)
    caller, target = caller[leads], graph.edge_target[leads]
    place, there = find(graph.function_address, target)
    # A jump to the beginning of the same function is a loop, and a call of it a recursion: neither
    # says anything about other functions.
    there &= place != caller
    calls = ones_at(caller[there], place[there], (size, size))
    slot, hit = find(graph.import_address, target)
    return calls, (caller[hit], imports[slot[hit]])


def _shape(graph: Graph, owner: Array, calls: Any) -> Array:
    size = len(graph.function_address)
    flow = flow_of(graph)
    source = owners(flow.first)
    kind = graph.edge_kind
    caller = np.repeat(owner, np.diff(graph.block_edges))

    def count(values: Array) -> Array:
        return np.bincount(values, minlength=size)

    counts = (
        np.diff(graph.function_blocks),
        np.diff(graph.block_instructions[graph.function_blocks]),
        count(owner[source]),
        count(owner[back_edges(flow)]),
        count(caller[(kind == Edge.CALL)]),
        np.diff(calls.indptr),
        np.bincount(calls.indices, minlength=size),
    )
    return np.log1p(np.stack(counts, axis=1)).astype(np.float32)


def back_edges(flow: Flow) -> list[int]:
    """Return the block to which each edge leads back, in a depth-first search of each function."""
    bounds, target = flow.first.data, flow.target.data
    on_path, seen = bytearray(len(bounds)), bytearray(len(bounds))
    found = []
    for root in range(len(bounds) - 1):
        path = [] if seen[root] else [(root, iter(target[bounds[root] : bounds[root + 1]]))]
        while path:
            block, ways = path[-1]
            on_path[block] = seen[block] = 1
            for other in ways:
                if on_path[other]:
                    found.append(other)
                elif not seen[other]:
                    path.append((other, iter(target[bounds[other] : bounds[other + 1]])))
                    break
            else:
                on_path[path.pop()[0]] = 0
    return found


def members_of(graph: Graph, instructions: Instructions) -> dict[str, Bag]:
    """Return bags of the distances and widths of members, and of two that follow in a block."""
    ends = np.cumsum(graph.lengths, dtype=np.int64)
    data = np.concatenate([graph.code, np.zeros(LONGEST + 1, np.uint8)])
    ops = operands(data, ends - graph.lengths, graph.lengths, graph.bits)
    size = len(graph.function_address)
    owner = np.repeat(owners(graph.function_blocks), np.diff(graph.block_instructions))
    # `mov rbp, rsp` in both encodings.
    sets = (ops.opcode == 0x89) & (ops.first == STACK) & (ops.second == FRAME)
    sets |= (ops.opcode == 0x8B) & (ops.first == FRAME) & (ops.second == STACK)
    framed = np.bincount(owner[sets & (ops.map == 0)], minlength=size)[owner] > 0
    there = (instructions.width > 0) & (ops.base != NO_REGISTER) & (ops.base != STACK)
    there &= ~ops.relative & ~(framed & (ops.base == FRAME))
    there &= (abs(ops.displacement) < FURTHEST) & ~((ops.map == 1) & (ops.opcode == NOP))
    kept = np.flatnonzero(there)
    key = (2 * ops.displacement + ops.indexed) * 256 + instructions.width
    key = mix(key[kept].astype(np.uint64))
    pair, first = grams(key, 2, np.searchsorted(kept, graph.block_instructions[1:]))
    bags = bag(size, owner[kept], key), bag(size, owner[kept][first], pair)
    return dict(zip(MEMBERS, bags, strict=True))
