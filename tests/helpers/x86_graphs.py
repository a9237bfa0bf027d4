"""Small graphs, written by hand."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tokmill.x86.graph import Edge, Graph

NOP = b"\x90"


class Block(NamedTuple):
    """A block: its instructions, and why control goes on where."""

    address: int
    instructions: Sequence[bytes] = (NOP,)
    edges: Sequence[tuple[Edge, int]] = ()


def graph_of(
    functions: Mapping[int, Sequence[Block]], names: Sequence[str] = (), program: str = "made"
) -> Graph:
    """Return a graph of 64-bit code: address of a function → its blocks by address."""
    blocks = [block for inside in functions.values() for block in inside]

    def offsets(sizes: Sequence[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    code = b"".join(b"".join(block.instructions) for block in blocks)
    return Graph(
        program=program,
        bits=64,
        function_address=np.array(list(functions), np.uint64),
        function_name=list(names) or [""] * len(functions),
        function_blocks=offsets([len(inside) for inside in functions.values()]),
        block_address=np.array([block.address for block in blocks], np.uint64),
        block_bytes=offsets([len(b"".join(block.instructions)) for block in blocks]),
        code=np.frombuffer(code, np.uint8),
        block_instructions=offsets([len(block.instructions) for block in blocks]),
        lengths=np.array([len(raw) for block in blocks for raw in block.instructions], np.uint8),
        block_edges=offsets([len(block.edges) for block in blocks]),
        edge_target=np.array([to for block in blocks for _, to in block.edges], np.uint64),
        edge_kind=np.array([kind for block in blocks for kind, _ in block.edges], np.uint8),
        unresolved=[],
    )
