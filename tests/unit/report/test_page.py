"""The HTML page: what is on it, and that nothing from a run can break out of it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from report_stores import write_run
from tokmill.base.errors import TokmillError, UsageError
from tokmill.report.pages.page import page

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balanced(HTMLParser):
    """Notes tags that are not closed in order, and ids that stand twice."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_runs_on_one_page(tmp_path: Path) -> None:
    lines: list[dict[str, float | None]] = [
        {"step": i, "loss": 3 - i / 10, "lr": 0.1} for i in range(1, 9)
    ]
    runs = [write_run(tmp_path / name, lines) for name in ("r1", "r2")]
    out = page(runs, tmp_path / "out/p.html")
    html = out.read_text()
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    figure_ids = [i for i in parser.ids if not i.startswith(("figure_", "axes_", "patch_", "line"))]
    named = [i for i in figure_ids if f"#{i}" in html]
    assert len(named) == len(set(named))
    assert html.count("<svg") == 1 + 2 * 2
    assert {"script", "img", "link", "iframe"}.isdisjoint(parser.tags)
    assert not re.search(r"(?:href|src)=\"(?:https?:)?//", html)
    assert "prefers-color-scheme: dark" in html
    before = out.read_bytes()
    again = page(runs, out).read_bytes()
    assert again == before


def test_texts_cannot_break_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / '<b onmouseover="x">&', [{"step": 1, "loss": 2.0}])
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["data"]["train"] = "</pre><script>alert(1)</script>"
    (run / "recipe.json").write_text(json.dumps(recipe))
    html = page([run], tmp_path / "p.html").read_text()
    assert "<script" not in html
    assert "&lt;/pre&gt;&lt;script&gt;" in html
    assert "<b onmouseover" not in html
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for name, what in (("a.txt", "holds no run"), ("b", "no such")):
        with pytest.raises(TokmillError, match=what) as caught:
            page([tmp_path / name], tmp_path / "p.html")
        assert caught.value.hint
    with pytest.raises(UsageError, match="nothing is named"):
        page([], tmp_path / "p.html")


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (
            [4.0, 3.0, 2.5, 2.4, 2.3],
            "Validation loss 2.3 after 50 of 50 steps. It was still falling",
        ),
        (
            [4.0, 2.0, 2.2, 2.3, 2.6],
            "Validation loss 2.6 after 50 of 50 steps. It was lowest at step 20: 2.",
        ),
        ([4.0, 2.0, 2.0, 2.0, 2.0], "It hardly changed in the last fifth."),
        ([-1.0, -2.0, -2.0, -2.0, -1.5], "It was lowest at step 20: -2."),
        ([4.0], "Validation loss 4 after 10 of 50 steps."),
        ([], "Loss 1.5 of training rows; of validation rows no store was named (--val)."),
    ],
)
def test_the_verdict_of_a_run(tmp_path: Path, losses: list[float], words: str) -> None:
    lines: list[dict[str, float | None]] = [
        {"step": 10 * i, "loss": 1.5, "lr": 0.1, "val_loss": loss}
        for i, loss in enumerate(losses, 1)
    ] or [{"step": 1, "loss": 1.5}]
    run = write_run(tmp_path / "run", lines)
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["run"]["steps"] = 50
    (run / "recipe.json").write_text(json.dumps(recipe))
    html = page([run], tmp_path / "p.html").read_text()
    assert words in html and ("Learning rate" in html) == bool(losses)


def test_a_run_that_diverged_has_a_page(tmp_path: Path) -> None:
    """Values that are not finite are null in the metrics."""
    lines: list[dict[str, float | None]] = [
        {"step": 1, "loss": 9.0, "grad_norm": None},
        {"step": 2, "val_loss": 800.0, "val_perplexity": None},
    ]
    html = page([write_run(tmp_path / "run", lines)], tmp_path / "p.html").read_text()
    assert "Validation loss 800 after 2 of 20 steps." in html and "Gradient norm" not in html
