"""Turn the tutorials into notebooks: text, and their commands and Python as cells that run.

    python scripts/notebooks.py FOLDER     writes FOLDER/NAME.ipynb for each page of docs/tutorials

`make docs` puts them beside the pages. What a command prints is left out: a notebook shows it.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[1] / "docs/tutorials"
FENCE = re.compile(r"^```(console|python)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def commands(block: str) -> str:
    """Return the commands of a console block, without what they print."""
    kept, goes_on = [], False
    for line in block.splitlines():
        if line.startswith("$ ") or goes_on:
            kept.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\")
    return "\n".join(kept)


def notebook(text: str) -> dict[str, Any]:
    """Return the notebook of a page in Markdown."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str) -> None:
        if not source.strip():
            return
        cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}}
        cell["source"] = source.strip().splitlines(keepends=True)
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))

    before = 0
    for fence in FENCE.finditer(text):
        add("markdown", text[before : fence.start()])
        before = fence.end()
        kind, block = fence.groups()
        add("code", block if kind == "python" else f"%%bash\n{commands(block)}")
    add("markdown", text[before:])
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def write(folder: Path) -> None:
    """Write the notebooks of all tutorials."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(PAGES.glob("*.md")):
        made = json.dumps(notebook(page.read_text("utf-8")), indent=1, ensure_ascii=False)
        (folder / f"{page.stem}.ipynb").write_text(made + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
