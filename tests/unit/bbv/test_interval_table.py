"""Tables of intervals are read with care."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.bbv.traces import cpi


def table(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_text(text)
    return path


def test_tables_by_order_and_by_interval(tmp_path: Path) -> None:
    plain = cpi.read_table(table(tmp_path, "l1, l2\r\n1,2\r\n3,4\r\n"), 2)
    assert {name: column.tolist() for name, column in plain.items()} == {
        "l1": [1, 3], "l2": [2, 4],
    }  # fmt: skip
    mixed = cpi.read_table(table(tmp_path, "cpi,interval\n2.5,1\n1.5,0\n"), 2)
    assert mixed["cpi"].tolist() == [1.5, 2.5] and "interval" not in mixed
    partly = cpi.read_table(table(tmp_path, "interval,cpi\n2,9\n"), 4, partly=True)
    assert np.isnan(partly["cpi"]).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("1,2\n3,4\n", "does not name the columns"),
        ("a,a\n1,2\n", "a duplicate column"),
        ("a\n", "3 are missing"),
        ("a\n1\n", "2 are missing"),
        ("a\n1\n2\nx\n", "a holds 'x', which is not a number"),
        ("a\n1\n2\nnan\n", "a of row 3 is nan"),
        ("a,b\n1\n2\n3\n", "row 1 has 1 values, the header 2"),
        ("a,b\n1,2\n3\n4,5\n", "row 2 has 1 values, the header 2"),
        ("interval,a\n0,1\n1,1\n", "1 are missing and 0 stand more than once; 0 lines"),
        ("interval,a\n0,1\n1,1\n1,1\n2,1\n", "0 are missing and 1 stand more than once"),
        ("interval,a\n0,1\n1,1\n2,1\n3,1\n", "1 lines are of other intervals"),
        ("interval,a\n0,1\n1,1\n1.5,1\n", "1 lines are of other intervals"),
        ("interval,a\n0,1\n1,1\n1e300,1\n", "1 lines are of other intervals"),
        ("\xff\n1\n", "2 are missing"),
    ],
)
def test_damaged_tables_are_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TokmillError, match=said):
        cpi.read_table(table(tmp_path, text), 3)


def test_part_of_a_table_needs_its_intervals(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="no column says which intervals"):
        cpi.read_table(table(tmp_path, "cpi\n1\n"), 3, partly=True)


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("interval,l1,cpi\n0,1,5\n1,2,6\n2,3,7\n", {"l1": [1, 2, 3]}),
        ("l1,CPI_modelled\n1,\n2,6\n3,nan\n", {"l1": [1, 2, 3]}),
        ("# of a run\ninterval,instructions,cpi,d1_misses\n0,9,5,1\n1,9,6,2\n2,9,7,3\n",
         {"d1_misses": [1, 2, 3]}),
        ("interval,tlb,l1\n3,3,6\n1,1,4\n2,2,5\n", {"tlb": [1, 2, 3], "l1": [4, 5, 6]}),
        # Beside rates of a profile nothing else is read.
        ("interval,d1_misses,tlb,phase,x\n1,1,4,a,\n2,2,5,b,\n3,3,6,c,\n",
         {"d1_misses": [1, 2, 3]}),
        ("d1_misses,seconds,cycles,cpi_x\n1,3,4,0\n2,3,4,0\n3,3,4,0\n", {"d1_misses": [1, 2, 3]}),
        ("l1,seconds,cycles,cpi_x,ipc\n-1,3,4,a,\n2,3,4,,\n3,3,4,,\n", {"l1": [-1, 2, 3]}),
        ("d1_misses,instructions\n1,\n2,9\n3,9\n", {"d1_misses": [1, 2, 3]}),
        ("l1,instructions\n1,9\n2,\n3,9\n", {"l1": [1, 2, 3]}),
        ('{"d1_misses": [1, 2, 3], "seconds": [1, 2, 3], "instructions": [9, null, 9]}',
         {"d1_misses": [1, 2, 3]}),
        ('{"d1_misses": [1, 2, 3], "cpi": [4, 5, 6]}', {"d1_misses": [1, 2, 3]}),
        ("interval,cpi\n0,1\n1,2\n2,3\n", "has no rate"),
        ("cpi\n1\n2\n3\n", "has no rate"),
        ("seconds,instructions\n1,9\n2,9\n3,9\n", "has no rate"),
        ('{"cpi": [4, 5, 6]}', "has no rate"),
        ("l1,instructions\n1,9\n2,8\n3,9\n", "1 interval of 3 with other numbers"),
        ("l1,instructions\n1,9\n2,inf\n3,9\n", "instructions of row 2 is inf"),
        ("l1,phase\n1,a\n2,b\n3,a\n", "phase holds 'a', which is not a number"),
        ("l1,l2\n1,\n2,\n3,\n", "l2 of row 1 is nan"),
        ("d1_misses,page_faults\n1,1\n2,-3\n3,1\n", "page_faults of row 2 is -3"),
        ('{"d1_misses": [1, -2, 3]}', "d1_misses of row 2 is -2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_rates_are_all_columns_but_cpi(
    tmp_path: Path, text: str, rates: dict[str, list[int]] | str, packed: bool
) -> None:
    path = table(tmp_path, text)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    sums = np.asarray([9, 9, 9])
    if isinstance(rates, str):
        with pytest.raises(TokmillError, match=rates):
            cpi.read_rates(path, sums, path)
        return
    found = cpi.read_rates(path, sums, path)
    assert {name: column.tolist() for name, column in found.items()} == rates
