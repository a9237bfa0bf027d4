"""Graphs that say what they import and which strings they have, for pairs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tokmill.x86.graph import PLACES, TEXT, Edge, Graph
from tokmill.x86.graphs.graph_files import write_graph
from x86_graphs import Block, graph_of

NOP, RET = b"\x90", b"\xc3"


def with_facts(
    graph: Graph,
    imports: Mapping[int, str] | None = None,
    strings: Mapping[int, Sequence[str]] | None = None,
) -> Graph:
    """Return a graph with imports (address → name) and strings (address of a block → texts)."""
    ordered = sorted((imports or {}).items())
    graph.import_address = np.array([address for address, _ in ordered], np.uint64)
    graph.import_name = [name for _, name in ordered]
    texts: dict[str, int] = {}
    shown = [
        [texts.setdefault(text, len(texts)) for text in (strings or {}).get(address, ())]
        for address in graph.block_address.tolist()
    ]
    counts = [len(one) for one in shown]
    graph.block_strings = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    graph.string = np.array([number for one in shown for number in one], np.uint32)
    graph.strings = list(texts)
    # The first instruction of a block refers to them.
    graph.reference = 0x6000 + 16 * graph.string.astype(np.uint64)
    graph.reference_place = PLACES * np.repeat(graph.block_instructions[:-1], counts) + TEXT
    graph.facts = True
    return graph


def small_program(name: str, at: int, step: int) -> Graph:
    """Return a program whose main calls f and puts, and whose f shows a text and returns."""
    add = bytes([0x83, 0xC0, step])
    functions = {
        at: [
            Block(at, [NOP, add], [(Edge.CALL, at + 0x100), (Edge.FALL, at + 4)]),
            Block(at + 4, [add], [(Edge.CALL, 0x90), (Edge.FALL, at + 7)]),
            Block(at + 7, [RET], [(Edge.RETURN, 0)]),
        ],
        at + 0x100: [Block(at + 0x100, [b"\x55", RET], [(Edge.RETURN, 0)])],
    }
    graph = graph_of(functions, ["main", ""], program=name)
    return with_facts(graph, {0x90: "puts@GLIBC_2.2.5"}, {at + 0x100: ["a usage text"]})


def write_small(folder: Path, number: int) -> Path:
    """Write the graph of program 0, 1, … into a folder."""
    path = folder / f"{number}.cfg.parquet"
    write_graph(small_program(f"O{number}/tool", 0x1000 * (number + 1), number + 1), path)
    return path
