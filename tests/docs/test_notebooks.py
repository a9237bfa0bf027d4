"""The notebooks of the tutorials have all commands, and the shortest runs."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from test_readme import PYTHON, steps

PAGES = sorted((Path(__file__).parents[2] / "docs/tutorials").glob("*.md"))
SHORTEST = "compare-two-programs"


def notebook_of(page: Path, repository: Path) -> dict[str, Any]:
    made: dict[str, Any] = runpy.run_path(str(repository / "scripts/notebooks.py"))["notebook"](
        page.read_text("utf-8")
    )
    return made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_has_the_commands_of_its_page(page: Path, repository: Path) -> None:
    import nbformat

    made = notebook_of(page, repository)
    nbformat.validate(nbformat.from_dict(made))
    code = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    shell = [cell.removeprefix("%%bash\n") for cell in code if cell.startswith("%%bash\n")]
    text = page.read_text("utf-8")
    wanted = [step.command.split() for step in steps(text)]
    typed = "\n".join(shell).replace("\\\n", " ").splitlines()
    assert [line.split() for line in typed] == wanted
    assert [cell + "\n" for cell in code if not cell.startswith("%%bash\n")] == PYTHON.findall(text)


def test_the_shortest_notebook_runs(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbclient
    import nbformat

    for program in ("gcc", "strip"):
        if not shutil.which(program):
            pytest.skip(f"needs {program}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "tokmill").symlink_to(repository)
    (tmp_path / "here").mkdir()
    page = repository / f"docs/tutorials/{SHORTEST}.md"
    notebook = nbformat.reads(json.dumps(notebook_of(page, repository)), as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "here")}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    printed = [str(cell.get("outputs")) for cell in notebook.cells if cell.cell_type == "code"]
    assert "2 changed" in printed[1]
