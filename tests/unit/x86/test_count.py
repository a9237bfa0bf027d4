"""Tokens of programs counted, and their different instructions."""

import csv
import pickle
from pathlib import Path
from typing import Any

import networkx
import pytest

from making import quick_build
from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.store.checks.stats import count
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import write_graph
from tokmill.x86.graphs.recorded_blocks import Recorded
from tokmill.x86.lift.cfg import lift
from tokmill.x86.tokens.instructions import collect, distinct
from tokmill.x86.tokens.vocabularies.count import count_graph, count_programs
from tokmill.x86.tokens.vocabularies.vocabulary import read_vocabularies
from x86_programs import C_SOURCE, compiles

LEAVE = bytes.fromhex("c9 c3")


@pytest.fixture(scope="session")
def program(built: Path) -> Path:
    return compiles(built, "counted", C_SOURCE, "-O1")


@pytest.fixture(scope="session")
def graph(program: Path) -> Graph:
    return lift(program)


@pytest.mark.parametrize("separator", [False, True])
def test_a_store_and_pickles_of_it_count_as_programs_do(
    tmp_path: Path, program: Path, separator: bool
) -> None:
    wanted = count_programs([str(program)], "tokmill").counts
    store = quick_build("x86", program, tmp_path / "s", separator=separator)
    ids = count(store).ids
    for column, tokens in read_vocabularies(store.path).items():
        if column in ("mne", "eflag"):
            # Programs count them once an instruction.
            continue
        pairs = zip(tokens.tokens, ids[column].tolist(), strict=False)
        counts = {token: number for token, number in pairs if number}
        assert counts.pop("[SEP]", 0) == separator * sum(wanted["mne"].values())
        assert counts == wanted[column]
    export = plugins.load(plugins.EXPORTS, "token-dicts")
    export(export.Config()).write(store, tmp_path / "t.pkl")
    dicts = quick_build("token-dicts", tmp_path / "t.pkl", tmp_path / "t", rules="tokmill")
    for column, tokens in read_vocabularies(dicts.path).items():
        counts = dict(zip(tokens.tokens, tokens.counts or [], strict=True))
        assert {token: n for token, n in counts.items() if n} == wanted[column]


def test_programs_graphs_and_pickles_count_alike(
    tmp_path: Path, program: Path, graph: Graph
) -> None:
    (tmp_path / "graphs").mkdir()
    write_graph(graph, tmp_path / "graphs/one.parquet")
    nodes: Any = networkx.DiGraph()
    nodes.add_node(0x1000, asm=["?"], raw=LEAVE)
    index = {"main": [[0x1000, ["?"], LEAVE, nodes, None]] * 2}
    (tmp_path / "graphs/saved_index.pkl").write_bytes(pickle.dumps(index))
    (tmp_path / "graphs/notes.txt").write_text("no program")
    here = count_programs([str(program)], "tokmill")
    assert (here.programs, here.left_out, here.refused) == (1, {}, {})
    found = count_programs([str(tmp_path / "graphs")], "tokmill", levels=["O0", "O3"])
    assert (found.programs, found.left_out) == (3, {"file that is no program": 1})
    assert found.instructions == here.instructions + 4
    # LEAVE stood nowhere else.
    assert found.counts["mne"]["LEAVE"] - here.counts["mne"].get("LEAVE", 0) == 2


def test_workers_change_nothing(program: Path) -> None:
    inputs = [str(program), str(compiles(program.parent, "counted3", C_SOURCE, "-O3"))]
    assert count_programs(inputs, "tokmill", workers=2) == count_programs(inputs, "tokmill")


def test_functions_that_are_no_code_to_the_rules_are_left_out() -> None:
    recorded = Recorded()
    recorded.add("good", 0x1000, [(0x1000, LEAVE, [])])
    recorded.add("bad", 0x2000, [(0x2000, LEAVE, [])])
    graph = recorded.graph("two")
    graph.code = graph.code.copy()
    graph.code[2] = 0x06
    number, counts = count_graph("tokmill", graph)
    assert number == 2 and set(counts["mne"]) == {"LEAVE", "RET"}


def test_nothing_to_count(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/text").write_text("no program")
    with pytest.raises(TokmillError, match="there is no program"):
        count_programs([str(tmp_path / "a")], "tokmill")
    with pytest.raises(TokmillError, match="no program was read"):
        count_programs([str(tmp_path / "a/text")], "tokmill")
    with pytest.raises(TokmillError, match="no such file"):
        count_programs([str(tmp_path / "b")], "tokmill")
    with pytest.raises(UsageError):
        count_programs([str(tmp_path / "a")], "tokmil")


def test_instructions_of_programs_as_a_file(tmp_path: Path, program: Path, graph: Graph) -> None:
    other = compiles(program.parent, "counted3", C_SOURCE, "-O3")
    inputs = [str(program), str(other)]
    out = tmp_path / "new/i.csv"
    done = collect(inputs, out)
    with out.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: int(row[name]) for name in ("bits", "count", "programs")}
    assert len(rows) == done.encodings and done.programs == 2
    assert sum(row["count"] for row in rows) == done.instructions
    keys = {key[: key[15]].hex() for key in distinct(graph)[1].tolist()}
    assert {row["bytes"] for row in rows} > keys
    assert {row["programs"] for row in rows} == {1, 2}
    assert [(-row["count"], bytes.fromhex(row["bytes"])) for row in rows] == sorted(
        (-row["count"], bytes.fromhex(row["bytes"])) for row in rows
    )
    by_bytes = {row["bytes"]: row for row in rows}
    assert by_bytes["c3"]["text"] == "ret" and by_bytes["c3"]["bits"] == 64
    assert by_bytes["c3"]["code"] == "RETNQ"
