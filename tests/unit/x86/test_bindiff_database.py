"""A diff as BinDiff's database, read back with python-bindiff; BinDiff itself is not needed."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from bindiff.file import BindiffFile
from binexport import ProgramBinExport

from tokmill.x86.diff.output.bindiff_database import BLOCKS, FUNCTIONS, LONG, write_bindiff
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.diff.result import Diff, Reason
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.lift.cfg import lift
from x86_graphs import Block, graph_of
from x86_programs import C_SOURCE, compiles

CREATED = datetime(2026, 11, 22, 12, 30, 5)
NOP, RET, INC, CALL = b"\x90", b"\xc3", b"\xff\xc0", b"\xe8\x00\x00\x00\x00"


def columns(**changed: object) -> Diff:
    """Return a diff without anything, but for some columns."""
    none, shares = np.zeros(0, np.int64), np.zeros(0, np.float32)
    empty = dict.fromkeys(Diff.__dataclass_fields__, none)
    empty |= dict.fromkeys(("similarity", "confidence", "block_similarity"), shares)
    empty |= {"left_out": {}, "match_blocks": np.zeros(1, np.int64)}
    return Diff(**{**empty, **changed})


def opened(path: Path) -> BindiffFile:
    found = BindiffFile(path)
    found.db.close()
    return found


def test_what_changed_is_in_the_database(built: Path, tmp_path: Path) -> None:
    graphs = [
        lift(compiles(built, f"bd{level}", C_SOURCE, level), facts=True) for level in ("-O1", "-O2")
    ]
    diff = diff_graphs(*graphs)
    path = tmp_path / "result.BinDiff"
    exports = write_bindiff(path, *graphs, diff, ("11" * 32, "22" * 32), CREATED)
    assert [export.name for export in exports] == ["bd-O1.BinExport", "bd-O2.BinExport"]
    found = opened(path)
    assert found.created == found.modified == CREATED
    assert 0 < found.similarity < 1 and 0 < found.confidence <= 1
    first = found.primary_file
    assert (first.filename, first.exefilename, first.hash) == ("bd-O1", "bd-O1", "11" * 32)
    assert first.functions == len(graphs[0].function_address)
    assert first.basicblocks == len(graphs[0].block_address)
    assert first.instructions == len(graphs[0].lengths)
    assert found.unmatched_primary_count == len(diff.deleted)
    matches = found.function_matches
    wanted = zip(diff.function_a.tolist(), diff.function_b.tolist(), strict=True)
    assert {(one.address1, one.address2) for one in matches} == {
        (int(graphs[0].function_address[a]), int(graphs[1].function_address[b])) for a, b in wanted
    }
    assert any(one.name1 == one.name2 == "main" for one in matches)
    assert [one.similarity for one in matches] == pytest.approx(diff.similarity.tolist())
    assert len(found.basicblock_matches) == len(diff.block_a)
    # What it names is in the two exports, which viewers read.
    sides = [ProgramBinExport(export) for export in exports]
    for one in found.basicblock_matches:
        match = one.function_match
        assert one.address1 in sides[0][match.address1].blocks
        assert one.address2 in sides[1][match.address2].blocks
    known = [
        {at for f in side.values() for b in f.blocks.values() for at in b.instructions}
        for side in sides
    ]
    assert found.primary_instruction_match.keys() <= known[0]
    assert found.secondary_instruction_match.keys() <= known[1]
    assert len(found.primary_instruction_match) > len(diff.block_a)


def test_a_program_against_itself(built: Path, tmp_path: Path) -> None:
    graph = lift(compiles(built, "bd-O1", C_SOURCE, "-O1"), facts=True)
    path = tmp_path / "same.BinDiff"
    diff = diff_graphs(graph, graph)
    exports = write_bindiff(path, graph, graph, diff, created=CREATED)
    assert [export.name for export in exports] == ["bd-O1-a.BinExport", "bd-O1-b.BinExport"]
    found = opened(path)
    assert found.similarity == 1 and found.unmatched_primary_count == 0
    pairs = found.primary_instruction_match.items()
    assert all(set(partners.values()) == {address} for address, partners in pairs)
    assert found.primary_instruction_match == found.secondary_instruction_match
    again = tmp_path / "again.BinDiff"
    write_bindiff(again, graph, graph, diff, created=CREATED)
    assert again.read_bytes() == path.read_bytes()


def pair() -> tuple[Graph, Graph]:
    """Two functions, the second with an instruction more and a block more."""
    one = graph_of({0x10: [
        Block(0x10, [NOP, INC], [(Edge.FALL, 0x13)]), Block(0x13, [RET], [(Edge.RETURN, 0)]),
    ]}, ["f"])  # fmt: skip
    high = 0xFFFF_FFFF_8000_0000
    two = graph_of({high: [
        Block(high, [INC, NOP, INC], [(Edge.FALL, high + 5)]),
        Block(high + 5, [RET], [(Edge.RETURN, 0)]), Block(high + 6, [RET], [(Edge.RETURN, 0)]),
    ]}, ["g"], "other")  # fmt: skip
    return one, two


def test_rows_by_hand(tmp_path: Path) -> None:
    one, two = pair()
    diff = columns(
        function_a=np.array([0]), function_b=np.array([0]),
        reason=np.array([Reason.CALLS], np.uint8), similarity=np.array([0.5], np.float32),
        confidence=np.array([0.75], np.float32),
        match_blocks=np.array([0, 2]), block_a=np.array([0, 1]), block_b=np.array([0, 1]),
        block_similarity=np.array([0.5, 1], np.float32), inserted_blocks=np.array([2]),
        block_reason=np.array([Reason.FLOW, Reason.CODE], np.uint8),
    )  # fmt: skip
    path = tmp_path / "hand.BinDiff"
    write_bindiff(path, one, two, diff)
    found = BindiffFile(path)
    (row,) = found.db.execute("SELECT * FROM function").fetchall()
    high = -0x8000_0000
    assert row == (1, 0x10, "f", high, "g", 0.5, 0.75, 3, FUNCTIONS[Reason.CALLS], 0, 0, 2, 1, 3)
    assert found.db.execute("SELECT * FROM basicblock").fetchall() == [
        (1, 1, 0x10, high, BLOCKS[Reason.FLOW], 0), (2, 1, 0x13, high + 5, BLOCKS[Reason.CODE], 0)
    ]  # fmt: skip
    assert found.db.execute("SELECT * FROM instruction").fetchall() == [
        (1, 0x10, high + 2), (1, 0x11, high + 3), (2, 0x13, high + 5)
    ]  # fmt: skip
    assert found.db.execute("SELECT similarity, confidence FROM metadata").fetchall() == [
        (0.5, 0.75)
    ]
    ways = dict(found.db.execute("SELECT id, name FROM functionalgorithm").fetchall())
    assert ways[FUNCTIONS[Reason.CALLS]] == "calls" and len(ways) == len(Reason)
    assert found.function_matches[0].address2 == 0xFFFF_FFFF_8000_0000
    found.db.close()


def test_long_changed_blocks_are_matched_at_both_ends(tmp_path: Path) -> None:
    body = [INC if i % 3 else NOP for i in range(LONG + 9)]
    one = graph_of({0x10: [Block(0x10, [*body[:100], *body[110:], RET])]})
    two = graph_of({0x10: [Block(0x10, [*body[:100], RET, *body[110:], RET])]})
    diff = columns(
        function_a=np.array([0]), function_b=np.array([0]), reason=np.zeros(1, np.uint8),
        similarity=np.array([0.9]), confidence=np.array([1.0]), match_blocks=np.array([0, 1]),
        block_a=np.array([0]), block_b=np.array([0]), block_similarity=np.array([0.9]),
        block_reason=np.zeros(1, np.uint8),
    )  # fmt: skip
    write_bindiff(tmp_path / "long.BinDiff", one, two, diff)
    found = BindiffFile(tmp_path / "long.BinDiff")
    (count,) = found.db.execute("SELECT count(*) FROM instruction").fetchone()
    assert count == len(body) - 10 + 1, "all but the one that was put in"
    found.db.close()


def test_nothing_matched(tmp_path: Path) -> None:
    one, two = pair()
    write_bindiff(
        tmp_path / "none.BinDiff", one, two, columns(deleted=np.array([0]), inserted=np.array([0]))
    )
    found = opened(tmp_path / "none.BinDiff")
    assert found.function_matches == [] and found.similarity == 0
    assert found.unmatched_primary_count == found.unmatched_secondary_count == 1


def test_numbers_are_those_that_readers_know() -> None:
    from bindiff.types import BasicBlockAlgorithm, FunctionAlgorithm

    for known, kind in ((FUNCTIONS, FunctionAlgorithm), (BLOCKS, BasicBlockAlgorithm)):
        assert set(known) == set(Reason)
        assert len(set(known.values())) == len(known)
        assert {kind(number) for number in known.values()}
