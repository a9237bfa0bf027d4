"""The tutorials are true: their commands run in an empty folder beside a clone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_readme import check_commands

NEEDS = {
    "compare-two-programs": ("gcc", "strip"),
    "find-a-function": ("gcc", "strip", "gzip"),
}
LONG: set[str] = set()
PAGES = sorted(path.stem for path in (Path(__file__).parents[2] / "docs/tutorials").glob("*.md"))


@pytest.mark.parametrize(
    "name", [pytest.param(p, marks=[pytest.mark.long] if p in LONG else []) for p in PAGES]
)
def test_commands_run(name: str, repository: Path, tmp_path: Path) -> None:
    for program in NEEDS.get(name, ()):
        if not shutil.which(program):
            pytest.skip(f"needs {program}")
    (tmp_path / "tokmill").symlink_to(repository)
    folder = tmp_path / "here"
    folder.mkdir()
    check_commands((repository / f"docs/tutorials/{name}.md").read_text("utf-8"), folder)
