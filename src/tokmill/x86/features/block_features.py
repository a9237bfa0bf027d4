"""Features of the blocks of a program."""

from __future__ import annotations

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.features.bags import Bag, bag, hash_texts
from tokmill.x86.features.function_features import find, import_names
from tokmill.x86.features.instruction_features import Instructions
from tokmill.x86.graph import Graph

_CONSTANT, _IMPORT, _MORE = np.uint64(1), np.uint64(2), np.uint64(3)


def forms_of_blocks(graph: Graph, instructions: Instructions) -> Bag:
    blocks = len(graph.block_address)
    owner = np.repeat(np.arange(blocks), np.diff(graph.block_instructions))
    return bag(blocks, owner, instructions.form)


def facts_of_blocks(graph: Graph, more: tuple[Array, Array]) -> Bag:
    """Return constants, strings and imports of each block, and `more` (block, u8 of what)."""
    blocks = np.arange(len(graph.block_address))
    caller = np.repeat(blocks, np.diff(graph.block_edges))
    slot, known = find(graph.import_address, graph.edge_target)
    rows = (
        np.repeat(blocks, np.diff(graph.block_constants)),
        np.repeat(blocks, np.diff(graph.block_strings)),
        caller[known],
        more[0],
    )
    keys = (
        mix(mix(graph.constant.astype(np.uint64)) + _CONSTANT),
        hash_texts(graph.strings)[graph.string],
        mix(hash_texts(import_names(graph))[slot[known]] + _IMPORT),
        mix(mix(more[1]) + _MORE),
    )
    return bag(len(blocks), np.concatenate(rows), np.concatenate(keys))
