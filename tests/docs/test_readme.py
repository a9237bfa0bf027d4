"""The tour and the README are true: commands run and print what is shown, figures are measured.

A fenced block marked `console` holds commands (lines that begin with `$ `, continued by a
backslash) and below each what it prints. All are run in order in one temporary folder that holds
`corpus.txt`. Numbers, sizes and digests may differ; a shown line `…` stands for any lines. Blocks
marked `python` are run after them, and those of a page of docs/ as one program; all others are for
reading only.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokmill import plugins, train_tokenizer

BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
RESULTS = re.compile(r"<!-- results -->(.*?)<!-- /results -->", re.DOTALL)
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


class Step(NamedTuple):
    command: str
    shown: list[str]


def steps(text: str) -> list[Step]:
    """Return the commands of a document, each with the output that is shown."""
    found: list[Step] = []
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append(Step(line[2:], []))
            elif line.strip():
                found[-1].shown.append(line)
    return found


def masked(line: str) -> str:
    """Return a line without what differs from machine to machine."""
    line = re.sub(r"\b[0-9a-f]{12,}\b", "DIGEST", line)
    line = re.sub(r"\d[\d,.]*(?:e[+-]?\d+)?(?: ?(?:[KMGT]i?B|[hms]\b))?", "N", line)
    return " ".join(re.sub(r"[-─━═]{2,}", "--", line).split())


def check_commands(found: list[Step], folder: Path) -> None:
    """Run the commands of a document in a folder; compare what they print with what it shows."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert found, "there is no console block"
    for step in found:
        done = subprocess.run(
            ["sh", "-c", step.command],
            cwd=folder,
            env={**os.environ, "PATH": path, "COLUMNS": "100"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"$ {step.command}\n{done.stdout}"
        printed = {masked(line) for line in done.stdout.splitlines()}
        missing = [line for line in step.shown if line != "…" and masked(line) not in printed]
        assert not missing, f"$ {step.command}\nshown: {missing}\nprinted:\n{done.stdout}"


def test_commands_run_and_print_what_is_shown(
    repository: Path, corpus: Any, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_bytes(corpus.txt.read_bytes())
    text = (repository / "docs/tour.md").read_text("utf-8")
    check_commands(steps(text), tmp_path)
    for code in PYTHON.findall(text):
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


def test_the_python_of_the_readme_runs(repository: Path, corpus: Any, tmp_path: Path) -> None:
    texts = corpus.txt.read_text("utf-8").split("<|endoftext|>")
    lines = [json.dumps({"page": str(n), "body": text}) for n, text in enumerate(texts)]
    (tmp_path / "pages.jsonl").write_text("\n".join(lines))
    train_tokenizer(texts, 300).save(tmp_path / "tokenizer")
    (code,) = PYTHON.findall((repository / "README.md").read_text("utf-8"))
    code = code.replace('"steps": 20', '"steps": 2')
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)


@pytest.mark.parametrize(
    "page",
    [
        *("python.md", "loaders.md", "parts.md", "programs.md", "x86-tokens.md"),
        *("x86-vocabularies.md", "embeddings.md"),
    ],
)
def test_python_pages_run(page: str, repository: Path, corpus: Any, tmp_path: Path) -> None:
    """The blocks of a page are one program, in order."""
    (tmp_path / "corpus.txt").write_bytes(corpus.txt.read_bytes())
    blocks = PYTHON.findall((repository / "docs" / page).read_text("utf-8"))
    assert blocks
    code = "\n".join(blocks)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)


def test_figures_are_those_of_the_benchmarks(repository: Path) -> None:
    tables = RESULTS.findall((repository / "README.md").read_text("utf-8"))
    results = repository / "benchmarks" / "RESULTS.md"
    if not tables:
        pytest.skip("the README shows no figures")
    measured = set(FIGURE.findall(results.read_text("utf-8")))
    shown = {figure for table in tables for figure in FIGURE.findall(table)}
    assert not shown - measured, "not in benchmarks/RESULTS.md"


@pytest.mark.long
def test_the_fingerprint_of_the_tour_is_what_a_clone_makes(
    repository: Path, tmp_path: Path
) -> None:
    """The demo's text comes of pinned packages, so it is the same everywhere."""
    script = repository / "examples/demo/demo_text.py"
    subprocess.run([sys.executable, script, tmp_path / "text"], check=True)
    words = [tmp_path / "text/train.txt", "--vocab-size", "4096", "-o", tmp_path / "store"]
    done = subprocess.run(
        [Path(sys.executable).with_name("tokmill"), "build", "text", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = re.findall(r"^fingerprint .*", (repository / "docs/tour.md").read_text("utf-8"), re.M)
    assert done.stdout.splitlines()[-1:] == shown


@pytest.mark.long
def test_the_demo_reaches_the_perplexity_of_the_readme(repository: Path, tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("tokmill"), "demo", tmp_path / "demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = (tmp_path / "demo/run/metrics.jsonl").read_text("utf-8").splitlines()
    reached = [json.loads(line)["val_perplexity"] for line in lines if "val_perplexity" in line]
    (shown,) = re.findall(r"perplexity ([\d.]+)", (repository / "README.md").read_text("utf-8"))
    assert reached[-1] == pytest.approx(float(shown), rel=0.02)


def test_masking() -> None:
    assert masked("store: 1,234 records, 12.5 MB") == masked("store: 7 records, 3 KB")
    assert masked("fingerprint 0123456789abcdef") == "fingerprint DIGEST"
    assert steps("```console\n$ a \\\n  b\nout\n\n$ c\n```\n```sh\n$ d\n```\n") == [
        Step("a    b", ["out"]),
        Step("c", []),
    ]


def first_column(text: str, heading: str) -> set[str]:
    """Return the names in the first column of the table below a heading."""
    section = re.split(r"\n##+ ", text.split(f"\n## {heading}\n")[1])[0]
    cells = re.findall(r"^\|((?: `[^`|]+`,?)+) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_tables_are_complete(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    text = (repository / "README.md").read_text("utf-8")
    assert first_column(text, "What to install") == set(project["optional-dependencies"])
    text = (repository / "docs/building.md").read_text("utf-8")
    assert first_column(text, "Inputs") == set(plugins.SOURCES)
