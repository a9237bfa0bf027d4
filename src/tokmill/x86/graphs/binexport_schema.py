"""The messages of a `.BinExport` file that tokmill writes, as protobuf classes.

Source of names, numbers and types: `binexport2.proto` of github.com/google/binexport.
"""

from __future__ import annotations

import functools
from typing import Any

from tokmill import plugins

ABOUT = 100_007_461
"""Number of a field that only tokmill knows: the format leaves numbers from 100,000,000 on to other
tools, and readers skip them."""

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
    "9 string_table *string, 11 string_reference *Reference, 14 library *Library, "
    f"{ABOUT} about bytes",
}


class FlowType:
    """How control gets to a block."""

    CONDITION_TRUE, CONDITION_FALSE, UNCONDITIONAL, SWITCH = 1, 2, 3, 4


class VertexType:
    """Kind of a vertex of the call graph."""

    NORMAL, LIBRARY, IMPORTED, THUNK = 0, 1, 2, 3


@functools.cache
def message() -> Any:
    """Return the class of the message of a whole file.

    Raises `MissingExtraError` if protobuf is not installed.
    """
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
