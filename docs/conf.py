"""The site: `make docs` writes it into site/, from the Markdown pages of the repository."""

import runpy
import shutil
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

project = html_title = "tokmill"
extensions = ["myst_parser"]
include_patterns = [
    "docs/*.md", "docs/log/*.md", "docs/training/*.md", "docs/tutorials/*.md", "*.md",
    "build-cache/reference/*.md", "benchmarks/*.md", "benchmarks/gpu/README.md",
]  # fmt: skip
root_doc = "docs/index"
myst_heading_anchors = 4
html_theme = "furo"
smartquotes = False
html_copy_source = False
html_show_copyright = False


def setup(app: Any) -> None:
    """Show diagrams as text, as drawing them would need a script from the network."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("build-finished", begin_here)
    app.connect("source-read", offer_notebook)


def offer_notebook(app: Any, name: str, source: list[str]) -> None:
    """Offer a tutorial as a notebook, below its title."""
    if name.startswith("docs/tutorials/"):
        title, newline, text = source[0].partition("\n")
        link = f'<p><a href="{Path(name).name}.ipynb" download>Download as a notebook</a></p>'
        source[0] = f"{title}{newline}\n{link}\n{text}"


def begin_here(app: Any, error: Exception | None) -> None:
    """Let site/index.html lead to the first page, and add the pictures that README shows."""
    page = '<meta http-equiv="refresh" content="0; url=docs/index.html">\n'
    (Path(app.outdir) / "index.html").write_text(page)
    pictures = Path(app.srcdir) / "docs/images"
    scripts = runpy.run_path(str(Path(app.srcdir) / "scripts/notebooks.py"))
    scripts["write"](Path(app.outdir) / "docs/tutorials")
    shutil.copytree(pictures, Path(app.outdir) / "docs/images", dirs_exist_ok=True)
