"""Graphs as `.BinExport` files, which qbindiff reads.

Blocks are those of the graph: a call ends a block, which it does not in files from IDA and Ghidra.
Operands are left out, because readers decode the bytes themselves. A string is listed at the first
instruction of the block that refers to it. Jumps to other functions count as calls.
"""

from collections import Counter
from typing import Any

import numpy as np
from binexport.binexport2_pb2 import BinExport2
from iced_x86 import Decoder

from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.program import demangle
from tokmill.x86.tokens.canonical import names

ARCHITECTURES = {64: "x86-64", 32: "x86-32"}
CONDITION_TRUE, CONDITION_FALSE, UNCONDITIONAL, SWITCH = 1, 2, 3, 4
"""How control gets to a block."""
FLOW = {
    Edge.FALL: UNCONDITIONAL,
    Edge.JUMP: UNCONDITIONAL,
    Edge.BRANCH: CONDITION_TRUE,
    Edge.INDIRECT: SWITCH,
}
NORMAL, IMPORTED, THUNK = 0, 2, 3
"""Kind of a vertex of the call graph."""


def binexport(graph: Graph, digest: str) -> bytes:
    """Return the file of a graph; `digest` is that of the program."""
    message: dict[str, Any] = {
        "meta_information": {
            "executable_name": graph.program,
            "executable_id": digest,
            "architecture_name": ARCHITECTURES[graph.bits],
        },
        "string_table": graph.strings,
        "flow_graph": [],
    }
    # A block that several functions share is written once.
    address, first = np.unique(graph.block_address, return_index=True)
    message |= _code(graph, address.tolist(), first.tolist())
    number = {at: place for place, at in enumerate(address.tolist())}
    vertices, vertex = _vertices(graph)
    callee = _callees(graph)
    calls: set[tuple[int, int]] = set()
    blocks = graph.function_blocks.tolist()
    for function, at in enumerate(graph.function_address.tolist()):
        own = range(blocks[function], blocks[function + 1])
        inside = set(graph.block_address[own.start : own.stop].tolist())
        edges = []
        for block in own:
            ways = _ways(graph, block)
            edges += _flow(int(graph.block_address[block]), ways, inside, number)
            for target, kind in ways:
                to = callee.get(target)
                if to is not None and (kind == Edge.CALL or (kind == Edge.JUMP and to != at)):
                    calls.add((vertex[at], vertex[to]))
        message["flow_graph"].append(
            {
                "entry_basic_block_index": number[at],
                "basic_block_index": [number[one] for one in sorted(inside)],
                "edge": edges,
            }
        )
    message["call_graph"] = {
        "vertex": vertices,
        "edge": [
            {"source_vertex_index": source, "target_vertex_index": target}
            for source, target in sorted(calls)
        ],
    }
    message["library"] = [{"is_static": False, "name": name} for name in _libraries(graph)]
    return bytes(BinExport2(**message).SerializeToString())


def _ways(graph: Graph, block: int) -> list[tuple[int, int]]:
    """Return target and kind of the edges of a block."""
    ways = slice(*graph.block_edges[block : block + 2].tolist())
    return list(zip(graph.edge_target[ways].tolist(), graph.edge_kind[ways].tolist(), strict=True))


def _flow(
    at: int, ways: list[tuple[int, int]], inside: set[int], number: dict[int, int]
) -> list[dict[str, int]]:
    """Return the edges from a block to others of its function, one to each of them."""
    branches = any(kind == Edge.BRANCH for _, kind in ways)
    types: dict[int, int] = {}
    for target, kind in ways:
        if kind in FLOW and target in inside:
            falls = kind == Edge.FALL and branches
            types.setdefault(target, CONDITION_FALSE if falls else FLOW[Edge(kind)])
    return [
        {
            "source_basic_block_index": number[at],
            "target_basic_block_index": number[target],
            "type": types[target],
        }
        for target in sorted(types)
    ]


def _code(graph: Graph, address: list[int], first: list[int]) -> dict[str, Any]:
    """Return mnemonics, the most frequent one first, blocks, instructions and their strings."""
    code = graph.code.tobytes()
    # Blocks lie end to end, and each ends with an instruction.
    mnemonics = [one.mnemonic for one in Decoder(graph.bits, code)]
    counts = Counter(mnemonics)
    ordered = sorted(counts, key=lambda one: (-counts[one], one))
    rank = {mnemonic: place for place, mnemonic in enumerate(ordered)}
    instructions: list[dict[str, Any]] = []
    blocks, references = [], []
    for begin, block in zip(address, first, strict=True):
        low, high = graph.block_instructions[block : block + 2].tolist()
        references += [
            {"instruction_index": len(instructions), "string_table_index": string}
            for string in graph.string[slice(*graph.block_strings[block : block + 2])].tolist()
        ]
        index = {"begin_index": len(instructions)}
        place, at = int(graph.block_bytes[block]), begin
        for one, size in zip(mnemonics[low:high], graph.lengths[low:high].tolist(), strict=True):
            raw = code[place : place + size]
            instructions.append({"address": at, "mnemonic_index": rank[one], "raw_bytes": raw})
            place, at = place + size, at + size
        called = [to for to, kind in _ways(graph, block) if kind == Edge.CALL and to > 0]
        instructions[-1]["call_target"] = called
        blocks.append({"instruction_index": [index | {"end_index": len(instructions)}]})
    return {
        "mnemonic": [{"name": names("Mnemonic")[one].lower()} for one in ordered],
        "instruction": instructions,
        "basic_block": blocks,
        "string_reference": references,
    }


def _libraries(graph: Graph) -> dict[str, int]:
    """Return library → its number, in the order of the imports of PE files (`LIBRARY!NAME`)."""
    found = [name.partition("!")[0] for name in graph.import_name if "!" in name]
    return {name: number for number, name in enumerate(dict.fromkeys(found))}


def _vertices(graph: Graph) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Return the functions and imports by address, and address → place."""
    libraries = _libraries(graph)
    imports, found = dict(zip(graph.import_address.tolist(), graph.import_name, strict=True)), {}
    for at, name in imports.items():
        library, mark, symbol = name.partition("!")
        found[at] = {"address": at, "type": IMPORTED, "mangled_name": symbol if mark else name}
        if mark:
            found[at]["library_index"] = libraries[library]
    functions = zip(
        graph.function_address.tolist(),
        graph.function_name,
        demangle(graph.function_name),
        strict=True,
    )
    for at, name, shown in functions:
        one = found.setdefault(at, {"address": at})
        one["type"] = THUNK if at in imports else NORMAL
        if name:
            one["mangled_name"] = name
        if shown != name:
            one["demangled_name"] = shown
    ordered = sorted(found)
    return [found[at] for at in ordered], {at: place for place, at in enumerate(ordered)}


def _callees(graph: Graph) -> dict[int, int]:
    """Return address of a function or import → that of what is called there.

    A stub with the name of one function of the graph counts as that function: shared libraries call
    their own functions through stubs.
    """
    functions = graph.function_address.tolist()
    counts = Counter(graph.function_name)
    named = {
        name: at
        for at, name in zip(functions, graph.function_name, strict=True)
        if name and counts[name] == 1
    }
    imports = zip(graph.import_address.tolist(), graph.import_name, strict=True)
    return {at: named.get(name, at) for at, name in imports} | {at: at for at in functions}
