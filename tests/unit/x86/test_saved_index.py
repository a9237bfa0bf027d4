"""Functions of BinaryCorp as graphs: what they hold, which level they have, what is refused."""

import copyreg
import pickle
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest

from making import quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.graphs.lifting import lift_files
from tokmill.x86.graphs.saved_index import graphs_of, level_of
from tokmill.x86.image.program import KeyTemplate, open_program
from tokmill.x86.lift.cfg import lift

COLUMNS = (
    "function_address", "function_name", "function_blocks", "block_address", "block_bytes", "code",
    "block_instructions", "lengths", "block_edges", "edge_target", "edge_kind",
)  # fmt: skip

# push rbp; call 0x1100; test eax, eax; je 0x1011 | xor eax, eax; jmp 0x1ffe | jmp [rax*8 + 0]
ENTRY = bytes.fromhex("55 e8fa000000 85c0 7407")
LEFT = bytes.fromhex("31c0 e9ed0f0000")
TABLE = bytes.fromhex("ff24c500000000")
RET, NOPS = b"\xc3", bytes.fromhex("90c3")


def graph_of(blocks: dict[int, tuple[bytes, list[int]]]) -> Any:
    graph = networkx.DiGraph()
    for address, (raw, _) in blocks.items():
        graph.add_node(address, asm=["?"], raw=raw)
    for address, (_, targets) in blocks.items():
        graph.add_edges_from((address, target) for target in targets)
    return graph


def function(address: int, graph: Any) -> list[Any]:
    raw = b"".join(facts.get("raw", b"") for _, facts in sorted(graph.nodes(data=True)))
    return [address, ["?"], raw, graph, None]


def small(base: int = 0x1000) -> list[Any]:
    """A function of five recorded blocks."""
    at = [base, base + 0xA, base + 0x11, base + 0x18, base + 0x19]
    blocks = {
        at[0]: (ENTRY, [at[1], at[2]]),
        at[1]: (LEFT, []),
        at[2]: (TABLE, [at[4], at[3]]),
        at[3]: (RET, []),
        at[4]: (NOPS, []),
    }
    return function(base, graph_of(blocks))


def other(address: int, size: int = 1) -> list[Any]:
    return function(address, graph_of({address: (b"\x90" * size + RET, [])}))


