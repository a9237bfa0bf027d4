"""Graphs as files: read back exactly, readable by others, refused where damaged."""

import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tokmill.base.errors import TokmillError
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import KEY, SUM, WHOLE, read_about, read_graph, write_graph
from tokmill.x86.lift.cfg import lift
from x86_graphs import Block, graph_of
from x86_programs import CPP_SOURCE, compiles, flat, stripped


@pytest.fixture(scope="module")
def graph(built: Path) -> Graph:
    return lift(compiles(built, "stored", CPP_SOURCE, "-O1", by="g++"), facts=True)


def with_facts(table: pyarrow.Table, facts: bytes, path: Path) -> None:
    """Write a graph's table with other facts, and their checksum."""
    metadata = {KEY: facts, SUM: b"%08x" % zlib.crc32(facts)}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def same(a: Graph, b: Graph) -> None:
    """Compare all columns, their dtypes too."""
    for field in dataclasses.fields(Graph):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and np.array_equal(one, other), field.name
        elif field.name == "data":
            assert len(one) == len(other) and all(map(np.array_equal, one, other))
        else:
            assert one == other, field.name


def test_parquet_gives_back_what_was_written(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "stored.parquet"
    facts = write_graph(graph, path, "digest", "lifter 1")
    same(graph, read_graph(path))
    assert read_about(path) == facts
    assert (facts.functions, facts.blocks) == (len(graph.function_name), len(graph.block_address))
    assert facts.digest == "digest" and facts.lifter == "lifter 1" and facts.bits == 64
    assert sum(map(len, facts.unresolved.values())) == len(graph.unresolved)


def test_facts_are_in_the_file(graph: Graph, tmp_path: Path) -> None:
    assert graph.facts and graph.import_name and graph.strings and len(graph.constant)
    path = tmp_path / "stored.parquet"
    facts = write_graph(graph, path)
    assert facts.facts and facts.imports[0] == (graph.import_address[0], graph.import_name[0])
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert {text for row in rows for text in row["strings"]} == set(graph.strings)
    assert sum(len(row["constants"]) for row in rows) == len(graph.constant)


def test_pointers_are_in_the_first_row(graph: Graph, tmp_path: Path) -> None:
    assert len(graph.pointer_address) and any(graph.pointer_text)
    write_graph(graph, tmp_path / "stored.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "stored.parquet").to_pylist()
    assert rows[0]["pointers"] == graph.pointer_address.tolist()
    assert rows[0]["pointed"] == graph.pointer_target.tolist()
    assert rows[0]["pointed_strings"] == graph.pointer_text
    assert not any(row[name] for row in rows[1:] for name in WHOLE)
    assert rows[0]["data"] == [one.tobytes() for one in graph.data] and rows[0]["symbol_names"]
    assert sum(len(row["references"]) for row in rows) == len(graph.reference) > 0


def test_damaged_facts_are_refused(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_graph(graph, path)
    table = pyarrow.parquet.read_table(path)
    facts = dict(table.schema.metadata)
    facts[KEY] = facts[KEY].replace(b"_start_main", b"_s^art_main")
    pyarrow.parquet.write_table(table.replace_schema_metadata(facts), path)
    with pytest.raises(TokmillError, match="checksum"):
        read_graph(path)


def test_a_graph_without_names_and_one_without_functions(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare.parquet"
    bare = lift(stripped(compiles(built, "stored", CPP_SOURCE, "-O1", by="g++")))
    write_graph(bare, path)
    same(bare, read_graph(path))
    assert "" in bare.function_name
    nothing = lift(flat(b"\x06"))
    assert len(nothing.function_address) == 0
    write_graph(nothing, path)
    same(nothing, read_graph(path))
    # Two that lie side by side, of the same name.
    twins = lift(flat(bytes.fromhex("e801000000 c3 c3")))
    twins.function_name = ["twin", "twin"]
    write_graph(twins, path)
    same(twins, read_graph(path))


def test_others_read_a_row_a_block(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "stored.parquet"
    write_graph(graph, path)
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len(rows) == len(graph.block_address)
    row = next(row for row in rows if row["name"] == "main" and row["address"] == row["function"])
    assert row["program"] == "stored" and row["demangled"] == "main"
    assert sum(row["lengths"]) == len(row["code"])
    assert len(row["successors"]) == len(row["kinds"])
    assert {kind for row in rows for kind in row["kinds"]} == {
        "fall", "jump", "branch", "call", "indirect", "return"
    }  # fmt: skip
    named = {row["name"]: row["demangled"] for row in rows}
    assert any(name.startswith("_ZN5Thing") for name in named)
    assert all(shown.startswith("Thing::") for name, shown in named.items() if "_ZN5Thing" in name)


def test_what_is_no_graph_is_refused(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    with pytest.raises(TokmillError, match="there is no such file"):
        read_graph(path)
    path.write_bytes(b"no parquet at all")
    with pytest.raises(TokmillError, match="the graph cannot be read"):
        read_graph(path)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), path)
    with pytest.raises(TokmillError, match="holds no graph"):
        read_graph(path)
    write_graph(graph, path)
    later = pyarrow.parquet.read_table(path)
    facts = json.loads(later.schema.metadata[KEY])
    for version in (2, 99):
        with_facts(later, json.dumps(facts | {"version": version}).encode(), path)
        with pytest.raises(TokmillError, match=f"a graph of version {version}"):
            read_graph(path)
    with_facts(later, b"{", path)
    with pytest.raises(TokmillError, match="the facts of the graph are damaged"):
        read_graph(path)
    assert read_about(path) is None


@pytest.mark.parametrize(
    ("facts", "what"),
    [({"bits": 99}, "99 bits"), ({"program": "a\0b"}, "a zero byte"), ({"bits": 0}, "0 bits")],
)
def test_facts_of_no_program_are_refused(
    graph: Graph, tmp_path: Path, facts: dict[str, object], what: str
) -> None:
    path = tmp_path / "x.parquet"
    write_graph(graph, path)
    table = pyarrow.parquet.read_table(path)
    said = json.loads(table.schema.metadata[KEY]) | facts
    with_facts(table, json.dumps(said).encode(), path)
    with pytest.raises(TokmillError, match=what):
        read_graph(path)


def test_blocks_behind_the_last_address_are_refused(graph: Graph, tmp_path: Path) -> None:
    far = dataclasses.replace(graph, block_address=np.full_like(graph.block_address, 2**64 - 1))
    write_graph(far, tmp_path / "x.parquet")
    with pytest.raises(TokmillError, match="after the last address"):
        read_graph(tmp_path / "x.parquet")


def test_functions_that_do_not_begin_at_their_entry_are_refused(tmp_path: Path) -> None:
    path, without = tmp_path / "x.parquet", Block(0x2010)
    write_graph(graph_of({0x2000: [Block(0x1000), without], 0x3000: [Block(0x3000)]}), path)
    assert len(read_graph(path).block_address) == 3, "a function without a block at its address"
    write_graph(graph_of({0x1: [Block(1)], 0x2000: [Block(0x1000), Block(0x2000)]}), path)
    with pytest.raises(TokmillError, match="function 0x2000 begins with another block"):
        read_graph(path)


def test_damage_to_the_data_is_seen(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_graph(graph, path)
    data = bytearray(path.read_bytes())
    for place in range(100, len(data) - 8, len(data) // 23):
        broken = bytearray(data)
        broken[place] ^= 0x55
        path.write_bytes(broken)
        try:
            found = read_graph(path)
        except TokmillError as error:
            assert error.where == str(path)
        else:
            # Where it hit what is not read, such as statistics.
            same(graph, found)
