"""One HTML page about runs, which needs no network and no scripts."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import make_folder, write_file
from tokmill.base.progress import human_metric, human_time
from tokmill.report.comparison.compare_runs import compare
from tokmill.report.comparison.comparison_table import columns, text_rows
from tokmill.report.comparison.run_summaries import RunSummary, read_runs
from tokmill.report.describe.recogniser import short_names
from tokmill.report.describe.shown_records import Reader
from tokmill.report.pages import figures, schedules
from tokmill.report.pages.plot import render
from tokmill.store.store import Store
from tokmill.version import __version__

JUMPS = 10
SAMPLES = 3
NEW_TOKENS = 100
PROMPT_TOKENS = 24
SHAPE = ("model.dim", "model.layers", "model.heads", "task.length")
"""Keys of a run's recipe that describe the size of its model."""
HIDDEN = ("step", "seconds_left")
"""Metrics without meaning at the end of a run."""
MORE_CURVES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens a second",
}
"""Metric of a run → its name; they are drawn, folded, below the loss."""
CHANGE = 0.005
"""Smallest share by which a validation loss falls or rises that is said in words."""


@dataclass
class Table:
    """Rows of text; `numbers`: columns that are aligned to the right."""

    rows: list[list[str]]
    headers: list[str] = field(default_factory=list)
    title: str = ""
    numbers: list[int] = field(default_factory=list)


@dataclass
class Picture:
    """A figure as inline SVG with its caption."""

    title: str
    svg: Any
    caption: str


@dataclass
class Sample:
    """A record as text, with its origin as title."""

    title: str
    text: str


@dataclass
class Section:
    """The part of a page about one run, or about several together."""

    name: str
    what: str
    anchor: str
    problem: str = ""
    verdict: str = ""
    """What a reader wants to know first."""
    tables: list[Table] = field(default_factory=list)
    figures: list[Picture] = field(default_factory=list)
    more: list[Picture] = field(default_factory=list)
    """Folded figures."""
    samples: list[Sample] = field(default_factory=list)
    provenance: Table | None = None
    recipe: str = ""


def verdict(run: RunSummary) -> str:
    """Return the loss of a run in words, and where the loss of validation rows goes."""
    points = [(step, loss) for step, loss in run.points("val_loss") if np.isfinite(loss)]
    latest = run.latest
    if not points:
        loss = latest.get("loss")
        if loss is None:
            return ""
        reason = "none was evaluated yet" if run.flat["data.val"] else "no store was named (--val)"
        return f"Loss {loss:.4g} of training rows; of validation rows {reason}."
    step, last = points[-1]
    sentence = f"Validation loss {last:.4g}"
    if latest.get("val_perplexity") is not None:
        sentence += f", perplexity {latest['val_perplexity']:.4g}"
    sentence += f" after {step:,} of {run.steps:,} steps"
    best_step, best = min(points, key=lambda point: (point[1], point[0]))
    before = [loss for at, loss in points if at <= 0.8 * step]
    if last - best > CHANGE * abs(best):
        return f"{sentence}. It was lowest at step {best_step:,}: {best:.4g}."
    if before and before[-1] - last > CHANGE * abs(last):
        return f"{sentence}. It was still falling: more steps may help."
    return f"{sentence}. It hardly changed in the last fifth." if before else f"{sentence}."


def run_section(run: RunSummary, section: Section) -> Section:
    shapes = [
        f"{key.partition('.')[2]} {run.flat[key]:,}"
        for key in SHAPE
        if isinstance(run.flat.get(key), int) and run.flat[key]
    ]
    parameters = run.parameters
    pairs = [
        ["model", ", ".join([str(run.flat["model.kind"]), *shapes])],
        ["parameters", "not known" if parameters is None else f"{parameters:,}"],
        ["task", str(run.flat["task.kind"])],
        ["columns", ", ".join(f"{n} ({size:,} ids)" for n, size in run.facts.columns.items())],
        ["steps", f"{run.step:,} of {run.steps:,}"],
    ]
    # A policy reads no store.
    section.tables.append(Table([pair for pair in pairs if pair[1]]))
    learned = schedules.learns_schedules(run)
    hidden = (*HIDDEN, "targets", "tokens_per_second") if learned else HIDDEN
    rows = [
        [name.replace("_", " "), human_time(value) if name == "seconds" else human_metric(value)]
        for name, value in run.latest.items()
        if isinstance(value, int | float) and name not in hidden
    ]
    section.tables.append(Table(rows, title="Last metrics"))
    logged = any(entry.get("loss") is not None for entry in run.entries)
    if logged and learned:
        _schedules(run, section)
    elif logged:
        what = "Cross-entropy" if run.measures.loss.startswith("nats") else "The loss"
        caption = f"{what} by step; dashed: validation rows."
        section.figures.append(picture(figures.loss([run.path]), section, caption))
        section.verdict = verdict(run)
        _jumps(run, section)
        for name, words in MORE_CURVES.items():
            if any(np.isfinite(value) for _, value in run.points(name)):
                curves = figures.curves_of([run], {name: (words, "-")}, words)
                figure = figures.Figure(words.capitalize(), "step", words, "line", curves)
                section.more.append(picture(figure, section, ""))
    try:
        section.samples += run_samples(run)
    except TokmillError as error:
        # The rest of the page is still useful.
        section.problem = f"no samples: {error.what}"
    origin = [
        ["store", str(run.flat["data.train"])],
        ["fingerprint of the store", run.facts.fingerprint],
        ["checkpoints", ", ".join(run.checkpoints) or "none kept"],
    ]
    section.provenance = Table([pair for pair in origin if pair[1]])
    section.recipe = msgspec.json.format(msgspec.json.encode(run.recipe), indent=2).decode()
    return section


