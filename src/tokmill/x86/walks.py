"""Random walks over the blocks of functions: all walks of many functions at once, step by step.

A walk is drawn by hashes of (seed, program, address of the function, number of the walk, step), so
it does not depend on other walks. In the graph of one program it stays in its function and steps
over calls. `tokmill.x86.merged` makes the graph of two programs.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.graph import BlockPlaces, Edge, Graph
from tokmill.x86.image.image import distinct, owners

WALKED = (Edge.FALL, Edge.JUMP, Edge.BRANCH, Edge.INDIRECT)
AT_ONCE = 1 << 22
"""Most tokens of the walks that are drawn at a time: what they visit is in memory."""
MOST_STEPS = 4
"""Most steps of a walk, as a multiple of its tokens: nodes without tokens may form a cycle."""
_STEP = np.asarray(0x9E3779B97F4A7C15, np.uint64)
_START = np.asarray(0xD1B54A32D192ED03, np.uint64)
_HALF = np.uint64(32)


class Walking(msgspec.Struct, frozen=True, kw_only=True):
    """Options of walks; `X86Config` explains them."""

    seed: int = 0
    walks: int = 1
    walk_from: Literal["every", "entry", "random"] = "every"
    walk_tokens: int = 512
    walk_blocks: int = 0
    weight: Literal["uniform", "degree"] = "uniform"


@dataclass(slots=True)
class Flow:
    """The W weighted edges of N nodes (blocks first, then nodes without tokens)."""

    first: Array
    """(N + 1,) i8: the edges of node i are [i] to [i + 1]."""
    target: Array
    """(W,) i8: the node that each edge leads to; a node has no two edges to the same node."""
    below: Array
    """(W + 1,) i8: sum of the weights of all edges before each edge."""


@dataclass(slots=True)
class WalkGraph:
    """A graph for walks: F functions of B blocks; the blocks are the first nodes of `flow`."""

    function_blocks: Array
    """(F + 1,) i8: blocks of function i are [i] to [i + 1]; it begins at the first."""
    key: Array
    """(F,) u8: hash from which the walks of each function are drawn."""
    flow: Flow


def flow_of(graph: Graph, weight: str = "uniform") -> Flow:
    """Return the edges of a graph within its functions, without calls; equal edges are one.

    The weight of an edge is 1; with `degree` it is 1 + the edges of its target.
    """
    places = BlockPlaces(graph)
    kept = walked(graph)
    source = owners(graph.block_edges)[kept]
    target, inside = places.find(places.function[source], graph.edge_target[kept])
    return flow_of_edges(source[inside], target[inside], len(graph.block_address), weight)


def walked(graph: Graph) -> Array:
    """Return which edges lead on within a function, or to another by a jump: (E,) bool."""
    # 0 is an address, except for an indirect jump.
    resolved = (graph.edge_kind != Edge.INDIRECT) | (graph.edge_target != 0)
    return np.isin(graph.edge_kind, WALKED) & resolved


def flow_of_edges(source: Array, target: Array, nodes: int, weight: str) -> Flow:
    """Return the flow of some edges, equal ones as one; weights as in `flow_of`."""
    edges = distinct(source * max(nodes, 1) + target)
    source, target = np.divmod(edges, max(nodes, 1))
    first = np.searchsorted(source, np.arange(nodes + 1))
    weights = np.ones(len(target), np.int64)
    if weight == "degree":
        weights += np.diff(first)[target]
    return Flow(first, target, np.concatenate([[0], np.cumsum(weights)]))


def walk_graph_of(graph: Graph, walking: Walking) -> WalkGraph:
    key = keys_of(graph, f"walk\0{walking.seed}\0{graph.program}")
    return WalkGraph(graph.function_blocks, key, flow_of(graph, walking.weight))


def keys_of(graph: Graph, salt: str) -> Array:
    """Return (F,) u8, hashes of salt and address, from which the walks of functions are drawn."""
    base = hashlib.sha256(salt.encode()).digest()[:8]
    return mix(np.asarray(int.from_bytes(base, "little"), np.uint64) ^ graph.function_address)


@dataclass(slots=True)
class Walks:
    """n walks of one batch, and the blocks that they visit, end to end."""

    function: Array
    """(n,) i8: number of the function."""
    number: Array
    """(n,) i8: number of the walk in its function."""
    offsets: Array
    """(n + 1,) i8 into `block`."""
    block: Array
    """i8: numbers of blocks."""
    edge: Array
    """i8: the edge that led to each block; -1 where a walk begins."""


class Walker:
    """Walks that begin in the functions of a graph."""

    def __init__(self, graph: WalkGraph, walking: Walking) -> None:
        self.graph, self.flow, self.walking = graph, graph.flow, walking

    def walk(self, functions: Array, tokens: Array, first_block: int) -> Iterator[Walks]:
        """Yield the walks of some functions, in order of function and number.

        Args:
            tokens: i8, tokens of the nodes from `first_block` on.
            first_block: a block; the functions have no blocks before it.
        """
        blocks = np.diff(self.graph.function_blocks)[functions]
        every = self.walking.walk_from == "every"
        counts = self.walking.walks * (blocks if every else np.ones_like(blocks))
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        size = max(AT_ONCE // self.walking.walk_tokens, 1)
        for begin in range(0, total, size):
            walk = np.arange(begin, min(begin + size, total))
            place = np.searchsorted(ends, walk, side="right")
            number = walk - (ends - counts)[place]
            yield self._walk(functions[place], number, tokens, first_block)

    def _walk(self, function: Array, number: Array, tokens: Array, first_block: int) -> Walks:
        graph, walking, flow = self.graph, self.walking, self.flow
        low = graph.function_blocks[function]
        size = graph.function_blocks[function + 1] - low
        key = mix(graph.key[function] + number.astype(np.uint64) * _STEP)
        if walking.walk_from == "every":
            start = low + number % size
        elif walking.walk_from == "entry":
            start = low
        else:
            start = low + _below(mix(key ^ _START), size)
        walk, here = np.arange(len(function)), start
        edge = np.full(len(walk), -1)
        length = np.zeros(len(walk), np.int64)
        passed = np.zeros(len(walk), np.int64)
        blocks = graph.function_blocks[-1]
        visited: list[tuple[Array, Array, Array]] = []
        while len(walk) and len(visited) < MOST_STEPS * walking.walk_tokens:
            visited.append((walk, here, edge))
            length[walk] += tokens[here - first_block]
            going = length[walk] < walking.walk_tokens
            if walking.walk_blocks:
                passed[walk] += here < blocks
                going &= passed[walk] < walking.walk_blocks
            walk, here = walk[going], here[going]
            draw = mix(key[walk] + np.asarray(len(visited), np.uint64) * _STEP)
            stuck = flow.first[here + 1] == flow.first[here]
            walk, here, draw = walk[~stuck], here[~stuck], draw[~stuck]
            edge = self._choose(here, draw)
            here = flow.target[edge] if len(flow.target) else here
        walk, block, edge = (np.concatenate(column) for column in zip(*visited, strict=True))
        order = np.argsort(walk, kind="stable")
        offsets = np.searchsorted(walk[order], np.arange(len(function) + 1))
        return Walks(function, number, offsets, block[order], edge[order])

    def _choose(self, here: Array, draw: Array) -> Array:
        """Return an edge from each block, drawn by weight; any number for a block without edges."""
        flow = self.flow
        before = flow.below[flow.first[here]]
        drawn = before + _below(draw, flow.below[flow.first[here + 1]] - before)
        edge: Array = np.searchsorted(flow.below, drawn, side="right") - 1
        return np.minimum(edge, max(len(flow.target) - 1, 0))


def _below(draw: Array, limit: Array) -> Array:
    """Return whole numbers from 0 to limit - 1 (limits below 2^31), each from 64 drawn bits."""
    return ((draw >> _HALF) * limit.astype(np.uint64) >> _HALF).astype(np.int64)
