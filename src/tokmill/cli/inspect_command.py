"""`tokmill inspect`, `compare`, `plot`, `report`, `doctor` and `demo`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.base.errors import UsageError, check_name, one_line
from tokmill.base.progress import Progress, human_bytes, human_count, human_share
from tokmill.report.describe.shown_records import fact_in_words, input_in_words
from tokmill.store.checks.stats import Statistics
from tokmill.terminal.frame import AsJson
from tokmill.terminal.output import in_words, print_json, print_table, say

WIDTH = 1024
Width = Annotated[int, typer.Option(help="Row length, for the share of padding.")]


Head = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Show the first N records of a store (default with --where: 5), or entries of a "
        "pickle (default: 3).",
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Read the store and compute its statistics.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="'COLUMN OP VALUE'",
        help="Show records whose value fits; OP: = != < <= > >= or ~ (a regular expression). "
        "May be repeated.",
    ),
]
Overlay = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Show columns of an overlay too. May be repeated."),
]


def inspect(
    path: Annotated[Path, typer.Argument(metavar="ANY", help="A file or folder of any kind.")],
    head: Head = None,
    stats: Stats = False,
    width: Width = WIDTH,
    where: Where = None,
    overlay: Overlay = None,
    as_json: AsJson = False,
) -> None:
    """Describe a file or folder of any kind; show records and statistics of a store."""
    from tokmill.report.describe.inspect import describe
    from tokmill.report.describe.recogniser import ENTRIES
    from tokmill.store.store import Store

    facts = describe(path, ENTRIES if head is None else head, quiet=False)
    is_store = facts["kind"] in ("store", "partial store")
    shows_entries = is_store or facts["kind"] == "pickle"
    of_store = stats or where or overlay
    if (not shows_entries and head is not None) or (not is_store and of_store):
        raise UsageError(
            "--stats, --where and --overlay are for stores, --head for stores and pickles; "
            f"this is {facts['what']}",
            where=str(path),
            hint=f"tokmill inspect {path}",
        )
    if width != WIDTH and not stats:
        raise UsageError("--width goes with --stats", hint="leave it out, or add --stats")
    if overlay:
        Store(path, overlay)  # a wrong name is an error even if nothing of it is shown
    if head is None and where:
        head = 5
    if is_store and head is not None:
        facts["head"], matches = _records(path, overlay or [], head, where or [], whole=as_json)
        if where:
            facts["matching"] = matches
    if stats:
        facts["statistics"] = _statistics(path, overlay or [], width)
    if as_json:
        print_json(facts)
        return
    shown = dict(facts)
    records, statistics = shown.pop("head", None), shown.pop("statistics", None)
    matches = shown.pop("matching", 0)
    if records is None and statistics is None:
        print_facts(shown)
    if records is not None:
        print_records(records)
        if len(records) < matches:
            say(f"{len(records):,} of {matches:,} shown; --head {matches} shows all")
    if statistics is not None:
        print_statistics(statistics, _token_lists(path))


def plot(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="lengths, frequency, loss, tsne, phases, speedup, entropy.",
        ),
    ],
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="ANY…",
            help="Stores, vocabularies, pickles, runs; for `tsne` also basic block vectors.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="An .svg, .png or .pdf file, or a .csv of the numbers.",
        ),
    ],
    column: Annotated[
        str,
        typer.Option(
            help="Column for `frequency` (default: the first), or for the colours of `tsne`."
        ),
    ] = "",
    vectors: Annotated[
        str,
        typer.Option(
            metavar="OVERLAY|F.npy",
            help="For `tsne`: the vectors of the store's records; else basic block vectors.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Draw a figure: lengths of records, frequency of ids, loss, vectors, …"""
    from tokmill.report.pages import plot as plots

    written = plots.plot(kind, paths, out, column=column, vectors=vectors)
    if as_json:
        print_json({"kind": kind, "written": [str(written)]})
    else:
        print(written)


