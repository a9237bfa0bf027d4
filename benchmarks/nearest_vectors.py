"""`tokmill similarity index` by vectors, beside faiss: queries a second at the same recall.

The vectors are those of all functions of a machine (the store `machine-functions`): logarithms of
counts of tokens, each times the rarity of its token, projected to 128 dimensions. Not the best
vectors there are, but many and real, and near ones are as near as functions are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tokmill.builds.repeats import batches
from tokmill.store.hashes import token_values
from tokmill.store.projection import BITS, projection_rows
from tokmill.store.store import Store

HERE = Path(__file__).parent
SCRIPT = HERE / "peers" / "nearest_search.py"
COLUMN, DIMENSIONS, QUERIES, MOST, SEED = "asm", 128, 1000, 10, 3
PEERS = ("faiss IVF, 8 bits", "faiss IVFFlat", "faiss HNSW32")
BLOCK = 1 << 12


def vectors_of(store: Store) -> np.ndarray:
    """Return a vector of length 1 for each record, float32 (n, `DIMENSIONS`)."""
    width = int(max(shard[COLUMN].max(initial=0) for shard in map(store.shard, _places(store)))) + 1
    often = np.zeros(width)
    for table in _tables(store, width):
        often += (table > 0).sum(axis=0)
    rare = np.log(len(store) / np.maximum(often, 1))
    random = projection_rows(np.arange(width), DIMENSIONS, SEED) / 2**BITS
    parts = [(np.log1p(table) * rare) @ random for table in _tables(store, width)]
    found = np.concatenate(parts)
    lengths = np.sqrt((found**2).sum(axis=1, keepdims=True))
    return (found / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def _places(store: Store) -> range:
    return range(len(store.shards))


def _tables(store: Store, width: int):
    """Yield how often each token stands in each record, (records, width), some at a time."""
    for place in _places(store):
        for _, batch in batches(store, place):
            tokens = token_values(batch, COLUMN).astype(np.int64)
            row = np.repeat(np.arange(len(batch)), np.diff(batch.offsets))
            for first in range(0, len(batch), BLOCK):
                count = min(BLOCK, len(batch) - first)
                here = slice(batch.offsets[first], batch.offsets[first + count])
                at = (row[here] - first) * width + tokens[here]
                yield np.bincount(at, minlength=count * width).reshape(count, width)


def least_cosines(vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the cosine of the `MOST`-th nearest vector of each query, by looking at all."""
    best = np.full((len(queries), MOST), -2, np.float32)
    for first in range(0, len(vectors), BLOCK):
        both = np.concatenate([best, queries @ vectors[first : first + BLOCK].T], axis=1)
        best = -np.partition(-both, MOST - 1, axis=1)[:, :MOST]
    return best.min(axis=1)


def searched(python: str, library: str, paths: list[Path], recall: float) -> dict[str, object]:
    command = [python, str(SCRIPT), library, *map(str, paths), str(recall)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout)


def main(cache: Path, peers_python: str) -> list[str]:
    """Return the lines of the section."""
    place = cache / "machine-functions"
    if not place.is_dir():
        return [f"There is no store {place.name}: `tokmill build x86 … --unit function` makes one."]
    paths = [cache / f"nearest-{name}.npy" for name in ("vectors", "queries", "least")]
    if not all(path.exists() for path in paths):
        vectors = vectors_of(Store(place))
        drawn = np.random.default_rng(SEED).permutation(len(vectors))[:QUERIES]
        arrays = vectors, vectors[drawn], least_cosines(vectors, vectors[drawn])
        for path, array in zip(paths, arrays, strict=True):
            np.save(path, array)
    own = searched(sys.executable, "tokmill", paths, 0)
    rows = [("tokmill similarity index", own)]
    # No other recall is compared: each peer looks as far as it needs for ours.
    rows += [(name, searched(peers_python, name, paths, own["recall"])) for name in PEERS]
    count, width = np.load(paths[0], mmap_mode="r").shape
    lines = [
        f"{count:,} functions of a machine, {width} dimensions, the {MOST} nearest of {QUERIES:,} "
        f"functions, one thread, a query at a time, CPU time; each peer looks as far as it needs "
        "for the recall of tokmill. Vectors as near as the last of the nearest count as found.",
        "",
        "| index | looks at | recall@10 | queries/s | of tokmill | to build, s | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows:
        speed = row["queries_per_second"]
        lines.append(
            f"| {name} | {row['way']} | {row['recall']:.3f} | {speed:,.0f} "
            f"| {speed / own['queries_per_second']:.2f} × | {row['build_seconds']:.0f} "
            f"| {row['peak'] / 2**20:,.0f} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]), sys.argv[2])))
