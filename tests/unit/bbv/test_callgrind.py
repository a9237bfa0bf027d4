"""Dumps of callgrind to block vectors, and the model of CPI."""

from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.bbv.traces.callgrind import Code, Dump, read_dump, vectors_of
from tokmill.bbv.traces.profile import modelled

DUMP = """# callgrind format
version: 1
creator: callgrind-3.19.0
part: 3
positions: instr
events: Ir Dr Bc Bi
summary: 34

ob=(1) /bin/a b
fl=(1) ???
fn=(1) main
0x1000 4 4
0x1003 4
0x1005 4 0 4
0x1007 2
cob=(2) /lib/c.so
cfn=(7) f
calls=2 0x10
0x1009 900
0x1009 2
0x100d 2

ob=(2)
fn=(7)
0x10 8
fn=(2) 0x0000000000000020
0x20 8

totals: 34
"""


def dump_of(folder: Path, text: str) -> tuple[Dump, Code]:
    path = folder / "dump"
    path.write_text(text)
    code = Code({}, set(), {})
    return read_dump(path, code), code


def test_a_dump_is_read(tmp_path: Path) -> None:
    dump, code = dump_of(tmp_path, DUMP)
    assert code.files == {"/bin/a b": 1, "/lib/c.so": 2}
    base, library = 1 << 36, 2 << 36
    assert dump.keys.tolist() == [
        *(base + at for at in (0x1000, 0x1003, 0x1005, 0x1007, 0x1009, 0x100D)),
        library + 0x10,
        library + 0x20,
    ]
    assert dump.counts.tolist() == [4, 4, 4, 2, 2, 2, 8, 8]
    assert dump.part == 3 and dump.totals == {"Ir": 34, "Dr": 0, "Bc": 0, "Bi": 0}
    # A branch and a call end a block.
    assert code.ends == {base + 0x1005, base + 0x1009}
    assert code.functions == {base + 0x1000: "main", library + 0x10: "f"}


def test_blocks_are_what_always_runs_together(tmp_path: Path) -> None:
    dump, code = dump_of(tmp_path, DUMP)
    other = Dump(4, dump.keys[:2], np.array([5, 6]), {"Ir": 11})
    vectors, addresses, mapped = vectors_of([dump, other], code)
    starts = [at & 0xFFFF for at in addresses.at.tolist()]
    assert starts == [0x1000, 0x1003, 0x1005, 0x1007, 0x100D, 0x10, 0x20]
    assert vectors.instructions.tolist() == [34, 11]
    assert vectors.counts.tolist() == [4, 4, 4, 4, 2, 8, 8, 5, 6]
    assert addresses.functions == {1: "main", 6: "f"}
    assert [(one.low >> 36, one.path) for one in mapped] == [(1, "/bin/a b"), (2, "/lib/c.so")]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("totals: 34", "totals: 35"), "34 instructions, it says 35"),
        (("totals: 34", ""), "does not end"),
        (("0x1003 4", "0x1003"), "cannot be read"),
        (("0x1003 4", "0xzz 4"), "cannot be read"),
        (("0x1003 4", "0x1003 99999999999999999999"), "cannot be read"),
        (("positions: instr", "positions: line"), "not addresses"),
    ],
)
def test_a_dump_that_is_none(change: tuple[str, str], what: str, tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match=what):
        dump_of(tmp_path, DUMP.replace(*change))


def test_the_usual_formula() -> None:
    row = {"Ir": 1000, "I1mr": 1, "D1mr": 2, "D1mw": 3, "ILmr": 1, "DLmr": 1, "DLmw": 0,
           "Bcm": 4, "Bim": 1}  # fmt: skip
    assert modelled([row]).tolist() == [(1000 + 60 + 200 + 50) / 1000]
    assert np.isnan(modelled([{"Ir": 0}])).all()
