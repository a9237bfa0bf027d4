"""Vectors of the functions of two programs by the model of a run, for `tokmill diff --run`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.builds.build import build
from tokmill.builds.plan import How
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.x86.features.function_features import find
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import write_graph
from tokmill.x86.tokens.vocabularies.vocabulary import find_lists


def vectors_of(graphs: tuple[Graph, Graph], run: Path, *, quiet: bool) -> tuple[Array, Array]:
    """Return a vector a function, (F, d) f4, less the mean of all and of length 1; else 0.

    Raises `UsageError` for a run that does not read the code of programs.
    """
    both = np.concatenate([_function_vectors(graph, run, quiet) for graph in graphs])
    there = (both != 0).any(1)
    # What all functions share says nothing about which are similar.
    both[there] -= both[there].mean(0)
    lengths = np.linalg.norm(both, axis=1, keepdims=True)
    np.divide(both, lengths, out=both, where=lengths > 0)
    first = len(graphs[0].function_address)
    return both[:first], both[first:]


def _function_vectors(graph: Graph, run: Path, quiet: bool) -> Array:
    vocab = run / "vocab"
    rules = _rules(vocab)
    with tempfile.TemporaryDirectory(prefix="tokmill-diff-") as name:
        folder = Path(name)
        write_graph(graph, folder / "program.parquet")
        store = build(
            "x86",
            folder / "program.parquet",
            folder / "store",
            how=How(quiet=True),
            rules=rules,
            vocab="" if rules == "tokmill" else str(vocab),
        )
        from tokmill.inference.embed import embed_store

        made = embed_store(run, store.path, quiet=quiet)
        return _by_function(graph, Store(store.path, [made.overlay]), made.width)


def _by_function(graph: Graph, store: Store, width: int) -> Array:
    """Return the mean of the vectors of each function's parts, (F, d) f4."""
    vectors = np.zeros((len(graph.function_address), width), np.float32)
    parts = np.zeros(len(vectors), np.float32)
    for number in range(len(store.shards)):
        shard = store.shard(number)
        place, there = find(graph.function_address, shard["address"].astype(np.uint64))
        np.add.at(vectors, place[there], shard["embedding"].reshape(-1, width)[there])
        np.add.at(parts, place[there], 1)
    return vectors / np.maximum(parts, 1)[:, None]


def _rules(vocab: Path) -> str:
    """Return the rules that made the tokens that a run reads."""
    lists = find_lists(vocab) if vocab.is_dir() else {}
    if "asm" not in lists:
        raise UsageError(
            "the run does not read x86 code",
            where=str(vocab.parent),
            hint="--run takes a run on a store of `tokmill build x86`",
        )
    return lists["asm"].tokens.rules
