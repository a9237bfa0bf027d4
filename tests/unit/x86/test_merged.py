"""Two programs as one graph: the edges of a readable twin, and what joins the two."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pair_graphs import small_program, with_facts
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.merged import LEAST_STRING, Merged, NoFacts, merge, name_of
from tokmill.x86.walks import WALKED, Walking
from x86_graphs import Block, graph_of

Node = tuple[Any, ...]


def nodes_of(graphs: tuple[Graph, Graph], merged: Merged) -> list[Node]:
    """Return what each node of a merged graph is."""
    found: list[Node] = []
    for side, graph in enumerate(graphs):
        for number, address in enumerate(graph.block_address.tolist()):
            inside = int(np.searchsorted(graph.function_blocks, number, "right")) - 1
            found.append(("block", side, inside, address))
    names = {name_of(name) for graph in graphs for name in graph.import_name}
    found += [("import", name) for name in sorted(names)]
    texts = {text for text in graphs[0].strings if len(text) >= LEAST_STRING}
    found += [("string", text) for text in sorted(texts & set(graphs[1].strings))]
    for side, graph in enumerate(graphs):
        found += [("exit", side, inside) for inside in range(len(graph.function_address))]
    assert len(found) == merged.nodes
    return found


def edges_of(graphs: tuple[Graph, Graph], merged: Merged) -> set[tuple[Node, Node]]:
    """Return the ways of a merged graph."""
    nodes, flow = nodes_of(graphs, merged), merged.walk_graph.flow
    ways = {
        (nodes[node], nodes[to])
        for node in range(len(nodes))
        for to in flow.target[flow.first[node] : flow.first[node + 1]].tolist()
    }
    assert len(ways) == len(flow.target)
    return ways


def expected(graphs: tuple[Graph, Graph]) -> set[tuple[Node, Node]]:
    """Return the same, block by block in plain loops."""
    shared = set(graphs[0].strings) & set(graphs[1].strings)
    found: set[tuple[Node, Node]] = set()
    for side, graph in enumerate(graphs):
        found.update(_edges(side, graph, {text for text in shared if len(text) > 5}))
    return found


def _edges(side: int, graph: Graph, shared: set[str]) -> Iterator[tuple[Node, Node]]:
    bounds = graph.function_blocks.tolist()
    inside = [f for f in range(len(bounds) - 1) for _ in range(bounds[f], bounds[f + 1])]
    blocks = [
        ("block", side, f, a) for f, a in zip(inside, graph.block_address.tolist(), strict=True)
    ]
    imports = dict(zip(graph.import_address.tolist(), graph.import_name, strict=True))
    entries: dict[int, Node] = {}
    for f, address in enumerate(graph.function_address.tolist()):
        own = [block for block in blocks if block[2] == f]
        if own:
            entries[address] = next((block for block in own if block[3] == address), own[0])

    def beyond(address: int) -> Node | None:
        if address in imports:
            return ("import", name_of(imports[address]))
        if address in entries:
            return entries[address]
        return next((block for block in blocks if block[3] == address), None)

    def exit_of(node: Node) -> Node:
        return node if node[0] == "import" else ("exit", side, node[2])

    for number, block in enumerate(blocks):
        for text in graph.string[graph.block_strings[number] : graph.block_strings[number + 1]]:
            if graph.strings[text] in shared:
                yield block, ("string", graph.strings[text])
                yield ("string", graph.strings[text]), block
        low, high = graph.block_edges[number : number + 2].tolist()
        ways = list(
            zip(graph.edge_kind[low:high], graph.edge_target[low:high].tolist(), strict=True)
        )
        behind = None
        for kind, to in ways:
            if kind == Edge.FALL and ("block", side, inside[number], to) in blocks:
                behind = ("block", side, inside[number], to)
        for kind, to in ways:
            if kind == Edge.RETURN:
                yield block, ("exit", side, inside[number])
            elif kind == Edge.CALL and (callee := beyond(to)) is not None:
                yield block, callee
                if behind is not None:
                    yield exit_of(callee), behind
            elif kind in WALKED and (kind != Edge.INDIRECT or to):
                own = ("block", side, inside[number], to)
                if own in blocks:
                    yield block, own
                elif (other := beyond(to)) is not None:
                    yield block, other
                    yield exit_of(other), ("exit", side, inside[number])


def drawn_graph(draw: np.random.Generator, program: str) -> Graph:
    """Return a graph whose edges lead anywhere: blocks shared, functions empty, tail calls."""
    addresses = sorted(draw.choice(200, 12, replace=False).tolist())
    imports = {1000 + i: f"import{draw.integers(4)}" for i in range(3)}
    aims = [*addresses, *imports, 0, 777]
    functions = {}
    for at in sorted(draw.choice(addresses, 5, replace=False).tolist()):
        inside = {at, *draw.choice(addresses, draw.integers(0, 4)).tolist()}
        inside = sorted(inside, key=lambda one: (one < at, one))
        left_out = set() if draw.random() < 0.8 else {draw.choice(inside)}
        functions[at] = [
            Block(a, edges=[_edge(draw, aims) for _ in range(draw.integers(0, 4))])
            for a in inside
            if a not in left_out
        ]
    texts = ["%s", "usage: %s", "a longer text", "another text"]
    strings = {a: draw.choice(texts, draw.integers(0, 3)).tolist() for a in addresses}
    return with_facts(graph_of(functions, program=program), imports, strings)


def _edge(draw: np.random.Generator, aims: list[int]) -> tuple[Edge, int]:
    kind = Edge(int(draw.integers(6)))
    return kind, 0 if kind == Edge.RETURN else int(draw.choice(aims))


@pytest.mark.parametrize("seed", range(60))
def test_the_edges_are_those_of_the_readable_twin(seed: int) -> None:
    draw = np.random.default_rng(seed)
    graphs = (drawn_graph(draw, "a"), drawn_graph(draw, "b"))
    assert edges_of(graphs, merge(graphs, Walking())) == expected(graphs)


def test_calls_enter_and_return_and_same_imports_and_strings_join() -> None:
    graphs = (small_program("a", 0x1000, 1), small_program("b", 0x2000, 2))
    merged = merge(graphs, Walking())
    ways = edges_of(graphs, merged)
    main, f = ("block", 0, 0, 0x1000), ("block", 0, 1, 0x1100)
    assert (main, f) in ways and (main, ("block", 0, 0, 0x1004)) in ways
    assert (f, ("exit", 0, 1)) in ways and (("exit", 0, 1), ("block", 0, 0, 0x1004)) in ways
    for side, at in enumerate((0x1000, 0x2000)):
        assert (("import", "puts"), ("block", side, 0, at + 7)) in ways
        assert (("string", "a usage text"), ("block", side, 1, at + 0x100)) in ways
    assert (merged.imports, merged.shared, merged.strings) == (1, 1, 1)


def test_short_strings_and_those_of_one_program_join_nothing() -> None:
    def program(name: str, *texts: str) -> Graph:
        return with_facts(graph_of({0: [Block(0)]}, program=name), strings={0: texts})

    merged = merge(
        (program("a", "usage", "only here"), program("b", "usage", "not there")), Walking()
    )
    assert merged.strings == 0 and len(merged.walk_graph.flow.target) == 0
    assert merge((program("a", "usage:"), program("b", "usage:")), Walking()).strings == 1


def test_programs_without_functions() -> None:
    empty = with_facts(graph_of({}, program="empty"))
    merged = merge((empty, empty), Walking())
    assert merged.nodes == 0 and len(merged.walk_graph.flow.target) == 0
    assert merge((empty, small_program("b", 0x1000, 1)), Walking()).nodes == 4 + 1 + 2


def test_a_graph_without_facts_is_refused_by_name() -> None:
    good = small_program("good", 0x1000, 1)
    with pytest.raises(NoFacts, match="old"):
        merge((good, graph_of({0: [Block(0)]}, program="old")), Walking())


def test_names_of_imports() -> None:
    assert name_of("memcpy@GLIBC_2.14") == "memcpy" == name_of("memcpy@@GLIBC_2.2.5")
    assert name_of("KERNEL32.dll!#7") == "KERNEL32.dll!#7"
    assert name_of("?f@@YAXXZ") == "?f@@YAXXZ" and name_of("@x@8") == "@x@8"
