"""Random walks: along edges only, the same in any company, as a plain loop would walk them."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokmill.x86 import walks as walks_module
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.walks import Walker, Walking, walk_graph_of
from x86_graphs import Block, graph_of

U64 = (1 << 64) - 1
STEP, START = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def numbers(graph: Graph, walking: Walking, functions: Sequence[int] | None = None) -> list[Any]:
    """Return (function, number, blocks) of each walk; every block has 10 tokens."""
    walker = Walker(walk_graph_of(graph, walking), walking)
    chosen = range(len(graph.function_address)) if functions is None else functions
    tokens = np.full(len(graph.block_address), 10)
    found = []
    for walks in walker.walk(np.array(chosen, np.int64), tokens, 0):
        for i in range(len(walks.function)):
            place = slice(walks.offsets[i], walks.offsets[i + 1])
            check_ways(walker, walks.block[place].tolist(), walks.edge[place].tolist())
            found.append(
                (int(walks.function[i]), int(walks.number[i]), walks.block[place].tolist())
            )
    return found


def check_ways(walker: Walker, blocks: list[int], ways: list[int]) -> None:
    """Each block is reached by the way that is told."""
    first, target = walker.flow.first, walker.flow.target
    assert ways[0] == -1
    for before, block, way in zip(blocks, blocks[1:], ways[1:], strict=False):
        assert first[before] <= way < first[before + 1] and target[way] == block


def test_weights_by_degree_prefer_what_goes_on() -> None:
    fork = [
        Block(0x10, edges=[(Edge.BRANCH, 0x20), (Edge.FALL, 0x30)]),
        Block(0x20),
        Block(0x30, edges=[(Edge.INDIRECT, to) for to in (0x10, 0x20, 0x30)]),
    ]
    for weight, share in (("uniform", 0.5), ("degree", 0.8)):
        walking = Walking(walks=4000, walk_from="entry", walk_blocks=2, weight=weight)  # type: ignore[arg-type]
        second = [blocks[1] for _, _, blocks in numbers(graph_of({0x10: fork}), walking)]
        assert abs(second.count(2) / 4000 - share) < 0.04


def twin(graph: Graph, walking: Walking, function: int, number: int) -> list[int]:
    """One walk, by a loop over its steps."""

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & U64
        value = (value ^ value >> 27) * 0x94D049BB133111EB & U64
        return value ^ value >> 31

    def below(draw: int, limit: int) -> int:
        return (draw >> 32) * limit >> 32

    address = graph.block_address.tolist()
    low, high = graph.function_blocks[function : function + 2].tolist()
    kinds = (Edge.FALL, Edge.JUMP, Edge.BRANCH, Edge.INDIRECT)

    def successors(block: int) -> list[int]:
        found = set()
        for edge in range(graph.block_edges[block], graph.block_edges[block + 1]):
            kind, target = int(graph.edge_kind[edge]), int(graph.edge_target[edge])
            if kind in kinds and target in address[low:high] and (kind != 4 or target):
                found.add(address.index(target, low, high))
        return sorted(found)

    entry = address.index(int(graph.function_address[function]), low, high)
    salt = hashlib.sha256(f"walk\0{walking.seed}\0{graph.program}".encode()).digest()
    key = mix(int.from_bytes(salt[:8], "little") ^ int(graph.function_address[function]))
    key = mix(key + number * STEP & U64)
    start = {
        "every": low + number % (high - low),
        "entry": entry,
        "random": low + below(mix(key ^ START), high - low),
    }[walking.walk_from]
    blocks = [start]
    while 10 * len(blocks) < walking.walk_tokens and len(blocks) != walking.walk_blocks:
        ways, draw = successors(blocks[-1]), mix(key + len(blocks) * STEP & U64)
        if not ways:
            break
        degree = walking.weight == "degree"
        weights = [1 + len(successors(way)) if degree else 1 for way in ways]
        drawn = below(draw, sum(weights))
        blocks.append(next(w for i, w in enumerate(ways) if drawn < sum(weights[: i + 1])))
    return blocks


@st.composite
def graphs(draw: Any) -> Graph:
    functions: dict[int, list[Block]] = {}
    for number in range(draw(st.integers(1, 3))):
        places = [0x1000 * number + 16 * i for i in range(draw(st.integers(1, 5)))]
        targets = st.sampled_from([*places, 0, 0x5000])
        edges = st.lists(st.tuples(st.sampled_from(list(Edge)), targets), max_size=4)
        inside = [Block(place, edges=draw(edges)) for place in places]
        entry = draw(st.sampled_from(places))
        functions[entry] = sorted(inside, key=lambda block: (block.address < entry, block.address))
    return graph_of(functions)


@settings(max_examples=60, deadline=None)
@given(
    graphs(),
    st.builds(
        Walking,
        seed=st.integers(0, 3),
        walks=st.integers(1, 3),
        walk_from=st.sampled_from(["every", "entry", "random"]),
        walk_tokens=st.integers(1, 200),
        walk_blocks=st.integers(0, 5),
        weight=st.sampled_from(["uniform", "degree"]),
    ),
    st.integers(1, 5),
)
def test_walks_in_columns_are_those_of_a_loop(graph: Graph, walking: Walking, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walks_module, "AT_ONCE", size * walking.walk_tokens)
        found = numbers(graph, walking)
    for function, number, blocks in found:
        assert blocks == twin(graph, walking, function, number)
    # Nor does it matter which other functions are walked.
    last = len(graph.function_address) - 1
    assert numbers(graph, walking, [last]) == [walk for walk in found if walk[0] == last]


def test_blocks_without_tokens_are_not_walked_for_ever() -> None:
    circle = {0: [Block(0, edges=[(Edge.JUMP, 8)]), Block(8, edges=[(Edge.JUMP, 0)])]}
    walking = Walking(walk_tokens=64)
    walker = Walker(walk_graph_of(graph_of(circle), walking), walking)
    [found] = walker.walk(np.array([0]), np.zeros(2, np.int64), 0)
    assert np.diff(found.offsets).tolist() == [walks_module.MOST_STEPS * 64] * 2
