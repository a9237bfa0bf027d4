"""Real programs under valgrind: nearly all that they execute is found in stores of blocks."""

from pathlib import Path

import numpy as np
import pytest

from making import quick_build
from profiled import exp_bbv, libraries, ran, text_file
from tokmill.bbv.traces.read import read
from tokmill.store.store import Store

SQL = """
create table t(a integer primary key, b text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 4000)
insert into t select i, hex(i * 7919) from n;
create index tb on t(b); select count(*), max(b) from t where b like '%3%'; delete from t;
"""


def check(store: Store, traces: list[Path]) -> None:
    """At least 95 % are joined, and every number of the traces is there."""
    notes = store.manifest.notes
    assert notes["instructions joined"] >= 0.95 * notes["instructions"]
    parts = ("instructions joined", "instructions not joined")
    assert sum(n for why, n in notes.items() if why.startswith(parts)) == notes["instructions"]
    wanted = np.concatenate([read(path).instructions for path in sorted(traces)])
    assert store.column("instructions").tolist() == wanted.tolist()
    joined = sum(int(record["count"].sum()) for record in store)
    assert joined == notes["instructions joined"]
    assert np.isnan(store.column("cpi")).all()


def test_what_gzip_executes(tmp_path: Path) -> None:
    data = text_file(tmp_path / "data", 60_000)
    gzip = ran("gzip")
    trace = exp_bbv(tmp_path, "gzip", [gzip, "-c", str(data)], 500_000)
    quick_build("x86", [gzip, *libraries(gzip)], tmp_path / "blocks", unit="block")
    store = quick_build("bbv", trace, tmp_path / "store", blocks=[str(tmp_path / "blocks")])
    check(store, [trace])
    blocks = store.reference("block")
    record = store.record(len(store) // 2)
    most = blocks.record(int(record["block"][record["count"].argmax()]))
    assert most["program"] == "gzip"
    assert {blocks.record(int(n))["program"] for n in store.record(0)["block"]} >= {
        "gzip", "libc.so.6", "ld-linux-x86-64.so.2",
    }  # fmt: skip
    assert record["program"] == "gzip" and record["interval"] == len(store) // 2
    # A store of something else is no answer but an error.
    bzip2 = ran("bzip2")
    quick_build("x86", bzip2, tmp_path / "others", unit="block")
    with pytest.raises(Exception, match="of the instructions are in blocks"):
        quick_build("bbv", trace, tmp_path / "wrong", blocks=[str(tmp_path / "others")])


@pytest.mark.long
def test_three_programs_with_several_inputs(tmp_path: Path) -> None:
    programs = {name: ran(name) for name in ("xz", "bzip2", "sqlite3")}
    inputs = [text_file(tmp_path / f"data-{seed}", 120_000 * (1 + seed), seed) for seed in (0, 1)]
    traces = []
    for name in ("xz", "bzip2"):
        traces += [
            exp_bbv(tmp_path, f"{name}-{n}", [programs[name], "-c", str(data)], 1_000_000)
            for n, data in enumerate(inputs)
        ]
    for n, times in enumerate((1, 3)):
        traces.append(
            exp_bbv(tmp_path, f"sqlite3-{n}", [programs["sqlite3"], ":memory:"], 1_000_000,
                    SQL + "select count(*) from t;" * times)
        )  # fmt: skip
    files = {path for program in programs.values() for path in (program, *libraries(program))}
    quick_build("x86", sorted(files), tmp_path / "blocks", unit="block")
    blocks = [str(tmp_path / "blocks")]
    for name in programs:
        mine = [trace for trace in traces if trace.name.startswith(name)]
        check(quick_build("bbv", mine, tmp_path / name, blocks=blocks), mine)
