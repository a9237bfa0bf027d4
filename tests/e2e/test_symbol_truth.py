"""The truth of the benchmark of lifters: what symbols say, how starts are scored against it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.x86.lift.cfg import lift
from x86_programs import C_SOURCE, compiles, stripped, symbols, true_functions

MINGW = "x86_64-w64-mingw32-gcc"
SPECIAL = r"""
static int plain(int x) { return x + 1; }
extern int alias(int) __attribute__((alias("first")));
int first(int x) { return plain(x) * 3; }
static int (*choose(void))(int) { return first; }
int chosen(int) __attribute__((ifunc("choose")));
int data_is_none = 3;
int main(int argc, char **argv) { return first(argc) + alias(argc) + chosen(argc); }
"""
PARTS = r"""
.globl whole, not_a_function
.type whole, @function
whole: ret
.size whole, .-whole
.type whole.cold, @function
whole.cold: nop; ret
.size whole.cold, .-whole.cold
.type whole.part.0, @function
whole.part.0: ret
.size whole.part.0, .-whole.part.0
not_a_function: ret
.type sizeless, @function
sizeless: nop; ret
"""
LOCAL_L = r"""
__attribute__((noinline)) static int Lost(int x) { return x * 7 + 1; }
__attribute__((noinline)) static int kept(int x) { return x * 5 + 2; }
int main(int argc, char **argv) { return Lost(argc) + kept(argc); }
"""


@pytest.fixture(scope="module")
def module(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("symbol_truth")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


def test_it_is_what_another_reader_of_symbols_says(built: Path, module: Any) -> None:
    path = compiles(built, "truth-O2", C_SOURCE, "-O2")
    functions, parts = true_functions(path)
    truth = module.read_truth(path)
    assert set(truth.start.tolist()) == functions
    assert set(truth.part_start.tolist()) == parts
    assert {"main", "dispatch", "_start"} <= set(truth.name)


def test_aliases_count_once_and_resolvers_are_functions(built: Path, module: Any) -> None:
    path = compiles(built, "truth-special", SPECIAL, "-O0")
    truth = module.read_truth(path)
    named = dict(zip(truth.name, truth.start.tolist(), strict=True))
    places = symbols(path)
    assert places["alias"] == places["first"] == named["alias"], "the first in the alphabet"
    assert "first" not in named
    assert places["chosen"] == places["choose"] == named["choose"], "an IFUNC is its resolver"
    assert "data_is_none" not in named
    assert (np.diff(truth.start.astype(np.int64)) > 0).all()


def test_parts_of_functions_are_neither_right_nor_wrong(built: Path, module: Any) -> None:
    path = compiles(
        built, "truth-parts.s", ".intel_syntax noprefix\n" + PARTS, "-shared", "-nostdlib"
    )
    truth, places = module.read_truth(path), symbols(path)
    assert truth.name == ["whole", "sizeless"]
    first = int(truth.start[0])
    assert first == lift(path).function_address[0]
    parts = [first + places[name] - places["whole"] for name in ("whole.cold", "whole.part.0")]
    assert truth.part_start.tolist() == parts
    label = first + places["not_a_function"] - places["whole"]
    found = np.asarray([first, first, parts[0], label], np.uint64)
    assert module.score(found, truth) == module.Score(right=1, wrong=1, lost=1)


def test_a_stripped_file_has_none(built: Path, module: Any) -> None:
    path = stripped(compiles(built, "truth-O2", C_SOURCE, "-O2"))
    with pytest.raises(TokmillError, match="no table of symbols") as caught:
        module.read_truth(path)
    assert "strip" in caught.value.hint


def test_pe(built: Path, module: Any) -> None:
    path = compiles(built, "truth.exe", LOCAL_L, "-O1", by=MINGW)
    truth, graph = module.read_truth(path), lift(path)
    named = dict(zip(truth.name, truth.start.tolist(), strict=True))
    assert {"main", "kept"} <= named.keys()
    assert "Lost" not in named, "the assembler has dropped it"
    starts = set(graph.function_address.tolist())
    assert named["main"] in starts
    before = max(one for one in starts if one < named["kept"])
    assert before in truth.part_start, "a range without a symbol"
    assert module.score(graph.function_address, truth).precision == 1
