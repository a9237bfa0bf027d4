"""One HTML page about runs, which needs no network and no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.base.files import make_folder, write_file
from tokmill.report.comparison.compare_runs import compare
from tokmill.report.comparison.comparison_table import columns, text_rows
from tokmill.report.comparison.run_summaries import read_runs
from tokmill.report.describe.recogniser import short_names
from tokmill.report.pages import figures
from tokmill.report.pages.sections import Section, Table, picture, run_section
from tokmill.version import __version__


def page(paths: Sequence[Path], out: Path, *, refresh: int = 0) -> Path:
    """Write a page about runs, and return its path.

    Args:
        paths: runs, and folders of runs.
        out: the `.html` file.
        refresh: seconds after which a browser reads the page again; 0: never.

    Raises:
        UsageError: there is no path.
        TokmillError: a path holds no run, or a run is damaged.
    """
    if not paths:
        raise UsageError("nothing is named to report on", hint="give runs")
    plugins.require("matplotlib")
    html = template()
    runs = read_runs(paths)
    names = short_names([run.path for run in runs])
    sections = [
        run_section(run, Section(name, run.state, f"part-{number}"))
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    with_loss = [run.path for run in runs if run.latest.get("loss") is not None]
    if len(with_loss) > 1:
        sections.insert(0, compared_section(with_loss))
    text = html.render(
        title=f"Report on {', '.join(names)}",
        version=__version__,
        sections=sections,
        refresh=refresh,
    )
    make_folder(out.parent)
    return write_file(out, text)


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
