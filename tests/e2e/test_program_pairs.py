"""`make pairs`: programs are compiled, stripped and paired; what is there is kept."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tokmill
from making import quick_build
from tokmill.x86.graphs.lifting import lift_files
from tokmill.x86.image.program import KeyTemplate
from x86_programs import compiler

SOURCE = """
#include <stdio.h>
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) printf("argument %d is %s\\n", i, argv[i]);
    return argc > 1 ? 0 : puts("usage: program ARGUMENT") < 0;
}
"""


@pytest.fixture(scope="module")
def script(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("program_pairs")


def test_a_tree_becomes_programs_and_pairs(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler("gcc")
    tree = tmp_path / "tree"
    tree.mkdir()
    for path in [*script.PROGRAMS[script.SMALL].files(tree), tree / "bzip2recover.c"]:
        path.write_text(SOURCE if path.stem in ("bzip2", "bzip2recover") else "")
    made = script.Made(tmp_path / "pairs")
    sources = script.Tree("bzip2", "1.0", tree)
    for name in ("gcc", "no-such-compiler"):
        script.build(sources, name, ("O0", "O2", "O3"), made)
    assert script.report(made) == 0
    assert made.left_out == ["bzip2-1.0 with no-such-compiler: there is no such compiler"]
    assert made.left_out[0] in capsys.readouterr().out
    names = [
        f"bzip2-1.0/gcc-{level}/{name}"
        for level in ("O0", "O2", "O3")
        for name in ("bzip2", "bzip2recover")
    ]
    assert made.programs() == names
    whole, bare = (made.folder / kind / names[0] for kind in ("debug", "programs"))
    assert b".debug_line" in whole.read_bytes() and b".symtab" not in bare.read_bytes()
    assert str(tmp_path).encode() not in whole.read_bytes()
    assert (made.folder / "sources/bzip2-1.0/bzip2.c").read_text() == SOURCE
    options = tomllib.loads((made.folder / "pairs.toml").read_text())["options"]
    pairs = options["pair"]
    assert len(pairs) == 6 and "bzip2-1.0/gcc-O0/bzip2:bzip2-1.0/gcc-O2/bzip2" in pairs
    facts = json.loads((made.folder / "built.json").read_text())
    assert facts["left_out"] == made.left_out and "gcc" in facts["compilers"]
    # The same again compiles nothing.
    before = bare.stat().st_mtime_ns
    script.build(sources, "gcc", ("O0", "O2", "O3"), made)
    assert bare.stat().st_mtime_ns == before
    lift_files([str(made.folder / "programs")], tmp_path / "graphs")
    store = quick_build("pairs", tmp_path / "graphs", tmp_path / "store", walks=1, **options)
    assert isinstance(store, tokmill.Store) and store.manifest.notes["pairs"] == 6
    first = store.record(0)
    assert (first["project"], first["version"], first["program"]) == ("bzip2", "1.0", "bzip2")
    assert first["compiler"] == "gcc" and first["level"] in ("O0+O2", "O0+O3", "O2+O3")


def test_pairs_are_of_one_program(script: Any) -> None:
    ways = ("gcc-O0", "gcc-O2", "gcc-O3", "clang-O2")
    programs = [f"findutils-4.{v}/{way}/{name}" for v in (9, 10) for way in ways
                for name in ("find", "xargs")]  # fmt: skip
    pairs = script.pairs_of(sorted(programs))
    assert len(pairs) == 2 * (2 * 4 + 1) == len(set(pairs))
    layout = KeyTemplate(script.LAYOUT)
    for first, second in pairs:
        one, other = layout.key(first), layout.key(second)
        assert one.program == other.program and one.project == other.project == "findutils"
        assert sum(a != b for a, b in zip(one, other, strict=True)) == 1
    # By the numbers of versions, not by their letters.
    assert ("findutils-4.9/gcc-O2/find", "findutils-4.10/gcc-O2/find") in pairs