def put(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def edges(graph: Graph) -> list[list[tuple[int, Edge]]]:
    pairs = list(zip(graph.edge_target.tolist(), map(Edge, graph.edge_kind), strict=True))
    begins = graph.block_edges.tolist()
    return [pairs[a:b] for a, b in zip(begins[:-1], begins[1:], strict=True)]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_extract(tmp_path: Path, protocol: int) -> None:
    value = {"last": other(0x2000, 3), "main": small(), -1: other(0x1800)}
    path = put(tmp_path / "zlib-minigzip-O2-0a1b_extract.pkl", value, protocol)
    (graph,) = graphs_of(path)
    assert graph.program == "zlib-minigzip-O2-0a1b" and level_of(graph.program) == "O2"
    assert graph.bits == 64
    assert graph.function_address.tolist() == [0x1000, 0x1800, 0x2000]
    assert graph.function_name == ["main", "", "last"]
    assert graph.function_blocks.tolist() == [0, 6, 7, 8]
    # The first recorded block is cut behind its call.
    starts = [0x1000, 0x1006, 0x100A, 0x1011, 0x1018, 0x1019, 0x1800, 0x2000]
    assert graph.block_address.tolist() == starts
    assert graph.block_bytes.tolist() == [0, 6, 10, 17, 24, 25, 27, 29, 33]
    assert graph.code.tobytes()[:17] == ENTRY + LEFT
    assert graph.lengths.tolist() == [1, 5, 2, 2, 2, 5, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert graph.block_instructions.tolist() == [0, 2, 4, 6, 7, 8, 10, 12, 16]
    assert edges(graph) == [
        [(0x1100, Edge.CALL), (0x1006, Edge.FALL)],
        [(0x1011, Edge.BRANCH), (0x100A, Edge.FALL)],
        [(0x1FFE, Edge.JUMP)],
        # One target of the table lies right behind the jump.
        [(0x1018, Edge.INDIRECT), (0x1019, Edge.INDIRECT)],
        *[[(0, Edge.RETURN)]] * 4,
    ]
    assert graph.unresolved == []
    dtypes = [getattr(graph, name).dtype for name in COLUMNS if name != "function_name"]
    assert [str(dtype) for dtype in dtypes] == [
        "uint64", "int64", "uint64", "int64", "uint8", "int64", "uint8", "int64", "uint64", "uint8",
    ]  # fmt: skip


def recorded(graph: Graph) -> dict[str, Any]:
    """A lifted program as IDA would record it: blocks do not end at calls, edges have no kinds."""
    functions = {}
    blocks = zip(edges(graph), graph.block_address.tolist(), strict=True)
    places = graph.block_bytes.tolist()
    known = [
        (address, graph.code[a:b].tobytes(), found)
        for (found, address), a, b in zip(blocks, places[:-1], places[1:], strict=True)
    ]
    begins = graph.function_blocks.tolist()
    spans = zip(graph.function_address, begins[:-1], begins[1:], strict=True)
    for number, (address, first, last) in enumerate(spans):
        mine = {start: (raw, found) for start, raw, found in known[first:last]}
        ways = {
            start: [t for t, kind in found if kind != Edge.CALL and t in mine]
            for start, (_, found) in mine.items()
        }
        raws = {start: raw for start, (raw, _) in mine.items()}
        called = [t for targets in ways.values() for t in targets]
        for start in sorted(raws, reverse=True):
            end = start + len(raws[start])
            calls = any(kind == Edge.CALL for _, kind in mine[start][1])
            if calls and ways[start] == [end] and called.count(end) == 1 and end != address:
                raws[start] += raws.pop(end)
                ways[start] = ways.pop(end)
        whole = {start: (raw, ways[start]) for start, raw in raws.items()}
        functions[f"f{number}"] = function(int(address), graph_of(whole))
    return functions


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its own programs are not x86")
def test_a_program_comes_back_as_it_was_lifted(tmp_path: Path) -> None:
    program = open_program(shutil.which("true") or "/bin/true")
    lifted = lift(program)
    # A pickle does not say which slots are those of imports.
    through = np.isin(lifted.edge_target, program.slot_address)
    lifted.edge_target[through], lifted.edge_kind[through] = 0, Edge.INDIRECT
    path = put(tmp_path / "a_extract.pkl", recorded(lifted))
    (graph,) = graphs_of(path)
    assert len(lifted.block_address) > 300
    for name in COLUMNS:
        if name != "function_name":
            np.testing.assert_array_equal(getattr(graph, name), getattr(lifted, name), name)


def test_the_levels_of_an_index_are_given(tmp_path: Path) -> None:
    project = tmp_path / "zlib-minigzip"
    project.mkdir()
    index = {
        "use": [other(0x2000), other(0x2000), other(0x2000, 2)],
        "main": [small(0x1040), small(0x1000), small(0x1000)],
    }
    path = put(project / "saved_index.pkl", index)
    order = ("Os", "O0", "O2")
    named = [f"zlib-minigzip-saved_index-{level}-{i}" for i, level in enumerate(order)]
    graphs = list(graphs_of(path, order))
    assert [level_of(graph.program) for graph in graphs] == list(order)
    assert [graph.function_address.tolist() for graph in graphs] == [
        [0x1040, 0x2000], [0x1000, 0x2000], [0x1000, 0x2000],
    ]  # fmt: skip
    names = [graph.program for graph in graphs_of(path)]
    assert names == [f"zlib-minigzip-saved_index-unknown-{i}" for i in range(3)]
    assert {level_of(name) for name in names} == {"unknown"}
    assert [graph.program for graph in graphs_of(path, order)] == named
    with pytest.raises(UsageError, match="no optimisation level is called 'o1'") as caught:
        list(graphs_of(path, ["o1", "O0", "O2"]))
    assert "O1" in caught.value.hint
    with pytest.raises(UsageError, match="2 levels for 3 programs"):
        list(graphs_of(path, ["O0", "O1"]))


class Old:
    """A graph with the state of another networkx, or of one that was looked at."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return copyreg._reconstructor, (networkx.DiGraph, object, None), self.state


def test_graphs_of_other_versions_of_networkx(tmp_path: Path) -> None:
    graph = small()[3]
    expected = next(graphs_of(put(tmp_path / "a_extract.pkl", {"f": [0x1000, [], b"", graph]})))
    nodes, ways = dict(graph._node), {node: dict(found) for node, found in graph._adj.items()}
    first = {"node": nodes, "adj": ways, "succ": ways, "pred": {}, "edge": ways, "graph": {}}
    second = {"_node": nodes, "_adj": ways, "_succ": ways, "node_dict_factory": dict}
    looked = small()[3]
    assert len(looked.nodes) == len(looked.adj) == len(looked.succ) == 5 and looked.edges
    typed = {np.int64(node): facts for node, facts in nodes.items()}
    for held in (Old(first), Old(second), looked, Old({"_node": typed, "_adj": ways})):
        value = {"f": [np.int64(0x1000), [], b"", held, np.zeros(3), "feature"]}
        (found,) = graphs_of(put(tmp_path / "b_extract.pkl", value))
        for name in COLUMNS:
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)


def test_blocks_without_bytes_and_bytes_that_are_no_instructions(tmp_path: Path) -> None:
    graph = graph_of({
        0x10: (b"\x90", [0x11]),
        # nop; no instruction (two bytes); ret | the beginning of one, cut off
        0x11: (b"\x90\x06\x90\xc3", [0x15]),
        0x15: (b"\x90\xe8\x00", []),
        0x20: (b"\xff\xe0", []),
        0x30: (b"\xff\xd0\xc3", []),
    })  # fmt: skip
    graph.add_edge(0x20, 0x40)
    bare = function(0x50, graph_of({0x50: (b"", [])}))
    broken = function(0x60, graph_of({0x60: (b"\x06", [])}))
    value = {"f": function(0x10, graph), "g": bare, "h": broken, "i": other(0x70)}
    (found,) = graphs_of(put(tmp_path / "a_extract.pkl", value))
    assert found.function_name == ["f", "i"]
    assert found.function_blocks.tolist() == [0, 7, 8]
    assert found.block_address.tolist() == [0x10, 0x11, 0x14, 0x15, 0x20, 0x30, 0x32, 0x70]
    assert found.code.tobytes() == b"\x90\x90\xc3\x90\xff\xe0\xff\xd0\xc3\x90\xc3"
    assert edges(found)[:7] == [
        [(0x11, Edge.FALL)],
        [],
        # What was recorded, though the instruction does not tell it.
        [(0, Edge.RETURN), (0x15, Edge.INDIRECT)],
        [],
        [(0x40, Edge.INDIRECT)],
        [(0, Edge.INDIRECT), (0x32, Edge.FALL)],
        [(0, Edge.RETURN)],
    ]
    assert found.unresolved == [
        (0x12, "no instruction"), (0x16, "no instruction"), (0x30, "indirect call"),
        (0x40, "no bytes"), (0x50, "no bytes"), (0x60, "no instruction"),
    ]  # fmt: skip


def test_an_instruction_across_the_border_of_two_blocks(tmp_path: Path) -> None:
    # b8 takes four bytes more, which here are the next block's.
    graph = graph_of({0x10: (b"\x90\xb8", [0x12]), 0x12: (b"\x90\x90\x90\xc3", [])})
    (found,) = graphs_of(put(tmp_path / "a_extract.pkl", {"f": function(0x10, graph)}))
    assert found.block_address.tolist() == [0x10, 0x12]
    assert found.lengths.tolist() == [1, 1, 1, 1, 1]
    assert found.unresolved == [(0x11, "no instruction")]


@pytest.mark.parametrize(
    "functions",
    [{0x2000: 0x1000}, {0x2000: 0x3000, 0x4000: 0x3800}]
    + [{0x20000 + i: 0x10000 + i for i in range(0, 0x8000, 0x1000)}],
)
def test_calls_within_parts_at_lower_addresses(tmp_path: Path, functions: dict[int, int]) -> None:
    value = {}
    for address, cold in functions.items():
        blocks = {}
        for at in (*range(address, address + 0x400, 0x100), cold):
            # call 1f; 2: pause; lfence; jmp 2b; 1: mov [rsp], rax; ret
            blocks[at] = (bytes.fromhex("e807000000"), [at + 12])
            blocks[at + 5] = (bytes.fromhex("f3900faee8ebf9"), [at + 5])
            blocks[at + 12] = (bytes.fromhex("48890424c3"), [])
        value[f"f{address}"] = function(address, graph_of(blocks))
    (found,) = graphs_of(put(tmp_path / "a_extract.pkl", value))
    kinds = found.edge_kind.tolist()
    assert (kinds.count(Edge.CALL), kinds.count(Edge.JUMP)) == (0, 10 * len(functions))


def test_an_empty_extract(tmp_path: Path) -> None:
    (found,) = graphs_of(put(tmp_path / "a-b-O1-c_extract.pkl", {}))
    assert found.program == "a-b-O1-c" and len(found.function_address) == 0
    assert found.function_blocks.tolist() == found.block_edges.tolist() == [0]
    assert list(graphs_of(put(tmp_path / "saved_index.pkl", {}))) == []
    with pytest.raises(UsageError, match="is in the name of its file"):
        list(graphs_of(tmp_path / "a-b-O1-c_extract.pkl", ["O1"]))


def of_graph(nodes: Any, ways: Any = None) -> dict[str, list[Any]]:
    return {"f": [1, [], b"", Old({"_node": nodes, "_adj": ways or {}})]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "a key is an int, not a name"),
        ({b"f": other(1)}, "a key is a bytes, not a name"),
        ({"f": 5}, "['f'] is an int, not a list of functions"),
        ({"f": [5]}, "['f'][0] is an int, not a list of address, asm, bytes, graph"),
        (
            {"f": [[1, [], b""]]},
            "['f'][0] is a list of 3, not a list of address, asm, bytes, graph",
        ),
        ({"f": [[1, [], b"", 5]]}, "['f'][0][3] (graph) is an int, not a networkx.DiGraph"),
        ({-1: [1, [], "text", graph_of({})]}, "[-1][2] (bytes) is a str, not bytes"),
        ({"f": other(1), "g": [[]]}, "['g'] is a list of 1, not a list of address"),
        (
            {"f": [other(1), other(2)], "g": [other(3)]},
            "['g'] is a list of 1, where the first entry has 2",
        ),
        (
            {"f": other(1), "g": ["1", [], b"", None]},
            "['g'][0] (address) is a str, not an int below 2^64",
        ),
        (
            {"f": [1 << 70, [], b"", None]},
            "['f'][0] (address) is an int of 71 bits, not an int below",
        ),
        ({"f": [1, [], b"", Old({"_node": 5})]}, "whose _node is an int, not a dict"),
        ({"f": [1, [], b"", Old({"_node": {}})]}, "whose _adj is None, not a dict"),
        (of_graph({-1: {}}), "['f'][3] (graph) has a block at a negative int, not at an int below"),
        (of_graph({"a": {}}), "['f'][3] (graph) has a block at a str"),
        (of_graph({16: 2}), "['f'][3] (graph), block 0x10: its attributes are an int, not a dict"),
        (of_graph({16: {"raw": "x"}}), "block 0x10: its raw is a str, not bytes"),
        (of_graph({16: {}}, {16: 5}), "block 0x10: its successors are an int, not a dict"),
        (of_graph({16: {}}, {16: {"b": {}}}), "block 0x10: a successor is a str, not an int below"),
        ("text", "holds a str, not a dict or a list"),
    ],
)
def test_what_is_something_else(tmp_path: Path, value: Any, message: str) -> None:
    path = put(tmp_path / "saved_index.pkl", value)
    with pytest.raises(TokmillError, match=re.escape(message)) as caught:
        list(graphs_of(path))
    assert str(path) in caught.value.where and "inspect" in caught.value.hint


def test_functions_that_are_one_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokmill.base.unpickle.inert.SPARE", 1 << 16)
    one = other(16, 10_000)
    path = put(tmp_path / "saved_index.pkl", {f"f{i}": [one] for i in range(500)})
    with pytest.raises(TokmillError, match="makes far more data than"):
        list(graphs_of(path))


def test_lifting_takes_them_too(tmp_path: Path) -> None:
    project = tmp_path / "in/zlib-minigzip"
    project.mkdir(parents=True)
    put(project / "saved_index.pkl", {"main": [small(), small(0x3000)]})
    put(project / "zlib-minigzip-O1-ab_extract.pkl", {"main": small(), "more": other(0x9000)})
    for made in (3, 0):
        report = lift_files([str(tmp_path / "in")], tmp_path / "out")
        assert (report.made, report.kept, report.refused) == (made, 3 - made, {})
        assert report.functions == 4 and report.blocks == 3 * 6 + 1
    names = {path.stem for path in (tmp_path / "out").rglob("*.parquet")}
    index = "zlib-minigzip-saved_index"
    assert names == {f"{index}-unknown-0", f"{index}-unknown-1", "zlib-minigzip-O1-ab"}


MD5 = "00ac9f3e2f406891116850f0ddffd008"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (f"zz-tool-O0-{MD5}", ("zz", "tool", "O0")),
        (f"in/libcap-git-setcap-Os-{MD5}", ("libcap-git", "setcap", "Os")),
        ("zz-saved_index-Ofast-12", ("zz", "saved_index", "Ofast")),
        # Whatever is not quite such a name stays as it is.
        (f"zz-tool-O7-{MD5}", None), (f"tool-O0-{MD5}", None), (f"zz-tool-O0-{MD5}0", None),
        (f"zz-tool-O0-{MD5.upper()}", None), ("zz-tool-O0-1", None), (f"zz-tool-O0-{MD5}.so", None),
        ("zz-saved_index-unknown-0", None), (f"zz-O0-{MD5}/tool", None),
    ],
)  # fmt: skip
def test_names_are_read_as_what_they_say(name: str, key: tuple[str, str, str] | None) -> None:
    found = KeyTemplate("").key(name, "", "O3")
    project, program, level = key or ("unknown", name, "O3")
    assert found == (project, program, "unknown", "unknown", level)
    assert KeyTemplate("{program}").key(name).program == name


@pytest.mark.parametrize("index", [False, True])
def test_functions_of_several_levels_are_partners_without_a_layout(
    tmp_path: Path, index: bool
) -> None:
    folder = tmp_path / "bc/zz"
    folder.mkdir(parents=True)
    # A function is one nop longer at O2, and `same` equal at both levels.
    made = {
        level: {f"f{i}": other(0x1000 * i, 20 * i + more) for i in range(1, 7)}
        | {"same": other(0x9000, 300)}
        for more, level in enumerate(("O0", "O2"))
    }
    if index:
        put(folder / "saved_index.pkl", {n: [made[lv][n] for lv in made] for n in made["O0"]})
    else:
        for number, (level, functions) in enumerate(made.items()):
            put(folder / f"zz-tool-{level}-{number}{MD5[1:]}_extract.pkl", functions)
    lift_files([str(folder)], tmp_path / "graphs", levels=list(made) if index else None)
    store = quick_build("x86", tmp_path / "graphs", tmp_path / "functions")
    keys = {tuple(store.record(i)[k] for k in ("project", "program", "level")) for i in range(14)}
    program = "saved_index" if index else "tool"
    assert keys == {("zz", program, level) for level in made}
    mined = quick_build("mine", store.path, tmp_path / "triplets")
    pairs = set()
    for entry in map(mined.record, range(mined.records)):
        one, two = (store.record(int(entry[role])) for role in ("anchor", "positive"))
        assert one["function"] == two["function"] and one["level"] != two["level"]
        pairs.add((one["function"], one["level"]))
    assert pairs == {(f"f{i}", level) for i in range(1, 7) for level in made}
    assert mined.records == len(pairs) == 12
