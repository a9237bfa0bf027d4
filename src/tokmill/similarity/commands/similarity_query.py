"""`tokmill similarity query` and `index`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import path_from_text
from tokmill.base.progress import elapsed, human_bytes, human_count
from tokmill.similarity.commands.similarity_vectors import built_of, sum_of, vectors_of
from tokmill.similarity.index import Index, check_place, is_index, write_index
from tokmill.similarity.query import (
    MORE,
    Hit,
    Named,
    find_function,
    hits_of,
    nearest_rows,
)
from tokmill.similarity.sparse_index import SparseIndex
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.terminal.options import AsJson, At, Device, Quiet
from tokmill.terminal.output import print_json, print_table

BEST = "ranker"
"""The way that finds most, and is the default where all functions are compared."""
SUMMED = "facts"
"""What vectors are added to, where they are given."""
INDEXED = "facts"
"""The default of an index: few numbers a function, and known of functions of other programs."""
MOST = 1000
"""Functions that can be asked for at once."""
Graphs = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="Graphs of the programs. May be repeated.",
        show_default="those that the store was built of",
    ),
]
Baseline = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The way without vectors, of those in `tokmill similarity eval`.",
        show_default=f"{BEST}; of an index {INDEXED}",
    ),
]

Alone = Annotated[
    bool,
    typer.Option(
        "--alone",
        help="Take the vectors alone, not their sum with what functions hold and with those around "
        "them, which is taken where graphs are known.",
    ),
]


def query(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUN|OVERLAY|F.npy] STORE|INDEX",
            help="A store, or an index of one. Of a store also vectors: functions are compared by "
            "these and by what they hold; without vectors by what they hold alone.",
            show_default=False,
        ),
    ],
    function: Annotated[
        str, typer.Option("--function", metavar="NAME", help="Name of the function.")
    ] = "",
    program: Annotated[
        str, typer.Option(metavar="PATH", help="Its program, or the end of the program's path.")
    ] = "",
    project: Annotated[str, typer.Option(metavar="NAME", help="Its project.")] = "",
    compiler: Annotated[str, typer.Option(metavar="NAME", help="Its compiler.")] = "",
    level: Annotated[str, typer.Option(metavar="NAME", help="Its level.")] = "",
    address: Annotated[
        str, typer.Option(metavar="HEX", help="Its address, such as 0x401000.")
    ] = "",
    of: Annotated[
        Path | None,
        typer.Option(
            "--of",
            metavar="PROGRAM",
            help="Of an index by facts: a program, or a graph of one, that has the function. It "
            "need not be one of the store's.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=MOST, help="Functions to show.")] = 10,
    others: Annotated[
        bool, typer.Option("--others", help="Leave out functions of the same program.")
    ] = False,
    why: Annotated[
        bool,
        typer.Option("--why", help="Name the strings, imports and constants that both have."),
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Of an index by facts: compare with every function.")
    ] = False,
    baseline: Baseline = "",
    alone: Alone = False,
    graphs: Graphs = None,
    at: At = "last",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the functions that are most like one of a store, and say what they share."""
    *given, place = paths
    check_given(given)
    at_address = _address(address)
    wanted = {"program": program, "project": project, "compiler": compiler, "level": level}
    if of is not None and not is_index(place):
        raise UsageError(
            "--of is for an index by facts",
            where=str(place),
            hint="tokmill similarity index STORE -o INDEX",
        )
    own: list[str] | None = None
    if is_index(place):
        if given or baseline or graphs:
            raise UsageError(
                "an index has its vectors and graphs",
                where=str(place),
                hint="name the index alone, or the store in its place",
            )
        index = Index(place)
        store, by = index.store, index.facts.of
        row: int | tuple[Array, Array]
        if of is not None:
            asked, row, own = _of_program(of, index, function, at_address)
        else:
            asked = find_function(store, function, at_address, **wanted)
            row = asked.record
        rows, scores, shares = index.nearest(row, _looked_at(top, others), exact=exact)
        kinds = list(index.facts.bounds)
        found = hits_of(store, asked, rows, scores, top, shares=shares, kinds=kinds, others=others)
        known = [Path(path_from_text(one)) for one in index.facts.graphs]
    else:
        store, known = Store(place), list(graphs or [])
        asked = find_function(store, function, at_address, **wanted)
        known = known or built_of(store)
        with elapsed("reading") if not quiet else contextlib.nullcontext():
            by, matrix, unit = _matrix(given, store, known, baseline, at, device, quiet)
            if given and known and not alone:
                by, matrix, unit = _sum(by, matrix, store, known)
        looked_at = _looked_at(top, others)
        rows, scores = nearest_rows(matrix, asked.record, looked_at, unit=unit)
        found = hits_of(store, asked, rows, scores, top, others=others)
    if why:
        found = _with_names(store, asked, found, known, own)
    if as_json:
        print_json({"asked": asked, "by": by, "hits": found})
        return
    _print(asked, by, found, why)


