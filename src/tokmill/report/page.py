"""One HTML page of stores, runs and tokenizers: readable without network or script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokmill import __version__, plugins
from tokmill.errors import UsageError
from tokmill.files import make_folder, write_file
from tokmill.report import figures
from tokmill.report.inspect import describe
from tokmill.report.look import Facts
from tokmill.report.sections import (
    Section,
    picture,
    run_section,
    store_section,
    tokenizer_section,
)


def page(
    paths: Sequence[Path],
    out: Path,
    *,
    title: str = "",
    width: int = 1024,
    sample: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> Path:
    """Write a page about stores, runs and tokenizers, and return its path.

    Args:
        paths: what it is about, in this order.
        out: the `.html` file.
        title: its heading; empty: made of the names.
        width: row length for the figures of padding.
        sample: read so many shards of each store; None: all.
        advance: called with the bytes of each shard that was counted.

    Raises:
        UsageError: a path is none of these kinds, or none was named.
    """
    if not paths:
        raise UsageError("nothing was named to report on", hint="give stores, runs or tokenizers")
    jinja = plugins.require("jinja2")
    plugins.require("matplotlib")
    found = [describe(path) for path in paths]
    makers: dict[str, Callable[[Path, Facts, Section], None]] = {
        "store": lambda path, facts, s: store_section(path, facts, s, width, sample, advance),
        "run": run_section,
        "tokenizer": tokenizer_section,
    }
    sections = []
    for number, (path, facts) in enumerate(zip(paths, found, strict=True)):
        kind = facts["kind"].removeprefix("partial ")
        if kind not in makers:
            raise UsageError(
                f"a report is about stores, runs and tokenizers; this is {facts['what']}",
                where=str(path),
            )
        section = Section(path.absolute().name, facts["what"], f"part-{number}")
        section.problem = facts.get("problem", "")
        makers[kind](path, facts, section)
        sections.append(section)
    runs = [
        path
        for path, facts in zip(paths, found, strict=True)
        if facts["kind"] == "run" and facts["metrics"].get("loss") is not None
    ]
    if len(runs) > 1:
        together = Section("Runs together", f"{len(runs)} runs on the same axes", "runs")
        together.figures.append(picture(figures.loss(runs), together, "Dashed: validation rows."))
        sections.append(together)
    environment = jinja.Environment(
        loader=jinja.PackageLoader("tokmill", "report"),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ", ".join(path.absolute().name for path in paths)
    html = environment.get_template("page.html.j2").render(
        title=title or f"Report on {names}",
        version=__version__,
        sections=sections,
        sampled=sample is not None,
    )
    make_folder(out.parent)
    return write_file(out, html)