def _schedules(run: RunSummary, section: Section) -> None:
    try:
        rows = schedules.best(run)
        if rows:
            title = "Best schedules, by one measurement each; `rl eval` has IREE's default too"
            section.tables.append(Table(rows, schedules.HEADERS, title, [1, 2]))
    except TokmillError as error:
        # The rest of the page is still useful.
        section.problem = f"no schedules: {error.what}"
    caption = "Geometric means over modules. Large points: modules that the run held out."
    section.figures.append(picture(schedules.speedup([run.path]), section, caption))
    caption = "1: every legal action is as likely as any other."
    section.figures.append(picture(schedules.entropy([run.path]), section, caption))


def _jumps(run: RunSummary, section: Section) -> None:
    """Add the logged steps at which the loss or the gradient jumps, with documents of them."""
    jumps = sorted(run.jumps, key=lambda jump: jump.usual - jump.value)[:JUMPS]
    if not jumps or find_spec("torch") is None:
        return
    traced: Any = plugins.require("tokmill.report.describe.traced_steps")
    try:
        traced_jumps = list(traced.of_jumps(traced.Trace(run.path), sorted(jumps), SAMPLES))
    except TokmillError as error:
        # The rest of the page is still useful.
        section.problem = f"the steps with jumps cannot be traced: {error.what}"
        return
    rows = [
        [
            f"{jump['step']:,}",
            jump["metric"].replace("_", " "),
            human_metric(jump["value"]),
            human_metric(jump["usual"]),
            "\n".join(
                f"record {one['record']:,}, {traced.origin(one)}: {traced.preview(one)}"
                for one in jump["documents"]
            ),
        ]
        for jump in traced_jumps
    ]
    title = (
        f"Steps with jumps, the largest; `tokmill trace {run.path} --step N` shows all of a step"
    )
    headers = ["step", "", "value", "usual", f"the first {SAMPLES} documents"]
    section.tables.append(Table(rows, headers, title, [0, 2, 3]))


def run_samples(run: RunSummary) -> list[Sample]:
    """Return beginnings of records that the model continues; [] for a run without weights.

    The records are the first of the validation store, or else of the training store. If both are
    gone, the prompt is empty.
    """
    if (
        not run.measures.continues
        or not run.sampling
        or run.final is None
        or find_spec("torch") is None
    ):
        return []
    stores = [run.flat["data.val"], run.flat["data.train"]]
    reader = None
    for place in filter(None, stores):
        with contextlib.suppress(TokmillError):
            reader = Reader(Store(place if isinstance(place, str) else place[0]))
            break
    numbers = range(min(SAMPLES, reader.store.records)) if reader is not None else range(0)
    prompts: list[Any] = [""]
    texts, titles = [""], ["An empty prompt"]
    if reader is not None and numbers:
        records = [reader.store.record(number) for number in numbers]
        prompts = [
            {name: record[name][:PROMPT_TOKENS].tolist() for name in run.facts.columns}
            for record in records
        ]
        texts = [reader.show(number, PROMPT_TOKENS).get("text", "") for number in numbers]
        titles = [f"The first {PROMPT_TOKENS} tokens of record {number:,}" for number in numbers]
    generate = plugins.require("tokmill.inference.sample").generate
    continuations = generate(run.path, prompts, NEW_TOKENS, temperature=0.8, seed=0)
    return [
        Sample(
            f"{title}, and after ▶ the text of the model (temperature 0.8)", f"{text} ▶{one.text}"
        )
        for title, text, one in zip(titles, texts, continuations, strict=True)
    ]


def picture(figure: figures.Figure, section: Section, caption: str) -> Picture:
    # The ids in an SVG are made from this word, and must be unique in a page.
    word = f"{section.anchor}-{len(section.figures)}-{figure.title}-{caption}"
    markup = plugins.require("markupsafe").Markup(render(figure, "svg", page=word).decode())
    return Picture(figure.title, markup, caption)


def page(paths: Sequence[Path], out: Path, *, refresh: int = 0) -> Path:
    """Write a page about runs, and return its path.

    Args:
        refresh: seconds after which a browser reads the page again; 0: never.
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
