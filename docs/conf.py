"""The site: `make docs` writes it into site/, from the Markdown pages of the repository."""

import shutil
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

project = html_title = "tokmill"
extensions = ["myst_parser"]
include_patterns = [
    "docs/*.md", "docs/log/*.md", "docs/training/*.md", "docs/tutorials/*.md", "*.md",
    "build-cache/reference/*.md", "benchmarks/RESULTS.md", "benchmarks/gpu/README.md",
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


def begin_here(app: Any, error: Exception | None) -> None:
    """Let site/index.html lead to the first page, and add the pictures that README shows."""
    page = '<meta http-equiv="refresh" content="0; url=docs/index.html">\n'
    (Path(app.outdir) / "index.html").write_text(page)
    pictures = Path(app.srcdir) / "docs/images"
    shutil.copytree(pictures, Path(app.outdir) / "docs/images", dirs_exist_ok=True)
