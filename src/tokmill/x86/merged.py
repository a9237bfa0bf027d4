"""Two programs as one graph for walks: the blocks of both, joined by common imports and strings.

Imports with the same name and strings with the same content are one node. Walks enter callees and
return from them, so a walk that comes to an import or a string of both programs may continue in the
other program.
"""

from dataclasses import dataclass

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import BlockPlaces, Edge, Graph
from tokmill.x86.image.image import find, owners
from tokmill.x86.walks import WalkGraph, Walking, flow_of_edges, keys_of, walked

LEAST_STRING = 6
"""Fewest characters of a string that joins two programs: more than 5, as in DeepBinDiff. Shorter
ones (`%s`, a newline, bytes that are text by chance) are in most programs and would join unrelated
code."""


@dataclass(slots=True)
class Merged:
    """Two programs as one graph; functions and blocks of the first program come first.

    Its nodes are the B blocks, then the imports, the strings that both programs have, and one exit
    for each function. From the exit of a function a walk continues after any call of it.
    """

    walk_graph: WalkGraph
    imports: int
    strings: int
    shared: int
    """Number of imports that both programs have."""

    @property
    def nodes(self) -> int:
        return len(self.walk_graph.flow.first) - 1


class NoFacts(Exception):
    """The graph of a program (its name) does not say what it imports and which strings it has."""


def merge(graphs: tuple[Graph, Graph], walking: Walking) -> Merged:
    """Return two programs as one graph.

    Its edges are the edges within functions; jumps and calls to other functions and to imports;
    from a call to the next block; from the exit of a function, or from an import, to the blocks
    after its calls; and between blocks and the strings of both programs that they refer to.

    Raises `NoFacts` for a graph whose `facts` is False.
    """
    for graph in graphs:
        if not graph.facts:
            raise NoFacts(graph.program)
    names = [{name_of(name) for name in graph.import_name} for graph in graphs]
    imports = sorted(names[0] | names[1])
    strings = sorted(
        {s for s in graphs[0].strings if len(s) >= LEAST_STRING}.intersection(graphs[1].strings)
    )
    blocks = [len(graph.block_address) for graph in graphs]
    functions = [len(graph.function_address) for graph in graphs]
    first_import = sum(blocks)
    first_string = first_import + len(imports)
    first_exit = first_string + len(strings)
    nodes = first_exit + sum(functions)
    node_of_import = {name: first_import + number for number, name in enumerate(imports)}
    node_of_string = {text: first_string + number for number, text in enumerate(strings)}
    sources, targets = [], []
    for side, graph in enumerate(graphs):
        imported = [node_of_import[name_of(name)] for name in graph.import_name]
        block, exit = sum(blocks[:side]), first_exit + sum(functions[:side])
        edges = _Edges(graph, block, exit, np.asarray(imported, np.int64))
        shown = [node_of_string.get(text, -1) for text in graph.strings]
        edges.to_strings(np.asarray(shown, np.int64))
        edges.within()
        edges.calls_and_returns()
        sources += edges.sources
        targets += edges.targets
    flow = flow_of_edges(np.concatenate(sources), np.concatenate(targets), nodes, walking.weight)
    pair = "\0".join(graph.program for graph in graphs)
    keys = [
        keys_of(graph, f"pair\0{walking.seed}\0{pair}\0{side}") for side, graph in enumerate(graphs)
    ]
    bounds = [graphs[0].function_blocks, graphs[1].function_blocks[1:] + blocks[0]]
    walk_graph = WalkGraph(np.concatenate(bounds), np.concatenate(keys), flow)
    return Merged(walk_graph, len(imports), len(strings), len(names[0] & names[1]))


def name_of(symbol: str) -> str:
    """Return the name of an import without the version of an ELF symbol (`memcpy@GLIBC_2.14`)."""
    return symbol if "!" in symbol or symbol.startswith("?") else symbol.partition("@")[0] or symbol


class _Edges:
    """The edges of one program as numbers of nodes; its first block is node `block`."""

    def __init__(self, graph: Graph, block: int, exit: int, imported: Array) -> None:
        self.graph, self.block, self.exit = graph, block, exit
        self.sources: list[Array] = []
        self.targets: list[Array] = []
        self.count = len(graph.block_address)
        self.places = BlockPlaces(graph)
        self.function = self.places.function
        self.of_edge = owners(graph.block_edges)
        filled = np.diff(graph.function_blocks) > 0
        self.nodes = (
            # If several functions share a block, this is the first of its copies.
            (self.places.addresses, np.unique(graph.block_address, return_index=True)[1] + block),
            (graph.function_address[filled], graph.function_blocks[:-1][filled] + block),
            (graph.import_address, imported),
        )
        """Addresses, ascending, and their nodes: blocks, entries of functions, imports."""

    def _add(self, source: Array, target: Array) -> None:
        inside = (source >= 0) & (target >= 0)
        self.sources.append(source[inside].astype(np.int64))
        self.targets.append(target[inside].astype(np.int64))

    def to_strings(self, shown: Array) -> None:
        """Add the edges between blocks and strings; `shown` is the node of each string, or -1."""
        graph = self.graph
        block = owners(graph.block_strings) + self.block
        node = shown[graph.string]
        self._add(np.where(node < 0, -1, block), node)
        self._add(node, block)

    def within(self) -> None:
        """Add the edges that are not calls; a jump to another function also ends this one."""
        graph, jumps = self.graph, walked(self.graph)
        source, address = self.of_edge[jumps], graph.edge_target[jumps]
        inside = self._in_function(self.function[source], address)
        beyond = self._beyond(address)
        target = np.where(inside >= 0, inside, beyond)
        self._add(source + self.block, target)
        # After a jump to another function, control returns to the callers of this one.
        leaves = (inside < 0) & (beyond >= 0)
        self._add(self._exit_of(beyond[leaves]), self.function[source[leaves]] + self.exit)

    def calls_and_returns(self) -> None:
        """Add edges to callees, from blocks that return to the exit, and from it to after calls."""
        graph, kind = self.graph, self.graph.edge_kind
        calls = np.flatnonzero(kind == Edge.CALL)
        caller, callee = self.of_edge[calls], self._beyond(graph.edge_target[calls])
        self._add(caller + self.block, callee)
        falls = np.flatnonzero(kind == Edge.FALL)
        behind = np.full(self.count, -1)
        after = self._in_function(self.function[self.of_edge[falls]], graph.edge_target[falls])
        behind[self.of_edge[falls]] = after
        self._add(self._exit_of(callee), behind[caller])
        returns = self.of_edge[kind == Edge.RETURN]
        self._add(returns + self.block, self.function[returns] + self.exit)

    def _in_function(self, function: Array, address: Array) -> Array:
        place, there = self.places.find(function, address)
        return np.where(there, place + self.block, -1)

    def _beyond(self, address: Array) -> Array:
        """Return the node at an address (an import, a function's entry, any block), or -1."""
        node = np.full(len(address), -1)
        for addresses, nodes in self.nodes:
            place, there = find(addresses, address)
            node[there] = nodes[place[there]]
        return node

    def _exit_of(self, node: Array) -> Array:
        """Return where a callee ends: the exit of a block's function, or the import itself."""
        block, result = node - self.block, node.copy()
        inside = (block >= 0) & (block < self.count)
        result[inside] = self.function[block[inside]] + self.exit
        return result
