"""Blocks that ran, joined with a store of blocks: every rule, and what cannot be joined."""

from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import TokmillError, UsageError
from tokmill.bbv.execution_source import merged
from tokmill.bbv.join import BEGINS, INSIDE, NO_BLOCK, NO_PROGRAM, join
from tokmill.bbv.store_blocks import Blocks, Program, open_blocks
from tokmill.bbv.traces.addresses import Addresses, Mapped, read_addresses, read_maps


def program(name: str, starts: list[int], first: int = 0, shared: int = -1) -> Program:
    at = np.array(starts, np.int64)
    return Program(
        name,
        at,
        np.arange(len(at)) + first,
        np.full(len(at), 2),
        np.arange(len(at)) == shared,
        np.zeros(len(at), bool),
    )


def addresses(at: list[int]) -> Addresses:
    return Addresses(np.arange(len(at)) + 1, np.array(at, np.uint64), {})


def blocks(*programs: Program) -> Blocks:
    return Blocks(None, list(programs))  # type: ignore[arg-type]


DRAWN = sorted({int(x) for x in np.random.default_rng(1).integers(0x1000, 0x9000, 400)})
OTHER = sorted({int(x) for x in np.random.default_rng(2).integers(0x1000, 0x9000, 300)})


def test_where_programs_lie_is_found() -> None:
    """Two programs in the same range of addresses of their files, each moved elsewhere."""
    at = [x + 0x108000 for x in DRAWN[::4]] + [x + 0x4846000 for x in OTHER[::3]]
    found = join(addresses(at), blocks(program("a", DRAWN), program("b", OTHER, 1000)))
    assert found.placed == [("a", 0x108000), ("b", 0x4846000)]
    wanted = [*range(0, len(DRAWN), 4), *range(1000, 1000 + len(OTHER), 3)]
    assert found.records.tolist() == wanted
    assert (found.how == BEGINS).all()


def test_each_rule() -> None:
    starts = [0x1000, 0x1010, 0x1020, 0x1100]
    base = 0x40000
    ran = [0x1000, 0x1010, 0x1020, 0x1100, 0x1013, 0x102F, 0x1090, 0x1100 + 30, 0x900000]
    here = [Mapped(base, 0, "a"), Mapped(0x800000, 0, "b")]
    found = join(addresses([x + base for x in ran]), blocks(program("a", starts, shared=1)), here)
    assert found.how.tolist() == [*[BEGINS] * 4, INSIDE, INSIDE, NO_BLOCK, NO_BLOCK, NO_PROGRAM]
    assert found.records.tolist() == [0, 1, 2, 3, 1, 2, -1, -1, -1]
    assert found.shared.tolist() == [False, True, False, False, True, *[False] * 4]


def test_a_program_that_did_not_run_is_not_found() -> None:
    at = [x + 0x108000 for x in DRAWN]
    found = join(addresses(at), blocks(program("a", DRAWN), program("b", OTHER, 1000)))
    assert [name for name, _ in found.placed] == ["a"]
    nothing = join(addresses(at), blocks(program("b", OTHER)))
    assert not nothing.placed and (nothing.how == NO_PROGRAM).all()
    assert join(addresses([1 << 63, (1 << 64) - 1]), blocks(program("a", DRAWN))).placed == []


def test_a_map_says_where_programs_lie() -> None:
    """Two blocks that ran are too few to find a program, and enough for a map."""
    low = DRAWN[:2]
    mapped = [Mapped(0x108000, 0, "/usr/bin/a"), Mapped(0x900000, 0, "/lib/c.so")]
    at = addresses([low[0] + 0x108000, low[1] + 0x108000, 0x900010])
    found = join(at, blocks(program("x/a", DRAWN), program("b", OTHER, 1000)), mapped)
    assert found.records.tolist() == [0, 1, -1]
    assert found.missing == ["/lib/c.so"]
    # One that is not moved lies where its file says.
    fixed = join(addresses([x + 0x400000 for x in low]),
                 blocks(program("a", [x + 0x400000 for x in DRAWN])),
                 [Mapped(0x401000, 0x500000, "a")])  # fmt: skip
    assert fixed.records.tolist() == [0, 1]
    assert fixed.placed[0][1] == 0


