"""`tokmill similarity query` and `index`."""

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.progress import elapsed, human_bytes, human_count
from tokmill.similarity.commands.similarity_vectors import built_of, vectors_of
from tokmill.similarity.index import Index, check_place, is_index, write_index
from tokmill.similarity.query import Hit, Named, find_function, hits_of, nearest_rows, refuse_walks
from tokmill.store.store import Store
from tokmill.terminal.frame import AsJson, At, Device, Quiet
from tokmill.terminal.output import print_json, print_line, print_table

RANKER = "ranker"
"""The baseline that compares functions where no vectors are named."""
SUMMED = "facts"
"""What vectors are added to, where they are given."""
MOST = 1000
"""Functions that can be asked for at once."""
Top = Annotated[int, typer.Option(min=1, max=MOST, help="Functions to show.")]
Others = Annotated[bool, typer.Option("--others", help="Leave out functions of the same program.")]
Exact = Annotated[
    bool, typer.Option("--exact", hidden=True, help="Every query compares all functions.")
]
Graphs = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="Graphs of the programs. May be repeated.",
        show_default="those that the store was built of",
    ),
]
Alone = Annotated[
    bool,
    typer.Option(
        "--alone",
        help="Use only the vectors, not their sum with strings, imports, constants and calls "
        "(the default if there are graphs).",
    ),
]


def query(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUN|F.npy] STORE|INDEX",
            help="A store, or an index of one. Of a store also vectors: functions are compared by "
            "these and by strings, imports, constants and calls; without vectors by the ranker.",
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
    top: Top = 10,
    other_programs: Others = False,
    exact: Exact = False,
    alone: Alone = False,
    graphs: Graphs = None,
    at: At = "last",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the functions that are most similar to one of a store."""
    *given, place = paths
    check_given(given)
    where = _address(address)
    keys = {"program": program, "project": project, "compiler": compiler, "level": level}
    if is_index(place):
        if given or graphs:
            raise UsageError(
                "an index has its vectors", where=str(place), hint="name only the index"
            )
        index = Index(place)
        store, by = index.store, index.facts.of
        asked = find_function(store, function, where, **keys)
        nearest = partial(index.nearest, index.vectors[asked.record])
    else:
        store = Store(place)
        asked = find_function(store, function, where, **keys)
        folders = graphs or built_of(store)
        with elapsed("reading") if not quiet else contextlib.nullcontext():
            by, matrix, unit = _matrix(given, store, folders, alone, at, device, quiet)
        nearest = partial(nearest_rows, matrix, asked.record, unit=unit)
    hits = hits_of(store, asked, nearest, top, other_programs=other_programs)
    if as_json:
        print_json({"asked": asked, "by": by, "hits": hits})
    else:
        _print(asked, by, hits)


def _print(asked: Named, by: str, hits: Sequence[Hit]) -> None:
    print_line(f"{asked}, by {by}")
    if not hits:
        print("no function is similar")
        return
    built = [
        name
        for name in ("compiler", "level")
        if any(getattr(hit.function, name) not in ("", "unknown") for hit in hits)
    ]
    rows = []
    for hit in hits:
        one = hit.function
        parts = [part for part in (one.project, one.version) if part not in ("", "unknown")]
        rows.append(
            [
                f"{hit.score:.3f}",
                one.function,
                f"{one.address:#x}",
                "/".join([*parts, one.program]),
                *(getattr(one, name) for name in built),
            ]
        )
    print_table(["score", "function", "address", "program", *built], rows)


def index(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|F.npy STORE",
            help="Vectors of a store's functions, and the store.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="INDEX", help="A file; an index there is replaced."),
    ],
    at: At = "last",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Store the vectors of a store's functions, so that a query needs no model."""
    *given, place = paths
    check_given(given)
    if not given:
        raise UsageError(
            "no vectors are named",
            where=str(place),
            hint="name a run or an .npy file, then the store",
        )
    check_place(out)
    store = Store(place).whole()
    refuse_walks(store)
    if not len(store):
        raise TokmillError("the store is empty", where=str(place), hint="index one with functions")
    with elapsed("index") if not quiet else contextlib.nullcontext():
        name, matrix = vectors_of(given[0], store, at=at, device=device, quiet=quiet)
        facts = write_index(out, store, matrix, of=name)
    size = out.stat().st_size
    if as_json:
        print_json({"index": str(out), "bytes": size, "facts": facts})
        return
    print_line(f"{out}: {human_count(facts.records, 'record')} by {name}, {human_bytes(size)}")


def check_given(given: Sequence[Path]) -> None:
    if len(given) > 1:
        raise UsageError(
            "functions are compared by one kind of vectors",
            where=str(given[1]),
            hint="name one run or file, and the store at last",
        )


def _matrix(
    given: Sequence[Path],
    store: Store,
    graphs: Sequence[Path],
    alone: bool,
    at: str,
    device: str,
    quiet: bool,
) -> tuple[str, Any, bool]:
    """Return a name, a row a record, and whether rows are scaled to length 1."""
    from tokmill.x86.features.baselines import baselines
    from tokmill.x86.features.learned_sums import sum_of
    from tokmill.x86.features.store_functions import store_functions

    if given:
        name, matrix = vectors_of(given[0], store, at=at, device=device, quiet=quiet)
        if alone or not graphs:
            return name, matrix, True
        rows = sum_of(SUMMED, store_functions(store, graphs), matrix)
        return f"{name} + {SUMMED}", rows, False
    if not graphs:
        raise UsageError(
            "the store was not built of graphs, and without them only tokens are known",
            where=str(store.path),
            hint="`tokmill cfg PROGRAMS -o GRAPHS`, then the same command with --graphs GRAPHS; or "
            "name a run",
        )
    return RANKER, baselines(store, graphs, [RANKER])[RANKER], False


def _address(text: str) -> int | None:
    if not text:
        return None
    try:
        result = int(text, 16)
    except ValueError:
        result = -1
    if not 0 <= result < 1 << 64:
        raise UsageError(f"--address: {text!r} is not an address", hint="--address 0x401000")
    return result