def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Runs, and folders of runs.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="PAGE", help="An .html file.")],
    watch: Annotated[
        int,
        typer.Option(
            metavar="SECONDS", min=0, help="Rewrite at this interval until all runs have finished."
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about runs."""
    from tokmill.report.comparison.run_summaries import read_runs
    from tokmill.report.pages.page import page

    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError("a report is an .html file", where=str(out), hint="such as -o page.html")
    # A page of runs that go on is read again by the browser; the last page is not.
    while watch and not all(run.finished for run in read_runs(paths)):
        page(paths, out, refresh=watch)
        time.sleep(watch)
    written = page(paths, out)
    if as_json:
        print_json({"written": [str(written)], "bytes": written.stat().st_size})
    else:
        print(written)


def doctor(as_json: AsJson = False) -> None:
    """Check the machine and the installed packages; exit code 1 if a check failed."""
    from tokmill.doctor import examine

    checks = examine()
    failed = [check for check in checks if check.state == "failed"]
    if as_json:
        print_json({"ok": not failed, "checks": checks})
    else:
        print_table(["check", "", "found"], [[c.name, c.state, c.found] for c in checks])
        for check in checks:
            if check.hint:
                say(f"hint: {check.name}: {check.hint}")
    if failed:
        raise typer.Exit(1)


def _records(
    path: Path, overlays: list[str], most: int, where: list[str], *, whole: bool
) -> tuple[list[dict[str, Any]], int]:
    from tokmill.report.describe.shown_records import Reader, matching
    from tokmill.store.store import Store

    store = Store(path, overlays)
    reader = Reader(store)
    if reader.talk:
        say(*reader.talk.splitlines())
    unknown: Counter[str] = Counter()
    numbers = matching(store, where, unknown)
    shown = [reader.show(n, None if whole else 400) for n in itertools.islice(numbers, most)]
    # Without a condition all records match, and need not be read.
    matches = len(shown) + sum(1 for _ in numbers) if where else len(store)
    for condition, count in (+unknown).items():
        say(f"{condition}: {count:,} of {len(store):,} values are not numbers")
    return shown, matches


def _token_lists(path: Path) -> dict[str, list[str]]:
    from tokmill.report.describe.shown_records import Reader
    from tokmill.store.store import Store

    store = Store(path)
    # A tokenizer is not a list of tokens, and loads slowly.
    if any(one.coder == "tokenizer" for one in store.vocabularies.values()):
        return {}
    return Reader(store).lists


def _statistics(path: Path, overlays: list[str], width: int) -> Any:
    from tokmill.store.checks.stats import statistics
    from tokmill.store.store import Store

    store = Store(path, overlays)
    with Progress("statistics", store.manifest.bytes) as bar:
        return statistics(store, width, advance=bar.advance)


def print_facts(facts: dict[str, Any]) -> None:
    """Print facts as name and value, and lists of dicts as tables below."""
    lists = {k: v for k, v in facts.items() if isinstance(v, list) and v}
    tables = {k: v for k, v in lists.items() if all(isinstance(one, dict) for one in v)}
    rows = []
    for name, value in facts.items():
        if name in tables or name == "recipe" or value in (None, {}, []):
            continue
        if name == "vocabularies":
            shown = [_vocabulary(key, one) for key, one in value.items()]
        elif name.endswith("bytes") and type(value) is int:
            shown = [human_bytes(value)]
        else:
            shown = [_text(value)]
        rows.append((name.replace("_", " "), shown))
    width = max((len(name) for name, _ in rows), default=0)
    for name, shown in rows:
        for number, line in enumerate(shown):
            print(f"{'' if number else name:{width}}  {one_line(line)}")
    for name, value in tables.items():
        headers = list(dict.fromkeys(key for entry in value for key in entry))
        print(f"\n{name.replace('_', ' ')}")
        print_table(headers, [[_text(entry.get(key)) for key in headers] for entry in value])


def print_records(records: list[dict[str, Any]]) -> None:
    if not records:
        print("no record")
    for i, record in enumerate(records):
        facts = [f"record {record['record']:,}", human_count(record["tokens"], "token")]
        if "from" in record:
            facts.append(one_line(input_in_words(record)))
        print(("\n" if i else "") + "-- " + ", ".join(facts))
        for name, value in record.items():
            if name in ("record", "tokens", "from", "at"):
                continue
            if isinstance(value, list):
                cut = " …" if 0 < len(value) < record["tokens"] and len(value) == 400 else ""
                print(f"{name}: {' '.join(map(str, value))}{cut}")
            elif name == "text":
                print(value + (" …" if record["tokens"] > 400 else ""))
            else:
                print(fact_in_words(name, value))


def print_statistics(stats: Statistics, tokens: Mapping[str, list[str]]) -> None:
    """Print the statistics of a store; `tokens`: column → its tokens by id, if they are known."""
    lengths = stats.lengths
    left_out = {**stats.skipped, **{f"{k} (rejected)": n for k, n in stats.rejected.items()}}
    rows = [
        ["records", f"{stats.records:,}"],
        ["tokens", f"{stats.tokens:,}"],
        ["shards read", f"{stats.shards:,}"],
        ["shortest, longest", f"{lengths.min:,}, {human_count(lengths.max, 'token')}"],
        ["mean, median", f"{lengths.mean:,.1f}, {lengths.median:,.1f} tokens"],
        ["90%, 99% quantile", f"{lengths.p90:,}, {lengths.p99:,} tokens"],
        [f"rows of {stats.width:,}", f"{stats.rows:,}, {human_share(stats.padding, 2)} padding"],
        [f"longer than {stats.width:,}", f"{human_share(stats.longer, 2)} of the records"],
        ["empty", human_count(stats.empty, "record")],
    ]
    if stats.bytes_per_token is not None:
        rows.append(["bytes per token", f"{stats.bytes_per_token:.3f}"])
    rows.append(["left out", ", ".join(f"{n:,} {why}" for why, n in left_out.items()) or "nothing"])
    print_table(["figure", ""], rows)
    for name, use in stats.columns.items():
        share = "" if use.used is None else f" ({human_share(use.used, 2)})"
        of = "" if use.vocabulary is None else f" of {use.vocabulary:,}{share}"
        print(f"\n{name}: {human_count(use.unique, 'id')}{of}")
        if use.unknown is not None:
            print(f"unknown: {human_share(use.unknown, 4)} of the tokens")
        if use.eot is not None:
            print(f"eot: {human_count(use.eot, 'token')}")
        first = use.frequent[:10]
        columns: dict[str, list[Any]] = {"id": [number for number, _, _ in first]}
        if names := tokens.get(name):
            columns["token"] = [names[i] if i < len(names) else "" for i in columns["id"]]
        columns["tokens"] = [count for _, count, _ in first]
        columns["share"] = [human_share(share, 2) for _, _, share in first]
        print_table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])
    for name in stats.not_counted:
        print(f"\n{name}: its ids are too large to be counted")


def _vocabulary(name: str, facts: dict[str, Any]) -> str:
    roles = ", ".join(f"{role} {number}" for role, number in facts["roles"].items())
    line = f"{name}: {facts['size']:,} ids, {facts['file']}, sha256 {facts['sha256'][:12]}"
    return f"{line}, roles {roles}" if roles else line


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return in_words(value)


FORMATS = ("table", "latex")


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Runs, and folders of runs.")],
    metric: Annotated[
        str,
        typer.Option(help="A name in metrics.jsonl.", show_default="val_loss, or else loss"),
    ] = "",
    at: Annotated[
        str,
        typer.Option(
            metavar="best|last|STEP", help="The value at a step, or the best of each run."
        ),
    ] = "last",
    form: Annotated[
        str, typer.Option("--format", metavar="FORM", help="table or latex.")
    ] = "table",
    as_json: AsJson = False,
) -> None:
    """Compare runs, with the mean over seeds and its 95 % confidence interval."""
    from tokmill.report.comparison import comparison_table as tables
    from tokmill.report.comparison.compare_runs import compare as compare_runs

    check_name("no format is", form, FORMATS)
    comparison = compare_runs(paths, metric, at)
    if as_json:
        print_json(tables.as_json(comparison))
    elif form == "latex":
        sys.stdout.write(tables.write_latex(comparison))
    else:
        headers, rows = tables.text_rows(comparison)
        print_table(headers, rows)
    for note in comparison.notes:
        say(f"note: {note}")


def demo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the output.")] = Path(
        "demo"
    ),
) -> int:
    """From real text and real programs to two trained models and a report, in about four minutes.

    It runs a short shell script, which prints each command. The same command again resumes.
    """
    for package in ("gigatoken", "torch", "iced_x86", "matplotlib"):
        with plugins.extras():
            if find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
    here = Path(__file__).parents[1]
    # In a wheel the examples are in the package, in a clone of the repository at its root.
    root = here if (here / "examples").is_dir() else here.parents[1]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        ["sh", str(root / "examples/demo/demo.sh"), str(folder)],
        env={**os.environ, "PATH": programs},
    ).returncode