def test_of_programs_of_one_name_the_path_decides() -> None:
    low = DRAWN[:4]
    store = blocks(program("x/a.so", DRAWN), program("y/a.so", DRAWN, 1000))
    at = addresses([x + 0x108000 for x in low] + [x + 0x900000 for x in low])
    both = [Mapped(0x108000, 0, "/lib/y/a.so"), Mapped(0x900000, 0, "/lib/x/a.so")]
    assert join(at, store, both).records.tolist() == [1000, 1001, 1002, 1003, 0, 1, 2, 3]
    # If the path does not say which, it is neither.
    other = join(addresses([x + 0x108000 for x in low]), store, [Mapped(0x108000, 0, "/z/a.so")])
    assert other.records.tolist() == [-1] * 4
    assert other.missing == ["/z/a.so"]
    # The blocks that ran say it as well.
    store = blocks(program("x/a.so", OTHER), program("y/a.so", DRAWN, 1000))
    told = join(addresses([x + 0x108000 for x in low]), store, [Mapped(0x108000, 0, "/z/a.so")])
    assert told.records.tolist() == [1000, 1001, 1002, 1003]


def test_pc_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pc"
    path.write_text("# a\nF:3:1000:main\nF:1:0x2000:\nF:7:7fffffffff\nG:1\nF:1:2000:\n")
    found = read_addresses(path)
    assert found.ids.tolist() == [1, 3, 7]
    assert found.at.tolist() == [0x2000, 0x1000, 0x7FFFFFFFFF]
    assert found.functions == {3: "main"}
    assert found.find(np.array([3, 2, 9, 1])).tolist() == [1, -1, -1, 0]
    for text, what in [
        ("F:1:2000:\nF:1:2001:\n", "two addresses"),
        ("F:1:xyz:\n", "line 1: 'F:1:xyz:' is not a block"),
        ("F:1:11112222333344445:\n", "not a block"),
        ("", "names no block"),
    ]:
        path.write_text(text)
        with pytest.raises(TokmillError, match=what):
            read_addresses(path)


def test_maps(tmp_path: Path) -> None:
    path = tmp_path / "a.map"
    path.write_text(
        "555500-555600 r--p 00000000 08:01 42    /usr/bin/a b\n"
        "555600-555700 r-xp 00001000 08:01 42    /usr/bin/a b\n"
        "7ff000-7ff100 rw-p 00000000 00:00 0\n"
        "7ffd00-7ffe00 rw-p 00000000 00:00 0     [stack]\n"
        "400000-400100 r-xp 00000000 08:01 7     /lib/c.so (deleted)\n"
    )
    assert read_maps(path) == [
        (0x400000, 0x400100, "/lib/c.so"),
        (0x555500, 0x555700, "/usr/bin/a b"),
    ]
    path.write_text("# x\n\n1000 /usr/bin/a b\n0x2000\tc\n")
    assert read_maps(path) == [(0x1000, 0, "/usr/bin/a b"), (0x2000, 0, "c")]
    for text, what in [("gzip\n", "line 1: 'gzip' is not a line"), ("", "names no file")]:
        path.write_text(text)
        with pytest.raises(TokmillError, match=what):
            read_maps(path)


def test_a_record_stands_once_in_an_interval() -> None:
    rows, records = np.array([0, 0, 0, 2, 2]), np.array([5, 3, 5, 1, 5])
    offsets, record, count = merged(rows, records, np.array([1, 2, 3, 4, 5], np.uint64), 4)
    assert offsets.tolist() == [0, 2, 2, 4, 4]
    assert record.tolist() == [3, 5, 1, 5] and count.tolist() == [2, 4, 4, 5]
    empty = np.zeros(0, np.int64)
    assert merged(empty, empty, empty.astype(np.uint64), 2)[0].tolist() == [0, 0, 0]


def test_a_store_of_something_else_is_refused(tmp_path: Path) -> None:
    from making import quick_build
    from source_cases import write_graph, write_ids

    with pytest.raises(TokmillError, match="not a store of basic blocks"):
        open_blocks(str(write_ids(tmp_path, 0)))
    graph = write_graph(tmp_path, 0)
    quick_build("x86", graph, tmp_path / "functions")
    with pytest.raises(TokmillError, match="2 records hold 3 blocks"):
        open_blocks(str(tmp_path / "functions"))
    quick_build("x86", graph, tmp_path / "blocks", unit="block")
    found = open_blocks(str(tmp_path / "blocks"))
    assert [one.starts.tolist() for one in found.programs] == [[0x1000, 0x1004, 0x1100]]
    assert found.programs[0].instructions.tolist() == [2, 1, 2]
    with pytest.raises(UsageError, match="--blocks names 2") as error:
        quick_build("bbv", graph, tmp_path / "s", blocks=["a", "b"])
    assert "select a b -o ALL" in error.value.hint
