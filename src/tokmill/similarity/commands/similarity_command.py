"""`tokmill similarity`: eval, score; query and index are in `similarity_query`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.similarity.commands.similarity_query import Alone, Graphs, index, query
from tokmill.similarity.commands.similarity_tables import print_evaluation
from tokmill.similarity.commands.similarity_vectors import baselines_of, vectors_of
from tokmill.similarity.evaluation import Choice
from tokmill.similarity.evaluation import evaluate as run
from tokmill.similarity.functions import functions_of, of_functions
from tokmill.similarity.keys_csv import read_keys
from tokmill.similarity.pairing import MIN_BLOCKS
from tokmill.similarity.pool_measures import RANDOM, RESAMPLES, Method
from tokmill.similarity.vector_rows import Rows, read_vectors
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.terminal.frame import AsJson, At, Device, Quiet, group_of
from tokmill.terminal.output import print_json, say

Pairs = Annotated[
    str,
    typer.Option(
        metavar="O0-O3,…",
        help="Pairs of levels, or of compilers such as gcc-clang O2.",
        show_default="O0-O3, O1-O3, O2-O3, O0-Os, O1-Os, O2-Os, or all pairs of levels if there "
        "are none of these; all compilers",
    ),
]
Projects = Annotated[
    str,
    typer.Option(
        metavar="NAME,…",
        help="Only functions of these projects are queries; those of others are only negatives.",
        show_default="all",
    ),
]
MinBlocks = Annotated[
    int, typer.Option(min=0, metavar="N", help="Leave out functions of fewer basic blocks.")
]


def evaluate(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUN|F.npy]… STORE",
            help="Runs or files of vectors, then the store of the functions. Without "
            "vectors: only baselines.",
            show_default=False,
        ),
    ],
    pairs: Pairs = "",
    projects: Projects = "",
    graphs: Graphs = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this baseline, and chance. May be repeated.",
            show_default="all",
        ),
    ] = None,
    alone: Alone = False,
    min_blocks: MinBlocks = MIN_BLOCKS,
    at: At = "last",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate the retrieval of functions compiled in another way: MRR, recall and baselines."""
    choice = Choice(rows=_words(pairs), projects=_words(projects), min_blocks=min_blocks)
    *given, place = paths
    store = Store(place).whole()
    functions = functions_of(store)
    vectors = _named(given, store, at=at, device=device, quiet=quiet)
    methods = [
        Method(name, Rows(of_functions(functions, matrix)), False)
        for name, matrix in vectors.items()
    ]
    methods += baselines_of(functions, store, graphs or [], baseline, {} if alone else vectors)
    evaluation = run(functions, methods, choice, fingerprint=store.fingerprint, quiet=quiet)
    if as_json:
        print_json(evaluation)
    else:
        print_evaluation(evaluation)


def score(
    vectors: Annotated[Path, typer.Argument(metavar="VECTORS.npy", help="A vector a row.")],
    keys: Annotated[
        Path,
        typer.Argument(
            metavar="KEYS.csv",
            help="One line per vector: project, function, compiler, level; optionally program, "
            "version, blocks, code.",
        ),
    ],
    pairs: Pairs = "",
    resamples: Annotated[
        int, typer.Option(min=0, metavar="N", help="Bootstrap samples for intervals; 0: none.")
    ] = RESAMPLES,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate vectors of any program, from a numpy file and a table of their functions."""
    choice = Choice(rows=_words(pairs), resamples=resamples)
    functions, unread = read_keys(keys)
    matrix = read_vectors(vectors, len(functions))
    if unread:
        say(f"note: {keys}: columns that are not read: {', '.join(unread)}")
    if functions.code is None:
        say(f"note: {keys}: without a column `code`, functions of the same code stay in the pools")
    methods = [Method(vectors.stem, Rows(matrix), False), Method(RANDOM, None, True)]
    evaluation = run(functions, methods, choice, quiet=quiet)
    if as_json:
        print_json(evaluation)
    else:
        print_evaluation(evaluation)


def _named(paths: list[Path], store: Any, **how: Any) -> dict[str, Array]:
    vectors: dict[str, Array] = {}
    for path in paths:
        name, matrix = vectors_of(path, store, **how)
        vectors[str(path) if name in vectors else name] = matrix
    return vectors


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


app = group_of(
    "similarity",
    "Find similar functions, and measure how well that works.",
    {"eval": evaluate, "score": score, "query": query, "index": index},
)
