"""CPI of intervals: the forms that are read, and what does not fit its trace."""

import json
from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.bbv.traces.cpi import Measures, check_measures, read_measures

CYCLES, INSTRUCTIONS = "board.processor.start.core.numCycles", "simInsts"
GEM5 = {
    CYCLES: [150, 400, 500, 600, 700, 800, 900, 1100],
    INSTRUCTIONS: [100, 200, 300, 400, 500, 600, 700, 800],
}
GEM5_CPI = [1.5, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]


def read_text(folder: Path, text: str) -> Measures:
    path = folder / "a"
    path.write_text(text)
    return read_measures(path)


@pytest.mark.parametrize(
    ("text", "kind", "cpi"),
    [
        ("interval,cpi\n0,1.5\n1,2.5\n", "given", [1.5, 2.5]),
        ("\ufeffCPI\n1.5\n\n# end\n2.5\n", "given", [1.5, 2.5]),
        ("1.5\n2.5\n", "given", [1.5, 2.5]),
        ("cpi_modelled,cpi_measured,more\n3,1.5,x\n3,,y\n", "measured", [1.5, np.nan]),
        ("[1.5, null]", "given", [1.5, np.nan]),
        ('[{"interval": 0, "cpi": 1.5}, {"interval": 1, "cpi": 2.5}]', "given", [1.5, 2.5]),
        ('{"cpi_modelled": [1.5, 2.5], "other": 3}', "modelled", [1.5, 2.5]),
        (json.dumps(GEM5), "simulated", GEM5_CPI),
        (
            json.dumps([{k: v[i] for k, v in GEM5.items()} for i in range(8)]),
            "simulated",
            GEM5_CPI,
        ),
        (
            json.dumps(
                [
                    {
                        "board": {"processor": {"start": {"core": {"numCycles": {"value": c}}}}},
                        "simInsts": {"value": i},
                    }
                    for c, i in zip(*GEM5.values(), strict=True)
                ]
            ),
            "simulated",
            GEM5_CPI,
        ),
    ],
)
def test_every_form_is_read(text: str, kind: str, cpi: list[float], tmp_path: Path) -> None:
    found = read_text(tmp_path, text)
    assert found.kind == kind
    np.testing.assert_array_equal(found.cpi[kind], cpi)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("interval,cpi\n0,1\n1\n", "row 2 has 1 values"),
        ("interval,cpi\n0,x\n", "'x', which is not a number"),
        ("interval,cpi\n0,1_5\n", "'1_5', which is not a number"),
        ("interval,cpi\n0,-1\n", "cpi is -1"),
        ("cpi\ninf\n", "cpi is inf"),
        ("cpi\n0\n", "cpi is 0"),
        ("cpi,cpi\n0,1\n", "duplicate"),
        ("interval,ipc\n0,1\n", "neither a CPI"),
        ("[" * 100_000, "nested"),
        ('{"cpi": [1, 2], "d1_misses": [1]}', "different lengths"),
        ('{"ipc": [1, 2]}', "none of"),
        ('{"cpi": "12"}', "none of"),
        ('[1, "x"]', "not a number"),
        ("[true]", "not a number"),
        ("[{}, 3]", "not objects"),
        (json.dumps(GEM5 | {INSTRUCTIONS: [100, 90, *range(3, 9)]}), "running total"),
        (json.dumps(GEM5 | {"simInsts": [100]}), "different lengths"),
        (json.dumps(GEM5 | {CYCLES: [1, None, 3]}), "value of .* is missing"),
        (
            json.dumps({CYCLES: [150, 400], INSTRUCTIONS: [100, 200]}),
            "running total, or of each of 2",
        ),
        (
            json.dumps(
                {CYCLES: [*range(1000, 1600, 50)], INSTRUCTIONS: [*range(1000, 13_000, 1000)]}
            ),
            "running total, or of each of 12",
        ),
        (
            json.dumps(
                {CYCLES: [n * n for n in range(9)], INSTRUCTIONS: [n * n for n in range(9)]}
            ),
            "running total, or of each of 9",
        ),
        ("[1" + "0" * 400 + "]", "cannot be read|inf"),
    ],
)
def test_what_is_no_measure(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match=what) as error:
        read_text(tmp_path, text)
    assert error.value.hint


def script_cpi(cycles: list[int], instructions: list[int]) -> list[float]:
    """CPI as SemanticBBV's `asm_bbv_cpi_dataset.py` computes it: cycles are those of a dump."""
    first = cycles[0] / instructions[0]
    return [first] + [
        cycles[i] / (instructions[i] - instructions[i - 1]) for i in range(1, len(cycles))
    ]


@pytest.mark.parametrize("cycles", [[150, 250, 100], [90], [150] * 9, [300, 200]])
def test_statistics_that_are_reset_at_each_dump(cycles: list[int], tmp_path: Path) -> None:
    instructions = [100 * i for i in range(1, len(cycles) + 1)]
    value = {CYCLES: cycles, INSTRUCTIONS: instructions}
    found = read_text(tmp_path, json.dumps(value)).cpi["simulated"]
    np.testing.assert_allclose(found, script_cpi(cycles, instructions))


SUMS = np.array([100, 110, 300, 120, 500])


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (range(4), "1 missing interval: 4 here and 5"),
        (range(6), "1 surplus interval"),
        ([0, 1, 3, 4, 5], "row 2 is interval 3 after interval 1"),
        ([2, 3, 4, 5, 6], "row 0 is interval 2"),
        ([1234567, 1234569], "row 0 is interval 1234567"),
        ([0, 1, 1, 2, 3], "row 2 is interval 1 after interval 1"),
    ],
)
def test_missing_and_surplus_intervals_are_counted(
    rows: list[int], what: str, tmp_path: Path
) -> None:
    found = read_text(tmp_path, "interval,cpi\n" + "".join(f"{i},1\n" for i in rows))
    with pytest.raises(TokmillError, match=what):
        check_measures(found, SUMS, "a", "b")


def test_shifted_intervals_are_counted(tmp_path: Path) -> None:
    def check(instructions: list[int]) -> None:
        rows = "".join(f"{i},1\n" for i in instructions)
        check_measures(read_text(tmp_path, f"instructions,cpi\n{rows}"), SUMS, "a", "b")

    check([100, 110, 301, 120, 500])
    with pytest.raises(TokmillError, match="5 intervals of 5") as shifted:
        check([7, 100, 110, 300, 120])
    assert "not shifted" in shifted.value.hint
    with pytest.raises(TokmillError, match="1 interval of 5.*interval 2: 400 here, 300"):
        check([100, 110, 400, 120, 500])
