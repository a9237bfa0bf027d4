"""Pairs of programs to records: whose tokens they are, where they begin, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from making import here, quick_build
from pair_graphs import small_program, with_facts, write_small
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.report.describe.shown_records import Reader
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.graphs.graph_files import write_graph
from tokmill.x86.pairs import NO_FACTS, PairsSource
from tokmill.x86.tokens.rules import COLUMNS
from x86_graphs import Block, graph_of

NOP, CLC = b"\x90", b"\xf8"


def build(out: Path, *inputs: Path, **options: Any) -> Store:
    return quick_build("pairs", inputs, out, **options)


def of_one_instruction(name: str, at: int, code: bytes, bits: int = 64) -> Graph:
    """Return a program of two blocks of one instruction, of which both call the import `exit`."""
    blocks = [
        Block(at, [code] * 3, [(Edge.CALL, 0x10), (Edge.FALL, at + 3)]),
        Block(at + 3, [code] * 2, [(Edge.CALL, 0x10), (Edge.FALL, at)]),
    ]
    graph = with_facts(graph_of({at: blocks}, program=name), {0x10: "next"})
    graph.bits = bits
    return graph


def written(folder: Path, *graphs: Graph) -> list[Path]:
    """Write graphs into files called as their programs."""
    folder.mkdir(exist_ok=True)
    paths = []
    for graph in graphs:
        paths.append(folder / f"{graph.program.replace('/', '_')}.parquet")
        write_graph(graph, paths[-1])
    return paths


def test_side_says_whose_a_token_is(tmp_path: Path) -> None:
    files = written(tmp_path / "g", *(of_one_instruction(n, a, c) for n, a, c in
                                      (("a", 0x100, NOP), ("b", 0x200, CLC))))  # fmt: skip
    store = build(tmp_path / "s", *files, all_pairs=True, walks=50, walk_tokens=64)
    assert not validate(store).problems
    asm = Reader(store).lists["asm"]
    both = 0
    for number in range(store.records):
        record = store.record(number)
        tokens = [asm[i] for i in record["asm"].tolist()]
        assert [{"NOP": 0, "CLC": 1}[token] for token in tokens] == record["side"].tolist()
        assert record["address"] >> 8 == 1 + record["side"][0]
        both += len({*record["side"].tolist()}) == 2
        assert len(tokens) == 64
    notes = store.manifest.notes
    assert 0 < both == notes["walks that cross from one program to the other"] <= store.records
    assert store.records == 4 * 50 and notes["imports of both programs"] == 1
    assert notes["blocks walked"] == notes["blocks"] == 4


def test_a_walk_is_whole_blocks_along_the_ways(tmp_path: Path) -> None:
    files = written(tmp_path / "g", small_program("a", 0x1000, 1), small_program("b", 0x2000, 2))
    store = build(tmp_path / "s", *files, all_pairs=True, walks=20, walk_blocks=3)
    asm = Reader(store).lists["asm"]
    blocks = {("NOP", "ADD"), ("ADD",), ("RET",), ("PUSH", "RET")}
    known = {token for block in blocks for token in block}
    for number in range(store.records):
        record = store.record(number)
        begins = np.flatnonzero(record["border"] == 3).tolist()
        names = [asm[i] for i in record["asm"].tolist()]
        pieces = [
            tuple(name for name in names[first:last] if name in known)
            for first, last in zip(begins, [*begins[1:], None], strict=True)
        ]
        assert 1 <= len(pieces) <= 3 and {*pieces} <= blocks
    assert store.manifest.notes["blocks walked"] == 8


def test_what_a_record_says(tmp_path: Path) -> None:
    files = [write_small(tmp_path, number) for number in (0, 2)]
    store = build(tmp_path / "s", *files, pair=("O2/tool:O0/tool",), layout="{level}/{program}")
    record = store.record(0)
    told = {name: record[name] for name in ("first", "second", "program", "level", "compiler")}
    assert told == {
        "first": "O2/tool", "second": "O0/tool", "program": "tool", "level": "O2+O0",
        "compiler": "unknown",
    }  # fmt: skip
    functions = {(r["side"][0], r["function"], r["walk"]) for r in map(store.record, range(16))}
    assert len(functions) == store.records == 16
    assert {name for _, name, _ in functions} == {"main", "sub_3100", "sub_1100"}
    assert [record["side"][0] for record in map(store.record, range(16))] == [0] * 8 + [1] * 8
    origins = [record["origin"] for record in map(store.record, range(16))]
    assert origins == ["O2/tool"] * 8 + ["O0/tool"] * 8


def test_one_stream_alone(tmp_path: Path) -> None:
    files = [write_small(tmp_path, number) for number in (0, 1)]
    every = build(tmp_path / "six", *files, all_pairs=True)
    alone = build(tmp_path / "one", *files, all_pairs=True, streams=["asm"])
    assert [*alone.schema][:3] == ["asm", "side", "border"] and [*alone.vocabularies] == ["asm"]
    assert [*every.schema][:6] == [*COLUMNS]
    assert {"pad", "mask", "cls", "sep", "unk"} <= alone.vocabularies["asm"].roles.keys()
    for number in range(every.records):
        for name in ("asm", "side", "border"):
            assert np.array_equal(every.record(number)[name], alone.record(number)[name])


def test_walks_depend_on_their_pair_alone(tmp_path: Path) -> None:
    files = [write_small(tmp_path, number) for number in range(3)]
    every = build(tmp_path / "every", *files, all_pairs=True)
    one = build(tmp_path / "one", *files, pair=["O0/tool:O2/tool"])
    chosen = [i for i in range(every.records) if every.record(i)["second"] == "O2/tool"
              and every.record(i)["first"] == "O0/tool"]  # fmt: skip
    assert len(chosen) == one.records
    for number, place in enumerate(chosen):
        assert np.array_equal(one.record(number)["asm"], every.record(place)["asm"])
    other = build(tmp_path / "other", *files, pair=["O0/tool:O2/tool"], seed=1)
    assert any(
        not np.array_equal(one.record(i)["asm"], other.record(i)["asm"]) for i in range(one.records)
    )


def test_programs_of_64_and_32_bits(tmp_path: Path) -> None:
    wide, narrow = of_one_instruction("a", 0x100, NOP), of_one_instruction("b", 0x200, NOP, 32)
    store = build(tmp_path / "s", *written(tmp_path / "g", wide, narrow), all_pairs=True)
    assert not validate(store).problems and store.manifest.rejected == {}
    assert store.manifest.notes["walks that cross from one program to the other"] > 0


def test_instructions_that_are_none_to_the_rules_cost_their_function(tmp_path: Path) -> None:
    good, bad = small_program("a", 0x1000, 1), small_program("b", 0x2000, 2)
    bad.code = bad.code.copy()
    bad.code[-2] = 0x06
    store = build(tmp_path / "s", *written(tmp_path / "g", good, bad), all_pairs=True)
    assert store.records == 2 * (4 + 3) and sum(store.manifest.rejected.values()) == 1
    assert not validate(store).problems


def test_a_graph_without_facts_is_a_reject(tmp_path: Path) -> None:
    good = small_program("good", 0x1000, 1)
    old = graph_of({0: [Block(0)]}, program="old")
    files = written(tmp_path / "g", good, old)
    with pytest.raises(TokmillError) as error:
        build(tmp_path / "s", *files, all_pairs=True)
    assert NO_FACTS in str(error.value) and "tokmill cfg" in error.value.hint


def test_a_changed_second_file_is_seen(tmp_path: Path) -> None:
    files = [write_small(tmp_path, number) for number in (0, 1)]
    build(tmp_path / "s", *files, all_pairs=True)
    changed = small_program("O1/tool", 0x2000, 5)
    write_graph(changed, files[1])
    with pytest.raises(TokmillError, match="changed: 0.cfg.parquet <> 1.cfg.parquet"):
        build(tmp_path / "s", *files, all_pairs=True)
    again = build(tmp_path / "s", *files, all_pairs=True, how=_yes())
    fresh = build(tmp_path / "fresh", *files, all_pairs=True)
    assert again.fingerprint == fresh.fingerprint


def _yes() -> How:
    return How(quiet=True, yes=True, amount=here())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "which programs are pairs"),
        ({"all_pairs": True, "pair": ["a:b"]}, "makes all pairs"),
        ({"pair": ["O0/tool"]}, "does not name two programs"),
        ({"pair": ["O0/tool:nothing"]}, "nothing"),
        ({"all_pairs": True, "streams": ["as"]}, "no stream"),
        ({"all_pairs": True, "walks": 0}, "walks: expected `int` >= 1"),
        ({"all_pairs": True, "walks": 10**23}, "walks: a whole number of 77 bits"),
        ({"all_pairs": True, "walk_blocks": 10**23}, "walk_blocks: a whole number of 77 bits"),
        ({"all_pairs": True, "walk_tokens": 3}, "walk_tokens: expected `int` >= 16"),
        ({"all_pairs": True, "min_tokens": 0}, "min_tokens: expected `int` >= 1"),
        ({"all_pairs": True, "rules": "none"}, "no rules"),
        ({"all_pairs": True, "layout": "{project}/x/{program}"}, "no path fits"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    files = [write_small(tmp_path, number) for number in range(2)]
    with pytest.raises(UsageError, match=what) as error:
        build(tmp_path / "s", *files, **options)
    assert error.value.hint


def test_inputs_that_are_no_graphs(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(TokmillError, match="not a graph of a program") as error:
        build(tmp_path / "s", program, all_pairs=True)
    assert f"tokmill cfg {program}" in error.value.hint
    (tmp_path / "folder").mkdir()
    shutil.copy(program, tmp_path / "folder")
    with pytest.raises(TokmillError, match="holds no .parquet file") as error:
        build(tmp_path / "s", tmp_path / "folder", all_pairs=True)
    assert "tokmill cfg FOLDER -o GRAPHS" in error.value.hint and "text" not in error.value.hint
    table = pyarrow.table({"text": ["no graph"]})
    pyarrow.parquet.write_table(table, tmp_path / "folder" / "x.parquet")
    with pytest.raises(TokmillError, match="no graphs"):
        build(tmp_path / "s", tmp_path / "folder", all_pairs=True)
    with pytest.raises(UsageError, match="there is only one program"):
        build(tmp_path / "s", write_small(tmp_path, 0), all_pairs=True)
    twice = written(tmp_path / "a", small_program("x", 0, 1))
    twice += written(tmp_path / "b", small_program("x", 0, 1))
    with pytest.raises(UsageError, match="several graphs are called 'x'"):
        build(tmp_path / "s", *twice, pair=["x:x"])


def test_a_damaged_graph_of_a_folder_is_an_error(tmp_path: Path) -> None:
    """Nobody knows of which program it is, so the pairs would be others in silence."""
    whole = [Path(write_small(tmp_path, number)) for number in (0, 1, 2)]
    data = whole[2].read_bytes()
    for damaged in (data[:-100], b"", b"PAR1"):
        whole[2].write_bytes(damaged)
        with pytest.raises(TokmillError, match="the graph cannot be read") as error:
            build(tmp_path / "s", tmp_path, all_pairs=True)
        assert error.value.where == str(whole[2]) and error.value.hint
    options: dict[str, Any] = {"all_pairs": True, "glob": [f"!{whole[2].name}"]}
    assert build(tmp_path / "s", tmp_path, **options).records


def test_a_large_pair_is_cut_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_small(tmp_path, number) for number in (0, 1)]
    options: dict[str, Any] = {"all_pairs": True, "walks": 60, "walk_tokens": 64}
    whole = build(tmp_path / "whole", *files, **options)
    monkeypatch.setattr("tokmill.x86.walks.AT_ONCE", 64 * 50)
    monkeypatch.setattr(PairsSource, "part_bytes", 900)
    parts = build(tmp_path / "parts", *files, **options)
    assert len(parts.shards) > 4 and not validate(parts).problems
    assert parts.records == whole.records and parts.manifest.notes == whole.manifest.notes
    for number in range(whole.records):
        for name in ("asm", "side", "border"):
            assert np.array_equal(parts.record(number)[name], whole.record(number)[name])
    # What goes on makes the parts that are missing, and none that is there.
    made = {path.name: path.read_bytes() for path in (tmp_path / "parts" / "shards").iterdir()}
    for path in sorted((tmp_path / "parts" / "shards").iterdir())[6:]:
        path.unlink()
    build(tmp_path / "parts", *files, **options)
    again = {path.name: path.read_bytes() for path in (tmp_path / "parts" / "shards").iterdir()}
    assert again == made
