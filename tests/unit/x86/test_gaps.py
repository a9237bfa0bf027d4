"""Where code begins behind padding."""

from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.lift.cfg import lift
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.decode import Instructions
from tokmill.x86.lift.findings import gaps, skip_padding
from tokmill.x86.lift.reach import Ways
from tokmill.x86.lift.starts import _plausible
from x86_programs import compiles, flat, symbols


@pytest.mark.parametrize(
    ("code", "begin"),
    [
        ("c3 cccccccccccccc 9090909090909090 90 55 c3", 16),
        ("c3 9090909090909090 90909090909090 90 55 c3", 16),
        # A multiple of 16 that only INT3 or zeros reach is none of it.
        ("c3 cccccccccccccccccccccccccccccccc 55 c3", 17),
        ("c3 cccccccccccccc 9090909090909090 55 c3", 16),
        ("c3 cccccccccccccc cccccccccccccccc 90 90 55 c3", 16),
        # Up to a multiple of 32.
        ("c3" + "90" * 31 + "55 c3", 32),
    ],
)
def test_a_function_may_begin_with_nop(code: str, begin: int) -> None:
    program = flat(bytes.fromhex(code))
    instructions = Instructions(Code(program))
    instructions.sweep()
    size = len(bytes.fromhex(code))
    assert skip_padding(instructions, np.asarray([1]), np.asarray([size])).tolist() == [begin]


def test_what_is_known_of_reached_code_stays_until_more_is_reached() -> None:
    instructions = Instructions(Code(flat(bytes.fromhex("c3 90c3 c3"))))
    instructions.sweep()
    none = np.zeros(0, np.int64)
    ways = Ways(instructions, none, (none, none))
    for row, begins, stays in ((0, [1], False), (0, [1], True), (1, [3], False), (2, [3], True)):
        ways.reach(np.asarray([row]))
        assert ("gaps" in ways.known) == stays, row
        assert gaps(ways)[0].tolist() == begins


def test_each_gap_is_plausible_by_itself_in_any_order() -> None:
    instructions = Instructions(Code(flat(bytes.fromhex("c3 55c3 55c3 0655"))))
    instructions.sweep()
    none = np.zeros(0, np.int64)
    ways = Ways(instructions, none, (none, none))
    found = _plausible(ways, np.asarray([3, 1, 5]), np.asarray([5, 3, 7]))
    assert found.tolist() == [True, True, False]


def test_such_a_function_is_found_where_it_begins() -> None:
    # ret; INT3; nop; push rbp; mov rbp, rsp; pop rbp; ret
    graph = lift(flat(bytes.fromhex("c3" + "cc" * 15 + "90 55 4889e5 5d c3")))
    assert graph.function_address.tolist() == [0x401000, 0x401010]


def test_nops_behind_a_symbol_belong_to_its_function(built: Path) -> None:
    source = "int g(int); int f(int x) { return g(x) + 1; } int g(int x) { return x * 3; }"
    flags = ("-O1", "-fno-inline", "-fpatchable-function-entry=16,14", "-shared", "-nostdlib")
    path = compiles(built, "patchable", source, *flags)
    at = symbols(path)
    assert at["f"] % 16 and lift(path).function_address.tolist() == sorted((at["f"], at["g"]))
