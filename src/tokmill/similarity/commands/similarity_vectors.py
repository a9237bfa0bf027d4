"""The vectors of a store's records: of runs and files, and of baselines."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, check_name
from tokmill.similarity.functions import Functions, of_functions
from tokmill.similarity.pool_measures import RANDOM, Method
from tokmill.similarity.vector_rows import Rows, read_vectors
from tokmill.store.manifest import read_plan
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.terminal.output import say

SUMS = ("code", "facts")
"""What vectors are added to."""
MOST_PLANS = 1000
"""Stores that are followed back to the graphs that they were built of."""


def vectors_of(path: Path, store: Store, *, at: str, device: str, quiet: bool) -> tuple[str, Array]:
    """Return a name, and a vector a record (records, d).

    `path`: an .npy file, or the folder of a run, whose vectors become an overlay. Raises
    `UsageError` for anything else.
    """
    if path.suffix == ".npy":
        return path.stem, read_vectors(path, len(store))
    if (path / "recipe.json").is_file():
        from tokmill.inference.embed import embed_store

        table = embed_store(path, store.path, at=at, device=device, quiet=quiet)
        return path.resolve().name, Store(store.path, [table.overlay]).column("embedding")
    raise UsageError(
        "this is neither a run nor an .npy file",
        where=str(path),
        hint="`tokmill train` makes a run; a file has a row of numbers for each record",
    )


def baselines_of(
    functions: Functions,
    store: Store,
    graphs: Sequence[Path],
    names: Sequence[str] | None,
    vectors: Mapping[str, Array] | None = None,
) -> list[Method]:
    """Return the sums of vectors with what functions hold, chance, and baselines; None: all.

    `graphs`: what the store was built of, as it knows more than tokens; where none are named,
    those that it was built of. Where there are none, it is said that there are no baselines;
    those that are named are refused.
    `vectors`: name → a vector a record, of which sums are wanted.
    """
    random_order = Method(RANDOM, None, True)
    for name in names or ():
        check_name("no baseline is", name, [*plugins.BASELINES, RANDOM])
    wanted = [name for name in (plugins.BASELINES if names is None else names) if name != RANDOM]
    if not wanted and not vectors:
        return [random_order]
    if not graphs and (graphs := built_of(store)) == []:
        what = "no baselines but chance: the store was not built of graphs"
        hint = "--graphs DIR names the graphs of its programs, which `tokmill cfg` makes"
        if wanted and names:
            raise UsageError(what, where=str(store.path), hint=hint)
        if wanted:
            say(f"note: {what}", f"hint: {hint}")
        return [random_order]
    from tokmill.x86.features.baselines import baselines
    from tokmill.x86.features.learned_sums import sum_of
    from tokmill.x86.features.store_functions import store_functions

    features = store_functions(store, graphs)
    matrices = baselines(store, graphs, wanted, functions=features)
    sums = {
        f"{name} + {kind}": sum_of(kind, features, matrix)
        for name, matrix in (vectors or {}).items()
        for kind in SUMS
    }
    return [
        *(Method(name, rows_of(functions, matrix), False) for name, matrix in sums.items()),
        random_order,
        *(Method(name, rows_of(functions, matrix), True) for name, matrix in matrices.items()),
    ]


def rows_of(functions: Functions, matrix: Any) -> Rows:
    first, more = matrix if isinstance(matrix, tuple) else (matrix, None)
    if more is not None:
        more = of_functions(functions, more, unit=False)
    return Rows(of_functions(functions, first, unit=False), unit=False, more=more)


def built_of(store: Store) -> list[Path]:
    """Return the inputs of a store that were graphs, and are still there."""
    plans, inputs = [read_plan(store.path)], list[Path]()
    for plan in plans:
        source, paths = plan.recipe.get("source"), [Path(root) for root in plan.inputs()]
        if source == "select" and len(plans) <= MOST_PLANS:
            with contextlib.suppress(TokmillError):
                plans += [read_plan(path) for path in paths]
        if source == "x86":
            from tokmill.x86.graphs.graph_files import SUFFIX

            for path in paths:
                if path.suffix == SUFFIX and path.exists() or any(path.rglob(f"*{SUFFIX}")):
                    inputs.append(path)
    return list(dict.fromkeys(inputs))
