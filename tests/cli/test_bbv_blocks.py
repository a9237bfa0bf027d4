"""`tokmill bbv cluster` and `rewrite`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from block_rows import from_rows
from tokmill.base.errors import TokmillError
from tokmill.bbv import block_map
from tokmill.bbv.traces import read

Here = Callable[..., tuple[str, str]]


def slow_rewrite(
    rows: list[dict[int, int]], clusters: dict[int, int], base: int
) -> list[dict[int, int]]:
    """Return the rows with clusters for blocks, one entry after the other."""
    found = []
    for row in rows:
        sums: dict[int, int] = {}
        for block, count in row.items():
            new = clusters.get(block, max(clusters.values()) + 1) + base
            sums[new] = sums.get(new, 0) + count
        found.append(dict(sorted(sums.items())))
    return found


@pytest.mark.parametrize("base", [0, 1])
def test_a_trace_is_rewritten_as_entry_by_entry(base: int) -> None:
    random = np.random.default_rng(base)
    rows = [
        {
            int(b) + base: int(c)
            for b, c in zip(random.permutation(50)[:n], random.integers(1, 2**40, n), strict=True)
        }
        for n in (0, 1, 7, 30, 50, 0)
    ]
    clusters = {block + base: int(random.integers(5)) for block in range(40)}
    vectors = from_rows(rows, id_base=base)
    mapped = block_map.BlockMap(
        "id", np.asarray(sorted(clusters)), np.asarray([clusters[b] for b in sorted(clusters)])
    )
    ((new, done),) = block_map.rewrite(iter([vectors]), mapped.of, mapped.size)
    wanted = from_rows(slow_rewrite(rows, clusters, base))
    assert (new.indptr == wanted.indptr).all() and (new.ids == wanted.ids).all()
    assert (new.counts == wanted.counts).all() and new.id_base == base
    assert done.instructions == sum(sum(row.values()) for row in rows)
    assert done.unmapped == sum(block not in clusters for row in rows for block in row) > 0


def test_a_first_id_that_comes_late_does_not_move_the_rest(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "PIECE", 1)
    monkeypatch.setattr(read, "CHUNK", 8)
    (tmp_path / "a.bb").write_text("T:1:5 :2:5\n" * 4 + "T:0:5 :1:5\n")
    (tmp_path / "map.csv").write_text("id,cluster\n0,0\n1,0\n2,1\n")
    command = ("bbv", "rewrite", "a.bb", "--clusters", "map.csv", "-o", "new.bb")
    assert "--id-base 0" in here(*command, code=1)[1]
    assert not (tmp_path / "new.bb").exists()
    here(*command, "--id-base", 0)
    assert (tmp_path / "new.bb").read_text() == "T:0:5 :1:5\n" * 4 + "T:0:10\n"


def test_a_trace_that_may_be_cut_off_is_told(here: Here, tmp_path: Path) -> None:
    (tmp_path / "a.bb").write_text("T:1:5\nT:1:5 :2:1")
    (tmp_path / "map.csv").write_text("id,cluster\n1,0\n2,1\n")
    command = ("bbv", "rewrite", "a.bb", "--clusters", "map.csv", "-o", "new.bb")
    assert "may be cut off" in here(*command)[1]
    assert json.loads(here(*command, "--json")[0])["torn"]


def test_clusters_of_vectors_to_a_new_trace(here: Here, tmp_path: Path) -> None:
    # Lengths differ, directions are three; the last block has no direction.
    directions = np.asarray([[1, 0], [0, 1], [-1, 0]])[[0, 1, 2, 0, 1, 2, 0]]
    vectors = directions * np.arange(1, 8)[:, None]
    np.save(tmp_path / "v.npy", np.vstack([vectors, [[0, 0]]]).astype(np.float32))
    facts = json.loads(
        here("bbv", "cluster", "v.npy", "-o", "m.csv", "--num-clusters", 4, "--json")[0]
    )
    assert facts["clusters"] == 4
    assert (tmp_path / "m.csv").read_text() == "id,cluster\n" + "".join(
        f"{i + 1},{c}\n" for i, c in enumerate([0, 1, 2, 0, 1, 2, 0, 3])
    )
    (tmp_path / "t.bb").write_text("# note\nT:1:5 :4:6   :2:1\nT:8:9 :9:2\n")
    out, err = here("bbv", "rewrite", "t.bb", "-o", "n.bb.gz", "--clusters", "m.csv")
    new = read.read(tmp_path / "n.bb.gz")
    assert (new.ids.tolist(), new.counts.tolist()) == ([1, 2, 4, 5], [11, 1, 9, 2])
    assert "5 entries became 4, of 4 clusters" in out
    assert "1 entries (8.70% of the instructions)" in err
    # From 0 where the trace counts from 0.
    here("bbv", "cluster", "v.npy", "-o", "m0.csv", "--num-clusters", 4, "--id-base", 0)
    (tmp_path / "z.bb").write_text("T:0:5 :3:6 :1:1\n")
    here("bbv", "rewrite", "z.bb", "-o", "z2.bb", "--clusters", "m0.csv")
    assert (tmp_path / "z2.bb").read_text() == "T:0:11 :1:1\n"


def test_the_number_of_clusters_is_real(here: Here, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.save(tmp_path / "v.npy", random.normal(size=(500, 8)))
    for count in (1, 2, 17, 500):
        facts = json.loads(
            here(
                "bbv", "cluster", "v.npy", "-o", f"{count}.csv", "--num-clusters", count, "--json"
            )[0]
        )
        assert facts["clusters"] == count
    here("bbv", "cluster", "v.npy", "-o", "again.csv", "--num-clusters", 17)
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "17.csv").read_bytes()
    np.save(tmp_path / "same.npy", np.ones((9, 2)))
    out, err = here("bbv", "cluster", "same.npy", "-o", "s.csv", "--num-clusters", 5)
    assert "in 1 cluster" in out and "only 1 vectors differ" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "does not name the columns"),
        ("block,cluster\n1,2\n", "the columns are block, cluster"),
        ("id,cluster\n", "no line but the header"),
        ("id,cluster\n1,0\n1,1\n", "block 1 stands twice"),
        ("id,cluster\n1,-1\n", "line 1 after the header has what is no number"),
        ("id,cluster\n1,0\n2.5,0\n", "line 2 after the header has what is no number"),
        ("id,cluster\n1e300,0\n", "no number"),
        ("id,cluster\nnan,0\n", "not finite"),
    ],
)
def test_damaged_maps_are_told(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(TokmillError, match=said):
        block_map.read_map(tmp_path / "m.csv")


def test_what_is_refused(here: Here, tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.ones((3, 2)))
    np.save(tmp_path / "nan.npy", np.full((3, 2), np.nan))
    (tmp_path / "r.csv").write_text("record,cluster\n0,0\n")
    (tmp_path / "t.bb").write_text("T:1:5\n")
    for arguments, said, code in (
        (("cluster", "v.npy", "-o", "m", "--num-clusters", 4), "4 clusters of 3 blocks", 2),
        (("cluster", "nan.npy", "-o", "m", "--num-clusters", 2), "row 0 is not finite", 1),
        (("cluster", "v.npy", "-o", "v.npy", "--num-clusters", 2), "would replace what is read", 2),
        (("rewrite", "t.bb", "-o", "u", "--clusters", "r.csv"), "--blocks STORE", 2),
        (("rewrite", "t.bb", "-o", "t.bb", "--clusters", "r.csv"), "would replace", 2),
    ):
        assert said in here("bbv", *arguments, code=code)[1]
