"""Graphs of many programs: what is found in folders, kept, made again, refused."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.base.files import write_file
from tokmill.x86.graph import Graph
from tokmill.x86.graphs import lifting
from tokmill.x86.graphs.graph_files import read_about, read_graph
from tokmill.x86.graphs.lifting import find_programs, lift_files
from x86_graphs import Block, graph_of
from x86_programs import C_SOURCE, assembled, compiles, pe_file


@pytest.fixture
def programs(built: Path, tmp_path: Path) -> Path:
    """A folder of programs and of other files."""
    folder = tmp_path / "programs"
    (folder / "sub").mkdir(parents=True)
    shutil.copy(compiles(built, "first", C_SOURCE, "-O1"), folder / "first")
    shutil.copy(assembled(built, "second", ".globl _start\n_start: ret\n"), folder / "sub/second")
    (folder / "third.exe").write_bytes(pe_file(b"\xc3"))
    (folder / "notes.txt").write_text("no program")
    (folder / "broken").write_bytes(b"\x7fELF" + bytes(9))
    os.link(folder / "first", folder / "zz-link")
    (folder / "also").symlink_to("first")
    return folder


def graphs(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.parquet"))}


def test_a_folder_gives_a_graph_a_program(programs: Path, tmp_path: Path) -> None:
    out = tmp_path / "graphs"
    report = lift_files([str(programs)], out)
    assert (report.programs, report.made, report.kept) == (4, 3, 0)
    assert sum(report.left_out.values()) == 3
    assert report.refused == {"the ELF header is cut off": 1}
    assert [one.program for one in report.refusals] == ["broken"]
    assert sorted(graphs(out)) == [
        "first.parquet", "sub/second.parquet", "third.exe.parquet"
    ]  # fmt: skip
    graph = read_graph(out / "sub/second.parquet")
    assert graph.program == "sub/second" and graph.function_name == ["_start"]
    assert report.blocks > 50 and report.instructions > report.blocks


def test_what_is_there_is_kept_and_what_changed_is_made_again(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "graphs"
    lift_files([str(programs)], out)
    before = graphs(out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    report = lift_files([str(programs)], out)
    assert (report.made, report.kept) == (0, 3)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == times
    assert report.blocks > 50, "what is kept counts"
    (programs / "third.exe").write_bytes(pe_file(b"\x90\xc3"))
    report = lift_files([str(programs)], out)
    assert (report.made, report.kept) == (1, 2)
    assert len(read_graph(out / "third.exe.parquet").lengths) == 2
    # Damage that leaves nothing to know a graph by is told; the hint says what to do.
    (out / "first.parquet").write_bytes(b"damaged")
    report = lift_files([str(programs)], out)
    assert report.made == 0 and (out / "first.parquet").read_bytes() == b"damaged"
    assert [one.hint for one in report.refusals if one.program == "first"] == [
        "remove it if it is a damaged graph, or choose another folder"
    ]
    (out / "first.parquet").unlink()
    assert lift_files([str(programs)], out).made == 1
    assert graphs(out)["first.parquet"] == before["first.parquet"]
    # Another lifter, or another version of it, finds something else.
    monkeypatch.setattr("tokmill.x86.lift.cfg.VERSION", 99)
    assert lift_files([str(programs)], out).made == 3
    about = read_about(out / "first.parquet")
    assert about is not None and about.lifter.startswith("native 99, iced-x86 ")


def test_a_graph_file_of_another_version_is_made_again(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "graphs"
    report = lift_files([str(programs)], out)
    assert report.made == 3
    # A later tokmill.
    monkeypatch.setattr("tokmill.x86.graphs.graph_files.VERSION", 99)
    report = lift_files([str(programs)], out)
    assert (report.made, report.kept) == (3, 0)


def test_a_lifter_whose_functions_begin_elsewhere_is_refused(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = graph_of({0x2000: [Block(0x1000), Block(0x2000)]})
    monkeypatch.setitem(plugins.LIFTERS, "old", plugins.LIFTERS["native"])
    monkeypatch.setattr(plugins, "load", lambda *_: lambda _: old)
    report = lift_files([str(programs / "first")], tmp_path / "out", lifter="old")
    assert report.refused == {
        "lifter old made a wrong graph: function 0x2000 begins with another block": 1
    }
    assert "update its package" in report.refusals[0].hint and not graphs(tmp_path / "out")


def test_processes_make_the_same_bytes(programs: Path, tmp_path: Path) -> None:
    lift_files([str(programs)], tmp_path / "one", workers=0)
    lift_files([str(programs)], tmp_path / "two", workers=2)
    assert graphs(tmp_path / "one") == graphs(tmp_path / "two") != {}


def test_one_program_to_one_file(programs: Path, tmp_path: Path) -> None:
    assert lift_files([str(programs / "first")], tmp_path / "x.parquet").made == 1
    assert read_graph(tmp_path / "x.parquet").program == "first"
    assert lift_files([str(programs / "first")], tmp_path / "x.parquet").kept == 1
    # The same bytes under another name are another program.
    (tmp_path / "again").write_bytes((programs / "first").read_bytes())
    assert lift_files([str(tmp_path / "again")], tmp_path / "x.parquet").made == 1
    assert read_graph(tmp_path / "x.parquet").program == "again"
    with pytest.raises(UsageError, match="is one file, and there are"):
        lift_files([str(programs)], tmp_path / "x.parquet")


def test_a_file_that_is_no_graph_is_not_replaced(programs: Path, tmp_path: Path) -> None:
    mine = tmp_path / "graphs/first.parquet"
    mine.parent.mkdir()
    mine.write_text("mine\n")
    (mine.parent / "thesis.tmp-1.doc").write_text("mine")
    report = lift_files([str(programs)], mine.parent)
    assert mine.read_text() == "mine\n" and (mine.parent / "thesis.tmp-1.doc").exists()
    assert report.made == 2 and "first" in [one.program for one in report.refusals]
    # A file that is named is what the user said.
    assert lift_files([str(programs / "first")], mine).made == 1


def test_several_writers_of_a_folder(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `make -j` starts them: while one graph is half written, another process makes others."""
    out = tmp_path / "graphs"
    whole = lifting.write_graph

    def while_others_write(graph: Graph, path: Path, *more: Any) -> Any:
        monkeypatch.setattr(lifting, "write_graph", whole)

        def chunks() -> Iterator[bytes]:
            yield b"half"
            assert lift_files([str(programs)], out).made == 3
            assert lift_files([str(programs / "first")], out / "one.parquet").made == 1
            yield b"whole"

        write_file(out / "slow", chunks())
        return whole(graph, path, *more)

    monkeypatch.setattr(lifting, "write_graph", while_others_write)
    assert lift_files([str(programs / "first")], out / "mine.parquet").made == 1
    assert (out / "slow").read_bytes() == b"halfwhole"
    assert {"mine.parquet", "one.parquet", "slow"} <= {path.name for path in out.iterdir()}
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]


def test_a_file_that_is_named_is_taken_whatever_it_is(programs: Path) -> None:
    files, left_out = find_programs([str(programs / "notes.txt"), str(programs / "first")])
    assert [file.name for file in files] == ["first", "notes.txt"] and not left_out
    files, left_out = find_programs([str(programs)])
    assert [file.name for file in files] == ["broken", "first", "sub/second", "third.exe"]
    assert sum(left_out.values()) == 3