def _print(asked: Named, of: str, found: Sequence[Hit], why: bool) -> None:
    print(f"{asked.said()}, by {of}")
    if not found:
        print("nothing is like it")
        return
    said = why or any(hit.shares for hit in found)
    built = [
        name
        for name in ("compiler", "level")
        if any(getattr(hit.function, name) not in ("", "unknown") for hit in found)
    ]
    print_table(
        [
            "score",
            "function",
            "address",
            "program",
            *built,
            *(["why"] if said else []),
        ],
        [
            [
                f"{hit.score:.3f}",
                hit.function.function,
                f"{hit.function.address:#x}",
                "/".join(
                    part
                    for part in (hit.function.project, hit.function.version, hit.function.program)
                    if part not in ("", "unknown")
                ),
                *(getattr(hit.function, name) for name in built),
                *([_reason(hit, why)] if said else []),
            ]
            for hit in found
        ],
    )


def _reason(hit: Hit, why: bool) -> str:
    """Return what a function shares, in words: names, or kinds with their part of the score."""
    if why:
        more = len(hit.shared) - 4
        return ", ".join(hit.shared[:4]) + (f" and {more} more" if more > 0 else "") or "code"
    kinds = sorted(hit.shares.items(), key=lambda one: -one[1])
    return ", ".join(f"{kind} {part:.2f}" for kind, part in kinds if part >= 0.005)


def index(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUN|OVERLAY|F.npy] STORE",
            help="The store, and vectors of it; without, the untrained way.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="INDEX", help="A file.")],
    baseline: Baseline = "",
    graphs: Graphs = None,
    at: At = "last",
    device: Device = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace an index that stands there.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Keep the vectors of a store's functions so that a query takes milliseconds."""
    *given, place = paths
    check_given(given)
    check_place(out, fresh=fresh)
    store = Store(place)
    if store.partial:
        raise UsageError(
            "the store is not complete", where=str(place), hint="`tokmill build` continues it"
        )
    if not len(store):
        raise TokmillError("the store is empty", where=str(place), hint="index one with functions")
    known = list(graphs or []) or built_of(store)
    bounds: dict[str, int] = {}
    keys = None
    with elapsed("index") if not quiet else contextlib.nullcontext():
        if not given and (baseline or INDEXED) == INDEXED:
            from tokmill.x86.features import shared_facts as module
            from tokmill.x86.features import store_functions as made
            from tokmill.x86.features.baselines import FACTS

            functions = made.store_functions(store, _some(known, store), kinds=FACTS)
            of, (matrix, bounds) = INDEXED, module.fact_rows(functions)
            keys = module.fact_keys(functions)
        else:
            of, matrix, _ = _matrix(given, store, known, baseline, at, device, quiet)
        facts = write_index(
            out, store, matrix, of=of, bounds=bounds, keys=keys, graphs=known, fresh=fresh
        )
    size = out.stat().st_size
    if as_json:
        print_json({"index": str(out), "bytes": size, "facts": facts})
        return
    print(f"{out}: {human_count(facts.records, 'record')} by {of}, {human_bytes(size)}")


def check_given(given: Sequence[Path]) -> None:
    """Refuse more than one kind of vectors."""
    if len(given) > 1:
        raise UsageError(
            "functions are compared by one kind of vectors",
            where=str(given[1]),
            hint="name one run, overlay or file, and the store at last",
        )


def _matrix(
    given: Sequence[Path],
    store: Store,
    graphs: Sequence[Path],
    baseline: str,
    at: str,
    device: str,
    quiet: bool,
) -> tuple[str, Any, bool]:
    """Return a name, a row a record, and whether rows are scaled to length 1."""
    if given:
        if baseline:
            raise UsageError(
                "--baseline is where no vectors are named", hint="leave one of them out"
            )
        name, matrix = vectors_of(given[0], store, at=at, device=device, quiet=quiet)
        return name, matrix, True
    name = baseline or BEST
    if name not in plugins.BASELINES:
        raise UsageError(f"no baseline is called {name!r}", hint=nearest(name, plugins.BASELINES))
    from tokmill.x86.features import baselines as module

    return name, module.baselines(store, _some(graphs, store), [name])[name], False


