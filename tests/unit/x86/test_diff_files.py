"""A diff as a file: what it says, read back, refused where it is none."""

from pathlib import Path

import msgspec
import numpy as np

from tokmill.x86.diff.output.diff_json import BlockMatch, DiffFile, diff_file, write_diff
from tokmill.x86.diff.result import Diff, Reason
from tokmill.x86.graph import Graph
from x86_graphs import Block, graph_of


def two_graphs() -> tuple[Graph, Graph]:
    """Two functions of two blocks and one, of which the second program has the second moved."""
    first, second = [Block(0x10), Block(0x11)], [Block(0x20)]
    old = graph_of({0x10: first, 0x20: second}, ["main", ""], "old")
    new = graph_of({0x10: [Block(0x10)], 0x30: [Block(0x30)]}, ["main", "added"], "new")
    return old, new


def small_diff() -> Diff:
    return Diff(
        function_a=np.array([0]),
        function_b=np.array([0]),
        similarity=np.array([0.99999], np.float32),
        confidence=np.array([0.5], np.float32),
        reason=np.array([Reason.STRINGS], np.uint8),
        match_blocks=np.array([0, 1]),
        block_a=np.array([0]),
        block_b=np.array([0]),
        block_similarity=np.array([1], np.float32),
        block_reason=np.array([Reason.CODE], np.uint8),
        deleted=np.array([1]),
        inserted=np.array([1]),
        deleted_blocks=np.array([1]),
        inserted_blocks=np.zeros(0, np.int64),
        left_out={"blocks of functions that are not matched": 2},
    )


def test_a_diff_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    found = diff_file(*two_graphs(), small_diff(), ("a" * 64, ""))
    write_diff(tmp_path / "diff.json", found)
    assert msgspec.json.decode((tmp_path / "diff.json").read_bytes(), type=DiffFile) == found
    assert (found.format, found.version) == ("tokmill.diff", 2)
    assert (found.a.program, found.b.program, found.a.digest) == ("old", "new", "a" * 64)
    (match,) = found.matched
    assert (match.a, match.b, match.name_a, match.reason) == (0x10, 0x10, "main", "strings")
    assert match.blocks == [BlockMatch(0x10, 0x10, 1.0, "code")] and match.deleted == [0x11]
    # What changed a little is not shown as the same.
    assert match.similarity == 0.9999
    assert [one.address for one in found.deleted] == [0x20]
    assert [(one.name, one.instructions) for one in found.inserted] == [("added", 1)]
