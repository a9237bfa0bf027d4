"""Graphs as `.BinExport` files, which BinDiff, qbindiff and python-binexport read.

Blocks are those of the graph: a call ends a block, which it does not in files from IDA and Ghidra.
Operands are left out, because readers decode the bytes themselves. A string is listed at the first
instruction of the block that refers to it. Jumps to other functions count as calls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import distinct, member, offsets
from tokmill.x86.image.program import demangle
from tokmill.x86.tokens.canonical import names

# Message → its fields: number, name, type; * before the type: repeated.
_MESSAGES = {
    "Meta": "1 executable_name string, 2 executable_id string, 3 architecture_name string",
    "Mnemonic": "1 name string",
    "Instruction": "1 address uint64, 2 call_target *uint64, 3 mnemonic_index int32, "
    "5 raw_bytes bytes",
    "IndexRange": "1 begin_index int32, 2 end_index int32",
    "BasicBlock": "1 instruction_index *IndexRange",
    "FlowEdge": "1 source_basic_block_index int32, 2 target_basic_block_index int32, 3 type int32",
    "FlowGraph": "1 basic_block_index *int32, 3 entry_basic_block_index int32, 2 edge *FlowEdge",
    "Vertex": "1 address uint64, 2 type int32, 3 mangled_name string, 4 demangled_name string, "
    "5 library_index int32",
    "CallEdge": "1 source_vertex_index int32, 2 target_vertex_index int32",
    "CallGraph": "1 vertex *Vertex, 2 edge *CallEdge",
    "Reference": "1 instruction_index int32, 4 string_table_index int32",
    "Library": "1 is_static bool, 3 name string",
    "BinExport2": "1 meta_information Meta, 4 mnemonic *Mnemonic, 5 instruction *Instruction, "
    "6 basic_block *BasicBlock, 7 flow_graph *FlowGraph, 8 call_graph CallGraph, "
    "9 string_table *string, 11 string_reference *Reference, 14 library *Library",
}


class FlowType:
    """How control gets to a block."""

    CONDITION_TRUE, CONDITION_FALSE, UNCONDITIONAL, SWITCH = 1, 2, 3, 4


class VertexType:
    """Kind of a vertex of the call graph."""

    NORMAL, LIBRARY, IMPORTED, THUNK = 0, 1, 2, 3


@functools.cache
def message() -> Any:
    """Return the class of the message of a whole file."""
    descriptors = plugins.require("google.protobuf.descriptor_pb2")
    field_type = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(name="tokmill.binexport", package="tokmill.binexport")
    file.syntax = "proto2"
    for name, fields in _MESSAGES.items():
        added = file.message_type.add(name=name)
        for field in fields.split(", "):
            number, called, kind = field.split()
            repeated, kind = kind.startswith("*"), kind.lstrip("*")
            one = added.field.add(name=called, number=int(number))
            one.label = field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
            if kind in _MESSAGES:
                one.type, one.type_name = field_type.TYPE_MESSAGE, f".{file.package}.{kind}"
            else:
                one.type = getattr(field_type, f"TYPE_{kind.upper()}")
    # A separate pool, because other packages define messages with these names too.
    pool = plugins.require("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName(f"{file.package}.BinExport2")
    return plugins.require("google.protobuf.message_factory").GetMessageClass(found)


AT_ONCE = 1 << 15
"""Blocks or functions in one part of a file. Parts are written one after the other, because
protobuf reads such messages as one."""
ARCHITECTURES = {64: "x86-64", 32: "x86-32"}
_FLOW = np.zeros(len(Edge), np.int64)
"""Kind of an edge within a function → its type in the file."""
_FLOW[[Edge.FALL, Edge.JUMP]] = FlowType.UNCONDITIONAL
_FLOW[[Edge.BRANCH, Edge.INDIRECT]] = FlowType.CONDITION_TRUE, FlowType.SWITCH


def binexport(graph: Graph, digest: str) -> Iterator[bytes]:
    """Yield the parts of a file; `digest` is that of the program."""
    writer = _Writer(graph)
    yield writer.meta(digest)
    for begin in range(0, len(writer.address), AT_ONCE):
        yield writer.code(begin, begin + AT_ONCE)
    flow = writer.flow_edges()
    for begin in range(0, len(graph.function_address), AT_ONCE):
        yield writer.flow(begin, min(begin + AT_ONCE, len(graph.function_address)), flow)
    yield writer.calls()
    yield writer.strings()


class Calls(NamedTuple):
    """The n edges that lead to a function or an import."""

    edge: Array
    """(n,) i8, ascending: edges of kind `CALL`, and `JUMP` to other functions (tail calls)."""
    caller: Array
    """(n,) i8, the function that calls."""
    function: Array
    """(n,) i8, the function that is called; -1: an import."""
    imported: Array
    """(n,) i8, the import that is called; -1: a function."""


def calls_of(graph: Graph) -> Calls:
    """Return the calls of a graph whose callee is known.

    A stub with the name of one function of the graph counts as that function: shared libraries call
    their own functions through stubs.
    """
    sizes = np.diff(graph.block_edges)
    block = np.repeat(np.arange(len(sizes)), sizes)
    owner = np.repeat(np.arange(len(graph.function_address)), np.diff(graph.function_blocks))
    caller = owner[block]
    target, kind = graph.edge_target, graph.edge_kind
    function = _rows(graph.function_address, target)
    imported = _rows(graph.import_address, target)
    own = _own(graph)
    through = (imported >= 0) & (function < 0)
    function[through] = own[imported[through]]
    imported[function >= 0] = -1
    leaves = (kind == Edge.CALL) | ((kind == Edge.JUMP) & (function != caller))
    edge = np.flatnonzero(leaves & ((function >= 0) | (imported >= 0)))
    return Calls(edge, caller[edge], function[edge], imported[edge])


def _rows(addresses: Array, target: Array) -> Array:
    """Return the rows (i8) of targets among ascending addresses; -1 if there is none."""
    if not len(addresses):
        return np.full(len(target), -1, np.int64)
    known = member(target, addresses)
    return np.where(known, np.searchsorted(addresses, target), -1).astype(np.int64)


def _own(graph: Graph) -> Array:
    """Return for each import the one function of the graph that has its name (i8), or -1."""
    rows: dict[str, int] = {}
    for row, name in enumerate(graph.function_name):
        # If several functions have the name, it is not known which is meant.
        rows[name] = -1 if name in rows or not name else row
    thunks = member(graph.import_address, graph.function_address)
    found = [
        -1 if thunk else rows.get(name, -1)
        for name, thunk in zip(graph.import_name, thunks.tolist(), strict=True)
    ]
    return np.asarray(found, np.int64)


def mnemonics_of(graph: Graph) -> Array:
    """Return the `Mnemonic` of each instruction of a graph, as iced-x86 numbers them: (I,) i8."""
    decoder = plugins.require("iced_x86").Decoder(graph.bits, graph.code.tobytes())
    # Blocks lie end to end, and each ends with an instruction.
    return np.fromiter((one.mnemonic for one in decoder), np.int64)


class _Writer:
    """Makes the parts of a graph's file, each a message as bytes; U blocks are unique."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.bytes = graph, graph.code.tobytes()
        self.address, self.first, self.number = np.unique(
            graph.block_address, return_index=True, return_inverse=True
        )
        """(U,) u8, ascending; (U,) i8, a block of the graph; (B,) i8, its number for each block."""
        self.begin = offsets(np.diff(graph.block_instructions)[self.first])
        """(U + 1,) i8, where the instructions of each begin."""
        mnemonics = mnemonics_of(graph)
        counts = np.bincount(mnemonics, minlength=1)
        order = np.argsort(-counts, kind="stable")
        self.rank = np.argsort(order, kind="stable")[mnemonics]
        """(I,) i8, numbers of mnemonics; the most frequent one is 0."""
        self.mnemonics = order[: int((counts > 0).sum())].tolist()

    def meta(self, digest: str) -> bytes:
        """Return the names of the program, of its architecture and of the mnemonics."""
        found = message()()
        found.meta_information.executable_name = self.graph.program
        found.meta_information.executable_id = digest
        found.meta_information.architecture_name = ARCHITECTURES[self.graph.bits]
        for mnemonic in self.mnemonics:
            found.mnemonic.add(name=names("Mnemonic")[mnemonic].lower())
        return bytes(found.SerializeToString())

    def code(self, begin: int, end: int) -> bytes:
        """Return some blocks and their instructions."""
        graph, found = self.graph, message()()
        for number, block in enumerate(self.first[begin:end].tolist(), begin):
            low, high = graph.block_instructions[block : block + 2].tolist()
            place, address = int(graph.block_bytes[block]), int(self.address[number])
            columns = self.rank[low:high].tolist(), graph.lengths[low:high].tolist()
            for rank, size in zip(*columns, strict=True):
                raw = self.bytes[place : place + size]
                found.instruction.add(address=address, mnemonic_index=rank, raw_bytes=raw)
                place, address = place + size, address + size
            ways = slice(*graph.block_edges[block : block + 2].tolist())
            called = graph.edge_target[ways][graph.edge_kind[ways] == Edge.CALL]
            found.instruction[-1].call_target.extend(called[called > 0].tolist())
            instructions = found.basic_block.add().instruction_index.add()
            instructions.begin_index, instructions.end_index = self.begin[number : number + 2]
        return bytes(found.SerializeToString())

    def flow_edges(self) -> tuple[Array, Array, Array, Array]:
        """Return the edges within functions, each once: function, source, target, type (i8).

        Ascending by function; source and target are numbers of unique blocks.
        """
        graph = self.graph
        count = max(1, len(self.address))
        owner = np.repeat(np.arange(len(graph.function_address)), np.diff(graph.function_blocks))
        block = np.repeat(np.arange(len(owner)), np.diff(graph.block_edges))
        kinds = _FLOW[graph.edge_kind]
        branches = np.zeros(len(owner), bool)
        branches[block[graph.edge_kind == Edge.BRANCH]] = True
        kinds[(graph.edge_kind == Edge.FALL) & branches[block]] = FlowType.CONDITION_FALSE
        kept = (kinds > 0) & member(graph.edge_target, self.address)
        block, kinds = block[kept], kinds[kept]
        target = np.searchsorted(self.address, graph.edge_target[kept])
        # Blocks are ordered by function, and by address within it.
        inside = member(owner[block] * count + target, owner * count + self.number)
        block, kinds, target = block[inside], kinds[inside], target[inside]
        _, first = np.unique(block * count + target, return_index=True)
        block = block[first]
        return owner[block], self.number[block], target[first], kinds[first]

    def flow(self, begin: int, end: int, edges: tuple[Array, Array, Array, Array]) -> bytes:
        """Return blocks and edges of some functions."""
        graph, found = self.graph, message()()
        bounds = np.searchsorted(edges[0], np.arange(begin, end + 1)).tolist()
        entry = np.searchsorted(self.address, graph.function_address[begin:end]).tolist()
        for function in range(begin, end):
            added = found.flow_graph.add(entry_basic_block_index=entry[function - begin])
            blocks = slice(*graph.function_blocks[function : function + 2].tolist())
            added.basic_block_index.extend(self.number[blocks].tolist())
            mine = slice(*bounds[function - begin : function - begin + 2])
            for source, target, kind in zip(
                *(column[mine].tolist() for column in edges[1:]), strict=True
            ):
                added.edge.add(
                    source_basic_block_index=source, target_basic_block_index=target, type=kind
                )
        return bytes(found.SerializeToString())

    def calls(self) -> bytes:
        """Return functions and imports by address, calls between them, and libraries by name."""
        graph, found = self.graph, message()()
        address = distinct(graph.function_address, graph.import_address)
        of_function = np.searchsorted(address, graph.function_address)
        of_import = np.searchsorted(address, graph.import_address)
        vertices = [found.call_graph.vertex.add(address=one) for one in address.tolist()]
        libraries: dict[str, int] = {}
        for vertex, name in zip(of_import.tolist(), graph.import_name, strict=True):
            library, mark, symbol = name.partition("!")
            vertices[vertex].type = VertexType.IMPORTED
            vertices[vertex].mangled_name = symbol if mark else name
            if mark:
                number = libraries.setdefault(library, len(libraries))
                vertices[vertex].library_index = number
        both = member(address[of_function], graph.import_address).tolist()
        rows = zip(
            of_function.tolist(), graph.function_name, demangle(graph.function_name), both,
            strict=True,
        )  # fmt: skip
        for vertex, name, shown, thunk in rows:
            vertices[vertex].type = VertexType.THUNK if thunk else VertexType.NORMAL
            if name:
                vertices[vertex].mangled_name = name
            if shown != name:
                vertices[vertex].demangled_name = shown
        calls = calls_of(graph)
        of_function, of_import = np.append(of_function, 0), np.append(of_import, 0)
        callee = np.where(
            calls.function >= 0, of_function[calls.function], of_import[calls.imported]
        )
        pairs = distinct(of_function[calls.caller] * max(1, len(address)) + callee)
        for pair in pairs.tolist():
            source, target = divmod(pair, max(1, len(address)))
            found.call_graph.edge.add(source_vertex_index=source, target_vertex_index=target)
        for library in libraries:
            found.library.add(is_static=False, name=library)
        return bytes(found.SerializeToString())

    def strings(self) -> bytes:
        """Return the strings, and the blocks that refer to them."""
        graph, found = self.graph, message()()
        found.string_table.extend(graph.strings)
        begin = self.begin[:-1].tolist()
        for number, block in enumerate(self.first.tolist()):
            for string in graph.string[slice(*graph.block_strings[block : block + 2])].tolist():
                found.string_reference.add(
                    instruction_index=begin[number], string_table_index=string
                )
        return bytes(found.SerializeToString())
