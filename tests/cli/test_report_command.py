"""A report on a real run: what the model is, its metrics in plain numbers, how it continues."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toy import text_store


def test_a_run(tmp_path: Path, tokmill: Callable[..., Any]) -> None:
    store = text_store(tmp_path / "store", ["one two three four " * 9] * 20)
    small = ["model.dim=16", "model.layers=1", "task.length=16"]
    options = [word for setting in small for word in ("--set", setting)]
    tokmill("train", store, "-o", "run", "--val", store, "--steps", 3, *options)
    done = tokmill("report", "run", "-o", "page.html", "--json")
    assert json.loads(done.stdout)["written"] == ["page.html"]
    html = (tmp_path / "page.html").read_text()
    assert "decoder, dim 16, layers 1" in html
    assert re.search(r"parameters</th>\s*<td>[\d,]{5,}</td>", html)
    metrics = html[html.index("Last metrics") : html.index("<figure>")]
    assert not re.search(r"\de\+\d", metrics), "large numbers are written out"
    assert html.count("The first 24 tokens of record") == 3
    assert html.count("one two") >= 3 and "▶" in html


def test_a_run_whose_store_is_gone_and_one_whose_weights_are(
    tmp_path: Path, tokmill: Callable[..., Any]
) -> None:
    store = text_store(tmp_path / "store", ["one two three four " * 9] * 20)
    tokmill("train", store, "-o", "run", "--steps", 2, "--set", "model.dim=16", "--set",
            "model.layers=1")  # fmt: skip
    store.rename(tmp_path / "elsewhere")
    tokmill("report", "run", "-o", "page.html")
    assert "An empty prompt, and after" in (tmp_path / "page.html").read_text()
    (tmp_path / "run/model/model.safetensors").write_bytes(b"damaged")
    tokmill("report", "run", "-o", "page.html")
    assert "no samples: " in (tmp_path / "page.html").read_text()


def test_a_page_is_written_again_until_the_run_has_finished(
    tmp_path: Path, here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pages = tmp_path / "run", []
    run.mkdir()
    (run / "recipe.json").write_text('{"run": {"steps": 2}, "data": {"train": "s"}}')
    (run / "schema.json").write_text('{"fingerprint": "f", "columns": {"a": 3}}')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')

    def wait(seconds: float) -> None:
        pages.append((seconds, (tmp_path / "p.html").read_text()))
        (run / "model").mkdir()
        (run / "model/config.json").write_text('{"step": 2}')

    monkeypatch.setattr("tokmill.cli.inspect_command.time.sleep", wait)
    here("report", str(run), "-o", str(tmp_path / "p.html"), "--watch", "7")
    assert [seconds for seconds, _ in pages] == [7]
    assert 'http-equiv="refresh" content="7"' in pages[0][1]
    assert "http-equiv" not in (tmp_path / "p.html").read_text()
