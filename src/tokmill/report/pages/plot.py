"""Draws figures with matplotlib; no other file imports it."""

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.base.files import make_folder, write_file
from tokmill.report.pages.figures import (
    HIGHEST,
    LOWEST,
    Figure,
    Series,
    each_length,
    make,
    write_csv,
)

COLOURS = ("#3b7dd8", "#d9822b", "#2e9e6b", "#c2455f", "#8a63d2", "#7f8a93")
"""Colours of medium lightness, which are visible on white and on black."""
INK = "#0a0b0c"
"""Colour of axes and text; a page replaces it by its own, so no other colour is equal."""
SIZE = (7.2, 4.2)
FEW, FEWEST = 40, 1
"""Curves with at most so many points have marks; a curve of one point has a large one."""
SHAPES = ("o", "^", "s", "D")
"""Marks of points, one after the other for each round of the colours."""
MANY = 300
"""More points than these are small."""
UNSAID: dict[str, dict[str, None]] = {
    "svg": {"Date": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Metadata that are left out, because they would differ between equal figures."""
SUFFIXES, CSV = (".svg", ".png", ".pdf"), ".csv"


def plot(
    kind: str,
    paths: Sequence[Path],
    out: Path,
    *,
    column: str = "",
    vectors: str = "",
) -> Path:
    """Draw a figure of one of `plugins.FIGURES` into a file, and return its path.

    Args:
        out: an `.svg`, `.png` or `.pdf` file; a `.csv` for the numbers alone, and for `lengths` the
            length of each record.
        column: the column of `frequency` ("": the first), or of the colours of `tsne`.
        vectors: of `tsne`: an overlay or an .npy file.
    """
    if out.suffix.lower() not in (*SUFFIXES, CSV):
        raise UsageError(
            "a figure is an .svg, .png or .pdf file, its numbers are a .csv",
            where=str(out),
            hint=f"such as -o {kind}.svg",
        )
    if not paths:
        raise UsageError("nothing is named to draw", hint="give stores or runs")
    if out.suffix.lower() == CSV:
        rows: Any
        if kind == "lengths":
            rows = each_length(paths, column=column, vectors=vectors)
        else:
            rows = write_csv(make(kind, paths, column, vectors))
        make_folder(out.parent)
        return write_file(out, rows)
    plugins.require("matplotlib")
    figure = make(kind, paths, column, vectors)
    make_folder(out.parent)
    image = render(figure, out.suffix.lower()[1:])
    return write_file(out, image)


def render(figure: Figure, form: str, *, page: str = "") -> bytes:
    """Return a figure as the bytes of an `svg`, `png` or `pdf`; equal figures give equal bytes.

    With `page` (a unique word for each figure of a page) the SVG is for HTML: without header and
    background, in the colour and font of the page.
    """
    matplotlib = plugins.require("matplotlib")
    backend = plugins.require("matplotlib.backends.backend_agg")
    settings = {
        "svg.hashsalt": page or "tokmill",
        "svg.fonttype": "none" if page else "path",
        "font.family": ["DejaVu Sans"],
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    out = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Not what a matplotlibrc in the working directory says.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        # Names of files may have characters that the font lacks; they are drawn as boxes.
        warnings.simplefilter("ignore", UserWarning)
        canvas = plugins.require("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
        backend.FigureCanvasAgg(canvas)
        draw(figure, canvas.add_subplot(), title=not page)
        canvas.savefig(out, format=form, dpi=160, transparent=bool(page), metadata=UNSAID[form])
    return inline(out.getvalue().decode(), figure).encode() if page else out.getvalue()


def inline(svg: str, figure: Figure) -> str:
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace("'DejaVu Sans'", "sans-serif").replace("DejaVu Sans", "sans-serif")
    label = f"{figure.title}: {figure.y} by {figure.x}".replace('"', "'")
    label = label.replace("&", "&amp;").replace("<", "&lt;")
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{rest}'


def draw(figure: Figure, axes: Any, *, title: bool = True) -> None:
    for series in figure.series:
        DRAWN[figure.form](figure, axes, series)
    width = 1.6 if len(figure.marks) == 1 else 1.1
    for label, x, colour in figure.marks:
        ink = INK if len(figure.series) == 1 else _colour(colour)
        axes.axvline(x, color=ink, linestyle=":", linewidth=width, label=_safe(label))
    # matplotlib refuses an empty logarithmic axis.
    drawn = figure.form == "bars" or any(len(series.x) for series in figure.series)
    if figure.log_x and drawn:
        axes.set_xscale("log", base=figure.log_x)
    if figure.log_y and drawn:
        axes.set_yscale("log", base=figure.log_y)
    _ticks(figure, axes)
    if figure.form == "bars":
        axes.set_ylim(bottom=0)
        axes.set_xlim(figure.series[0].x[0], figure.series[0].x[-1])
    axes.set_xlabel(_safe(figure.x))
    axes.set_ylabel(_safe(figure.y))
    axes.grid(True, color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(_safe(figure.title), loc="left", fontsize=11, fontweight="bold")
    if len(figure.series) + len(figure.marks) > 1:
        # Points may lie anywhere: their legend stands beside them.
        outside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "markerscale": 1.8}
        axes.legend(frameon=False, fontsize=9, **(outside if figure.form == "points" else {}))


def _bars(figure: Figure, axes: Any, series: Series) -> None:
    alone = len(figure.series) == 1
    axes.stairs(
        series.y,
        series.x,
        fill=alone,
        color=_colour(series.colour),
        alpha=0.75 if alone else 1.0,
        linewidth=1.8,
        label=_safe(series.label),
    )


def _line(figure: Figure, axes: Any, series: Series) -> None:
    points = len(series.x)
    if LOWEST in series.more:
        low, high = series.more[LOWEST], series.more[HIGHEST]
        colour = _colour(series.colour)
        axes.fill_between(series.x, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        series.x,
        series.y,
        color=_colour(series.colour),
        linestyle=series.line,
        linewidth=1.6,
        marker="o" if points <= FEW else None,
        markersize=8 if points <= FEWEST else 3.5,
        label=_safe(series.label),
    )


def _points(figure: Figure, axes: Any, series: Series) -> None:
    count = sum(len(one.x) for one in figure.series)
    axes.scatter(
        series.x,
        series.y,
        s=30 if count <= MANY else 9,
        color=_colour(series.colour),
        marker=SHAPES[series.colour // len(COLOURS) % len(SHAPES)],
        alpha=0.8,
        linewidths=0,
        label=_safe(series.label),
    )


DRAWN = {"bars": _bars, "line": _line, "points": _points}


def _ticks(figure: Figure, axes: Any) -> None:
    ticker = plugins.require("matplotlib.ticker")
    plain = ticker.FuncFormatter(lambda value, _: "0" if value == 0.5 else f"{value:,.10g}")
    if figure.log_x == 2:
        # matplotlib would not label the bin of length 0, which begins at 0.5.
        low, high = figure.series[0].x[0], figure.series[0].x[-1]
        powers = [1 << k for k in range(int(high).bit_length() + 1) if low <= 1 << k <= high]
        powers = powers[:: -(-len(powers) // 12)]
        axes.xaxis.set_major_locator(ticker.FixedLocator([*([0.5] if low == 0.5 else []), *powers]))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    elif figure.log_x:
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        steps = [1, 2, 2.5, 5, 10]
        axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=8, integer=True, steps=steps))
    axes.xaxis.set_major_formatter(plain)
    if figure.percent:
        percent = ticker.FuncFormatter(lambda value, _: f"{100 * value:.6g}%")
        axes.yaxis.set_major_formatter(percent)
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    elif figure.log_y == 2:
        # Powers of two alone would leave an axis from 0.9 to 1.8 with one label.
        low, high = axes.get_ylim()
        if high < 8 * low:
            axes.yaxis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.6g}"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    elif not figure.log_y:
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _safe(label: str) -> str:
    """Return a label that matplotlib shows as it is: "$" begins a formula, "_" hides a label."""
    label = label.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label
