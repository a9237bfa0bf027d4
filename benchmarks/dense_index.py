"""Nearest vectors: an index of `tokmill similarity index` beside faiss's exact one, in turns.

Needs faiss-cpu. Both use one thread and answer one query at a time, as `similarity query` does.

    OMP_NUM_THREADS=1 python benchmarks/dense_index.py CACHE
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from measure import markdown
from tokmill import build
from tokmill.similarity.index import Index, write_index
from tokmill.store.store import Store

ROWS, WIDTH, QUERIES, NEAREST = 1_000_000, 128, 20, 10


def index_of(cache: Path) -> Index:
    """Return an index of vectors around 4,000 centres, made where missing."""
    path = cache / "dense-index"
    if not path.exists():
        draw = np.random.default_rng(0)
        centres = draw.standard_normal((4000, WIDTH), np.float32)
        matrix = centres[np.arange(ROWS) % len(centres)]
        matrix += draw.standard_normal((ROWS, WIDTH), np.float32)
        (np.arange(ROWS) % 1000).astype(np.uint16).tofile(cache / "dense.bin")
        build.bin(cache / "dense.bin", cache / "dense", record_tokens=1)
        write_index(path, Store(cache / "dense"), matrix, of="random")
    return Index(path)


def main(cache: Path) -> None:
    faiss: Any = __import__("faiss")
    index = index_of(cache)
    peer = faiss.IndexFlatIP(WIDTH)
    peer.add(np.asarray(index.vectors))
    times: dict[str, list[float]] = {"faiss IndexFlatIP": [], "tokmill": []}
    for row in np.random.default_rng(1).integers(ROWS, size=QUERIES):
        query = index.vectors[row]
        begun = time.perf_counter()
        scores, rows = peer.search(query[None], NEAREST)
        middle = time.perf_counter()
        ours, cosines = index.nearest(query, NEAREST)
        times["tokmill"].append(time.perf_counter() - middle)
        times["faiss IndexFlatIP"].append(middle - begun)
        np.testing.assert_allclose(cosines, scores[0], atol=1e-5)
        assert set(ours) == set(rows[0]), "a tie, or another answer"
    first = statistics.median(times["faiss IndexFlatIP"])
    middles = {name: statistics.median(each) for name, each in times.items()}
    rows = [[name, f"{m * 1000:.1f}", f"{m / first:.2f}"] for name, m in middles.items()]
    print("\n".join(markdown(["program", "ms a query", "/ first"], rows)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
