"""Files of rates of intervals: made and read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

COUNT = 12


def make_table(folder: Path) -> Iterable[Path]:
    """Rates of intervals."""
    rows = "".join(f"{i},{i * 0.25},{1e-3 * i}\n" for i in range(COUNT))
    (folder / "t.csv").write_text(f"interval,l1,last\n{rows}")
    return [folder / "t.csv"]


def read_table(folder: Path) -> Any:
    """The columns, of all intervals and of some."""
    from tokmill.bbv.traces.cpi import read_table as read

    found = []
    for partly in (False, True):
        columns = read(folder / "t.csv", COUNT, partly=partly)
        assert all(len(column) == COUNT for column in columns.values())
        found.append({name: repr(column.tolist()) for name, column in columns.items()})
    return found
