"""One HTML page about stores and runs, which needs no network and no scripts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.base.files import make_folder, write_file
from tokmill.report.comparison.compare_runs import compare
from tokmill.report.comparison.comparison_table import columns, text_rows
from tokmill.report.comparison.run_summaries import find_runs
from tokmill.report.describe.inspect import describe
from tokmill.report.describe.recogniser import Facts, short_names
from tokmill.report.pages import figures
from tokmill.report.pages.sections import (
    Section,
    Table,
    picture,
    run_section,
    store_section,
)
from tokmill.version import __version__


def page(
    paths: Sequence[Path],
    out: Path,
    *,
    advance: Callable[[int], None] | None = None,
    refresh: int = 0,
) -> Path:
    """Write a page about stores and runs, and return its path.

    Args:
        paths: stores and runs; a folder of runs means the runs in it. Runs come first.
        out: the `.html` file.
        advance: called with the bytes of each shard that was counted.
        refresh: seconds after which a browser reads the page again; 0: never.

    Raises:
        UsageError: there is no path, or one is of another kind.
    """
    if not paths:
        raise UsageError("nothing is named to report on", hint="give stores or runs")
    plugins.require("matplotlib")
    html = template()
    kinds = {path: describe(path) for given in paths for path in _expand(given)}
    makers: dict[str, Callable[[Path, Facts, Section], None]] = {
        "store": lambda path, facts, s: store_section(path, facts, s, advance),
        "run": run_section,
    }
    sections = sections_of(kinds, makers)
    with_loss = [
        f["kind"] == "run" and f["metrics"].get("loss") is not None for f in kinds.values()
    ]
    runs = list(itertools.compress(kinds, with_loss))
    names = [section.name for section in sections]
    if len(runs) > 1:
        sections.insert(0, compared_section(runs))
    text = html.render(
        title=f"Report on {', '.join(names)}",
        version=__version__,
        sections=sections,
        refresh=refresh,
    )
    make_folder(out.parent)
    return write_file(out, text)


def sections_of(
    kinds: Mapping[Path, Facts], makers: Mapping[str, Callable[[Path, Facts, Section], None]]
) -> list[Section]:
    """Return a section for each path, those of runs first."""
    paths = sorted(kinds, key=lambda path: kinds[path]["kind"] != "run")
    sections = []
    for number, (path, name) in enumerate(zip(paths, short_names(paths), strict=True)):
        facts = kinds[path]
        kind = facts["kind"].removeprefix("partial ")
        if kind not in makers:
            raise UsageError(
                f"a report is about stores and runs; this is {facts['what']}",
                where=str(path),
                hint="`tokmill inspect` says more about it",
            )
        section = Section(name, facts["what"], f"part-{number}")
        section.problem = facts.get("problem", "")
        makers[kind](path, facts, section)
        sections.append(section)
    return sections


def template() -> Any:
    jinja = plugins.require("jinja2")
    environment = jinja.Environment(
        loader=jinja.PackageLoader("tokmill", "report/pages"),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


def compared_section(runs: Sequence[Path]) -> Section:
    """Return the section of several runs: a table, and their losses on the same axes."""
    together = Section("Runs together", f"{len(runs)} runs on the same axes", "runs")
    compared = compare(runs)
    together.problem = "; ".join(compared.notes)
    headers, rows = text_rows(compared)
    numbers = [i for i, column in enumerate(columns(compared)) if column.right]
    together.tables.append(Table(rows, headers, "Seeds together", numbers))
    caption = "Dashed: validation rows. Bands: from the lowest to the highest of the seeds."
    together.figures.append(picture(figures.loss(runs), together, caption))
    return together


def _expand(path: Path) -> list[Path]:
    """Return the runs in a plain folder, or else the path."""
    is_plain = path.is_dir() and describe(path)["kind"] in ("runs", "folder")
    return (find_runs(path) if is_plain else []) or [path]