def _sum(name: str, vectors: Array, store: Store, graphs: Sequence[Path]) -> tuple[str, Any, bool]:
    """Return the sum of vectors with what functions hold, as `_matrix` does."""
    from tokmill.x86.features import store_functions as made

    matrix = sum_of(SUMMED, made.store_functions(store, graphs), vectors)
    return f"{name} + {SUMMED}", matrix, False


def _some(graphs: Sequence[Path], store: Store) -> Sequence[Path]:
    if not graphs:
        raise UsageError(
            "the store was not built of graphs, and without them nothing is known but tokens",
            where=str(store.path),
            hint="--graphs DIR names the graphs of its programs, which `tokmill cfg` makes; or "
            "name a run",
        )
    return graphs


def _of_program(
    path: Path, index: Index, function: str, address: int | None
) -> tuple[Named, tuple[Array, Array], list[str]]:
    """Return a function of a program that need not be in the store, its row, and its facts."""
    rows = index.rows
    if not isinstance(rows, SparseIndex) or rows.key is None or rows.weight is None:
        raise UsageError(
            "the index has vectors of a run, or none that are known of other programs",
            where=str(index.path),
            hint="--of is for an index by facts: tokmill similarity index STORE -o INDEX",
        )
    from tokmill.x86.diff.folders import one_graph
    from tokmill.x86.graphs.graph_inputs import find_inputs

    graph = one_graph(find_inputs([str(path)]).files[0])
    good = np.ones(len(graph.function_address), bool)
    if function:
        names = zip(graph.function_name, graph.function_address.tolist(), strict=True)
        good &= np.asarray([(name or f"sub_{at:x}") == function for name, at in names], bool)
    if address is not None:
        good &= graph.function_address == np.uint64(address)
    here = np.flatnonzero(good)
    if len(here) != 1 or not (function or address is not None):
        raise UsageError(
            f"{human_count(len(here), 'function')} of the program fit"
            if function or address is not None
            else "no function is named",
            where=str(path),
            hint="--function NAME or --address HEX says which; `tokmill cfg PROGRAM -o "
            "FUNCTIONS.jsonl` lists them",
        )
    number = int(here[0])
    from tokmill.x86.features import shared_facts as module

    row = module.fact_row(graph, number, index.facts.bounds, rows.key, rows.weight)
    at = int(graph.function_address[number])
    name = graph.function_name[number] or f"sub_{at:x}"
    asked = Named(-1, "", graph.program, "", graph.compiler, graph.level, name, at)
    return asked, row, module.facts_of(graph, at)


def _with_names(
    store: Store,
    asked: Named,
    found: Sequence[Hit],
    graphs: Sequence[Path],
    own: list[str] | None = None,
) -> list[Hit]:
    """Return hits with the names of the facts that they share with the function asked for.

    `own`: facts of the function asked for, if it is not one of the store.
    """
    from tokmill.x86.features import shared_facts as module
    from tokmill.x86.features.store_functions import layout_of
    from tokmill.x86.image.keys import Key

    layout = layout_of(store)
    everything = [*([asked] if own is None else []), *(hit.function for hit in found)]
    keys = {one.record: Key(*(getattr(one, name) for name in Key._fields)) for one in everything}
    facts: dict[int, list[str]] = {}
    for program, graph in module.graphs_of(_some(graphs, store), layout, list(keys.values())):
        for one in everything:
            if keys[one.record] == program:
                facts[one.record] = module.facts_of(graph, one.address)
    own = facts.get(asked.record, []) if own is None else own
    return [
        msgspec.structs.replace(
            hit, shared=[name for name in own if name in set(facts.get(hit.function.record, []))]
        )
        for hit in found
    ]


def _looked_at(top: int, others: bool) -> int:
    """Return how many rows are looked for: several may be parts of one function."""
    return top * MORE * (16 if others else 1) + 1


def _address(text: str) -> int | None:
    if not text:
        return None
    try:
        found = int(text, 16)
    except ValueError:
        found = -1
    if not 0 <= found < 1 << 64:
        raise UsageError(f"--address: {text!r} is no address", hint="--address 0x401000")
    return found
