"""`tokmill bbv shared-points`."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from making import quick_build
from source_cases import block_store, write_trace

Here = Callable[..., tuple[str, str]]


def test_points_that_programs_share(here: Here, tmp_path: Path) -> None:
    options = block_store(tmp_path)
    traces = [write_trace(tmp_path, number) for number in (0, 1, 2)]
    quick_build("bbv", traces, tmp_path / "store", blocks=[str(options[1])], min_joined=0.0)
    asked = ("bbv", "shared-points", "store", "--points", 4)
    facts = json.loads(here(*asked, "--signatures", "untrained", "--json")[0])
    assert [row["program"] for row in facts["programs"]] == ["0", "1", "2"]
    assert facts["cpi_kind"] == "modelled" and len(facts["points"]) == 4
    out, _ = here(*asked, "--signatures", "untrained", "-o", "points")
    assert "CPI, modelled" in out and "held out" in out
    assert sorted(path.name for path in (tmp_path / "points").iterdir()) == [
        f"{n}.{end}" for n in range(3) for end in ("simpoints", "weights")
    ]
    count = facts["left_out"] + sum(row["intervals"] for row in facts["programs"])
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=(count, 3)))
    given = json.loads(here(*asked, "--signatures", "v.npy", "--json")[0])
    assert given["points"] != facts["points"]
    for number, name in enumerate(("a/b", "a_b")):
        quick_build("bbv", traces[number], tmp_path / f"s{number}", program=name,
                    blocks=[str(options[1])], min_joined=0.0)  # fmt: skip
    here("build", "select", "s0", "s1", "-o", "both")
    twice = ("bbv", "shared-points", "both", "--points", 4)
    here(*twice)
    assert "a/b, a_b" in here(*twice, "-o", "p", code=2)[1] and not (tmp_path / "p").exists()
    refused = here(*asked, "--signatures", "nothing", code=1)[1]
    assert "has no overlay" in refused
    traces[0].rename(tmp_path / "0.bb")
    assert "is a file, not a store" in here("bbv", "shared-points", "0.bb", code=1)[1]
