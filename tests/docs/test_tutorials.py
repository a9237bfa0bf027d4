"""The tutorials are true: their commands run in an empty folder next to a clone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import PYTHON, check_commands, steps

NEEDS = {
    "compare-two-programs": ("gcc", "strip"),
    "find-a-function": ("gcc", "strip", "gzip"),
    "points-of-an-execution": ("gcc", "valgrind"),
}
DOCUMENTS = [f"This function returns {i} and more. " * 9 for i in range(60)]
SEPARATOR = "<|endoftext|>"
TEXT = ("python ../tokmill/examples/demo/demo_text.py text", "mkdir text && cp ../*.txt text")
SHORTER = {
    "language-model": [TEXT, ("decoder-tiny --data", "decoder-tiny --steps 2 --data")],
    "bert-and-classifier": [
        TEXT,
        ("python ../tokmill/examples/demo/labelled_text.py labelled", "cp -r ../labelled ."),
        ("--steps 800", "--steps 2"),
        ("--set epochs=20", "--steps 2"),
    ],
    "points-of-an-execution": [],
    "tune-a-model": [
        ("rl tune small.onnx -o small", "rl tune 'matmul 8 8 8' -o small --max-time 60s"),
        ("--input=1x3x64x64xf32=0.5", "--help"),
    ],
}
"""What is replaced in a page, so that its commands take seconds; the long test types them all."""
SKIPPED = re.compile(r"plot|inspect|dry-run|narrow|alone|eval run|two-phase|iree-compile|iree-run")
"""Which commands of these pages the short test leaves out."""
PAGES = sorted(path.stem for path in (Path(__file__).parents[2] / "docs/tutorials").glob("*.md"))


def check_page(name: str, repository: Path, base: Path, short: bool) -> None:
    for program in NEEDS.get(name, ()):
        if not shutil.which(program):
            pytest.skip(f"needs {program}")
    (base / "tokmill").symlink_to(repository)
    folder = base / "here"
    folder.mkdir()
    for part in ("train", "val"):
        (base / f"{part}.txt").write_text(SEPARATOR.join(DOCUMENTS))
        (base / "labelled").mkdir(exist_ok=True)
        rows = "".join(f"{label}\tis {label} here\n" for label in ("sympy", "networkx"))
        (base / f"labelled/{part}.tsv").write_text("package\tsentence\n" + rows)
    text = (repository / f"docs/tutorials/{name}.md").read_text("utf-8")
    for old, new in SHORTER.get(name, []) if short else []:
        assert old in text
        text = text.replace(old, new)
    leave_out = short and name in SHORTER
    check_commands(
        [step for step in steps(text) if not (leave_out and SKIPPED.search(step.command))], folder
    )
    for code in PYTHON.findall(text):
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=60)


@pytest.mark.parametrize("name", PAGES)
def test_commands_run(name: str, repository: Path, tmp_path: Path) -> None:
    check_page(name, repository, tmp_path, short=True)


@pytest.mark.long
@pytest.mark.parametrize("name", SHORTER)
def test_all_commands_run(name: str, repository: Path, tmp_path: Path) -> None:
    check_page(name, repository, tmp_path, short=False)
