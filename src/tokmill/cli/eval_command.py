"""Commands on a run and data: `tokmill eval`, `predict` and `embed`."""

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from tokmill.base.errors import UsageError
from tokmill.base.files import read_file, write_file
from tokmill.base.progress import human_metric, human_share
from tokmill.terminal.frame import AsJson, At, Device, Quiet, RunFolder
from tokmill.terminal.output import check_outputs, print_json, print_line, print_table, say

MOST_CLASSES = 12
"""Classes that are listed at most, where there are too many for a matrix."""


def evaluate(
    run: RunFolder,
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="A store with the run's vocabulary.")
    ],
    at: At = "last",
    by: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="Also report the loss for each value of this record column, such as project or "
            "program.",
        ),
    ] = "",
    rows: Annotated[
        int, typer.Option(metavar="N", min=0, help="Evenly spaced rows; 0: every token once.")
    ] = 0,
    device: Device = "auto",
    partial: Annotated[bool, typer.Option("--partial", help="Accept an unfinished store.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate the loss of a run on a store, by column, and the loss of the unigram baseline."""
    from tokmill.training import evaluate as module

    results = module.evaluate(
        run, store, at=at, rows=rows, device=device, partial=partial, by=by, quiet=quiet
    )
    if as_json:
        print_json(results)
        return
    of_class = ("f1_", "count_", "found_") if "classes" in results else ()
    names = {f"{kind}{one['class']}" for one in results.get("classes", ()) for kind in of_class}
    names.discard("f1_macro")
    numbers = {k: v for k, v in results.items() if isinstance(v, int | float) and k not in names}
    shown = {k: human_metric(v) for k, v in numbers.items()}
    print_table(["measure", "value"], [[name, value] for name, value in shown.items()])
    _print_columns(results)
    _print_classes(results)
    if "by" in results:
        _print_values(results["by"])
    for note in results["notes"]:
        say(f"note: {note}")


def _print_values(by: Mapping[str, Any]) -> None:
    print()
    heads, cells = _losses(by["values"])
    rows = [
        [line["value"], line["targets"], *more]
        for line, more in zip(by["values"], cells, strict=True)
    ]
    print_table([by["column"], "targets", *heads], rows)


def _print_columns(results: Mapping[str, Any]) -> None:
    columns: dict[str, Any] = dict(results.get("columns", {}))
    if not columns:
        return
    predicted = "hidden_token" if "hidden_token" in results else "next_token"
    if len(columns) > 1:
        columns["all of them"] = results[predicted]
    heads, cells = _losses(list(columns.values()))
    print()
    print_table(
        [predicted.replace("_", " "), *heads, "perplexity", "right"],
        [
            [name, *more, values.get("perplexity", ""), human_share(values["accuracy"])]
            for (name, values), more in zip(columns.items(), cells, strict=True)
        ],
    )


def _print_classes(results: Mapping[str, Any]) -> None:
    classes = results.get("classes", [])
    if "confusion" in results:
        names = [one["class"] for one in classes]
        lines = zip(names, results["confusion"], strict=True)
        second = [
            {"class, predicted as": a, **dict(zip(names, row, strict=True))} for a, row in lines
        ]
    else:
        second = results.get("confused", [])
        if len(classes) > MOST_CLASSES:
            say(f"note: of {len(classes):,} classes those with the lowest F1: --json has all")
        classes = sorted(classes, key=itemgetter("f1"))[:MOST_CLASSES]
    for table in filter(None, (classes, second)):
        print()
        print_table([*table[0]], [[*line.values()] for line in table])


def _losses(lines: list[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    if any(line["unigram"] is None for line in lines):
        return ["loss"], [[line["loss"]] for line in lines]
    return (
        ["loss", "unigram", "better"],
        [[line["loss"], line["unigram"], line["loss"] < line["unigram"]] for line in lines],
    )


INPUT = (
    "A store; a file of the kind that the run's store was built from, with labels or without; or "
    "-, for lines of text from stdin (two sentences are separated by a tab)."
)


def predict(
    run: RunFolder,
    input: Annotated[Path, typer.Argument(metavar="INPUT", help=INPUT)],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE.csv", help="Write CSV."),
    ] = None,
    at: At = "last",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Print the class of each record with a run of the task `classify`, and all probabilities."""
    if out is not None and out.suffix != ".csv":
        raise UsageError("what is written is CSV", where=str(out), hint="-o FILE.csv, or --json")
    check_outputs({"-o": out}, [input])
    head = read_file(out, 10) if out is not None and out.is_file() else b""
    if head and not head.startswith(b"record,"):
        hint = "move it, or name another file"
        raise UsageError("it holds no answers of `predict`", where=str(out), hint=hint)
    from tokmill.inference import predict as module
    from tokmill.report.comparison.comparison_table import csv_text

    predictions = module.predict(run, input, at=at, device=device, quiet=quiet)
    rows = list(predictions.rows())
    heads = [*predictions.keys, "label", *(f"p({name})" for name in predictions.names)]
    cells = [[*row.values()][:-1] + [*row["probabilities"].values()] for row in rows]
    if out is not None:
        write_file(out, csv_text([heads, *cells]))
        say(f"{out}: written")
    if as_json:
        about = {"run": str(run), "step": predictions.step, "classes": predictions.names}
        print_json({**about, "records": rows, "notes": predictions.notes})
    elif out is None:
        print_table(heads, cells)
    for note in predictions.notes:
        say(f"note: {note}")


def embed(
    run: RunFolder,
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="A store with the run's vocabularies.")
    ],
    pool: Annotated[
        str,
        typer.Option(
            metavar="auto|mean|last|signature",
            help="Pooling of the hidden states of a record; auto: that of the training, else mean.",
        ),
    ] = "auto",
    at: At = "last",
    device: Device = "auto",
    name: Annotated[
        str, typer.Option(help="Name of the overlay; by default pooling and digest of the model.")
    ] = "",
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Positions per batch.", show_default="16384"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start the overlay over.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compute a vector for every record with a trained model, as an overlay of the store."""
    from tokmill.inference import embed as module
    from tokmill.inference.vectors import BATCH_TOKENS

    vectors = module.embed_store(
        run,
        store,
        pool=cast(Any, pool),
        at=at,
        name=name,
        device=device,
        batch_tokens=batch_tokens or BATCH_TOKENS,
        fresh=fresh,
        quiet=quiet,
    )
    if vectors.empty:
        say(f"records without tokens (zero vectors): {vectors.empty:,}")
    if as_json:
        print_json(vectors)
        return
    place = f"{store}: overlay {vectors.overlay}"
    print_line(f"{place}: {vectors.records:,} vectors of {vectors.width:,}, step {vectors.step:,}")
