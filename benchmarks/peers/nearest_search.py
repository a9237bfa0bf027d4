"""Search the nearest vectors with one library: build an index, find how far it must look, time it.

    python nearest_search.py LIBRARY VECTORS.npy QUERIES.npy LEAST.npy RECALL

VECTORS (n, d) and QUERIES (q, d) are float32 of length 1; LEAST (q,) is the cosine of the MOST-th
nearest vector of each query. RECALL: look as far as needed to find this share of the nearest; 0: as
far as the library does by itself. Prints a line of JSON. One thread, a query at a time, CPU time.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

MOST = 10
NEAR = 1e-5
"""Cosines that differ by less are equal: many functions are equal."""
ROUNDS = 3
Search = Callable[[np.ndarray], np.ndarray]


def tokmill(vectors: np.ndarray) -> Iterator[tuple[str, Search]]:
    from tokmill.similarity.dense_index import PROBES, DenseIndex, dense_arrays

    index = DenseIndex(dense_arrays(vectors), "memory")
    yield "", lambda query: np.zeros(0)
    yield f"{PROBES} cells of {len(index.centre)}", lambda query: index.nearest(query, MOST)[0]
    yield "all cells", lambda query: index.nearest(query, MOST, exact=True)[0]


def cells(vectors: np.ndarray, *, bytes_: bool) -> Iterator[tuple[str, Search]]:
    import faiss

    faiss.omp_set_num_threads(1)
    n, d = vectors.shape
    count = max(1, int(4 * n**0.5))
    centres = faiss.IndexFlatIP(d)
    if bytes_:
        kind = faiss.ScalarQuantizer.QT_8bit
        index = faiss.IndexIVFScalarQuantizer(centres, d, count, kind, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexIVFFlat(centres, d, count, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[np.random.default_rng(0).permutation(n)[: 40 * count]])
    index.add(vectors)
    yield "", lambda query: np.zeros(0)
    probes = 1
    while probes <= count:
        index.nprobe = probes
        yield f"{probes} cells of {count}", lambda query: index.search(query[None], MOST)[1][0]
        probes = probes + max(1, probes // 4)


def graph(vectors: np.ndarray) -> Iterator[tuple[str, Search]]:
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 80
    index.add(vectors)
    yield "", lambda query: np.zeros(0)
    reach = MOST
    while reach <= 4096:
        index.hnsw.efSearch = reach
        yield f"efSearch {reach}", lambda query: index.search(query[None], MOST)[1][0]
        reach += max(1, reach // 4)


LIBRARIES: dict[str, Callable[[np.ndarray], Iterator[tuple[str, Search]]]] = {
    "tokmill": tokmill,
    "faiss IVFFlat": lambda vectors: cells(vectors, bytes_=False),
    "faiss IVF, 8 bits": lambda vectors: cells(vectors, bytes_=True),
    "faiss HNSW32": graph,
}
"""Name → what builds an index, yields once, and then ways to search, farther and farther."""


def main(name: str, paths: list[str], wanted: float) -> None:
    vectors, queries, least = (np.load(path) for path in paths)
    begun = time.process_time()
    ways = LIBRARIES[name](vectors)
    next(ways)
    built = time.process_time() - begun
    for way in ways:
        said, search = way
        found = np.full((len(queries), MOST), -1)
        for number, query in enumerate(queries):
            rows = search(query)[:MOST]
            found[number, : len(rows)] = rows
        cosines = np.einsum("qmd,qd->qm", vectors[found], queries)
        recall = float(((cosines >= least[:, None] - NEAR) & (found >= 0)).mean())
        if recall >= wanted:
            break
    taken = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for query in queries:
            search(query)
        taken.append(time.process_time() - begun)
    print(
        json.dumps(
            {
                "way": said,
                "recall": recall,
                "queries_per_second": len(queries) / min(taken),
                "build_seconds": built,
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:5], float(sys.argv[5]))
