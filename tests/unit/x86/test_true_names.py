"""Names of stripped programs by the debug information that was kept of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import UsageError
from tokmill.x86.graphs.graph_files import read_graph
from tokmill.x86.graphs.lifting import lift_files
from tokmill.x86.graphs.true_names import names_of
from tokmill.x86.image.debug.debug_info import DebugInfo
from x86_programs import C_SOURCE, compiles, stripped, symbols


def test_a_stripped_program_gets_the_names_of_its_sources(tmp_path: Path) -> None:
    whole = compiles(tmp_path, "whole", C_SOURCE, "-O2", "-g")
    for folder, path in (("debug", whole), ("programs", stripped(whole))):
        (tmp_path / folder / "a").mkdir(parents=True)
        shutil.copy(path, tmp_path / folder / "a" / "tool")
    out, debug = tmp_path / "graphs", tmp_path / "debug"
    report = lift_files([str(tmp_path / "programs")], out, names=debug)
    assert report.made == 1 and not report.refusals
    graph = read_graph(out / "a" / "tool.parquet")
    there = dict(zip(graph.function_address.tolist(), graph.function_name, strict=True))
    at = {address: name for name, address in symbols(whole).items()}
    named = {address: name for address, name in there.items() if name}
    assert {"main", "dispatch"} <= set(named.values())
    for address, name in named.items():
        assert at[address].split(".")[0] == name.removesuffix(".clone")
    # What no source was compiled for has no name.
    assert "_start" not in named.values() and len(named) < len(there)
    # Kept while nothing changes; other debug information makes it again.
    assert lift_files([str(tmp_path / "programs")], out, names=debug).kept == 1
    assert lift_files([str(tmp_path / "programs")], out).renewed == 1
    # Of one program the file itself.
    one = tmp_path / "one.parquet"
    lift_files([str(tmp_path / "programs/a/tool")], one, names=whole)
    assert read_graph(one).function_name == graph.function_name


def test_what_names_nothing_is_refused(tmp_path: Path) -> None:
    whole = compiles(tmp_path, "whole", C_SOURCE, "-O1", "-g")
    bare = stripped(whole)
    other = compiles(
        tmp_path, "other",
        "".join(f"int f{i}(int x) {{ return x * {i}; }}\n" for i in range(40))
        + "int main(void) { return 0; }", "-O0", "-g",
    )  # fmt: skip
    for names, why in (
        (bare, "it has no debug information"),
        (other, "functions begin where the program has one"),
        (tmp_path / "empty", "there is no debug information of the program"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        report = lift_files([str(bare)], tmp_path / "g.parquet", names=names)
        assert why in report.refusals[0].refused and report.refusals[0].hint
    with pytest.raises(UsageError, match="no such file or folder"):
        lift_files([str(bare)], tmp_path / "g.parquet", names=tmp_path / "nothing")


def _info(
    functions: list[tuple[str, int, int, bool]], described: set[tuple[str, int]]
) -> DebugInfo:
    none = np.zeros(0, np.uint64)
    name, unit, entry, clone = zip(*functions, strict=True)
    return DebugInfo(
        ["p/a.c", "p/b.c"], list(name), np.array(unit, np.int32), np.array(entry, np.uint64),
        np.array(clone), none, none, none.astype(np.int64), described, {},
    )  # fmt: skip


def test_names_are_the_same_at_every_level() -> None:
    assert names_of(_info([
        ("f", 0, 16, False), ("f", 1, 32, False), ("g", -1, 48, False), ("h", 0, 64, False),
    ], set())) == {16: "f@a.c", 32: "f@b.c", 48: "g", 64: "h"}  # fmt: skip
    # One `f` was inlined; `g` is there beside a clone, `h` as a clone alone, `i` as two.
    assert names_of(_info([
        ("f", 1, 32, False), ("g", -1, 48, False), ("g", -1, 56, True), ("h", 0, 64, True),
        ("i", 0, 72, True), ("i", 0, 80, True),
    ], {("f", 0)})) == {
        32: "f@b.c", 48: "g", 56: "g.clone", 64: "h", 72: "i.clone", 80: "i.clone"
    }  # fmt: skip
    # One body for two functions.
    assert names_of(_info([("z", -1, 16, False), ("a", -1, 16, False)], set())) == {16: "a"}
