"""Gather the English text of the demo: the prose of the docstrings of installed packages.

Usage: python demo_text.py FOLDER

With the packages of constraints.txt the text is the same on every machine; nothing is downloaded. Writes FOLDER/train.txt and FOLDER/val.txt (about one document in twenty, chosen by the
hash of its text), documents separated by <|endoftext|>.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import re
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

PACKAGES = ("matplotlib", "mpmath", "networkx", "numpy", "sympy", "torch")  # text, train, plot
SEPARATOR = "<|endoftext|>"
SHORTEST = 200  # characters of a document

ROLE = re.compile(r":[a-z:]+:`~?([^`<]+?)(?:\s*<[^`]*>)?`")
QUOTED = re.compile(r"`{1,2}([^`]*)`{1,2}")
NOT_PROSE = re.compile(r">>>|\.\. |::$|^[-=~*|+#]|[\\{}|<>]|\s[-=]{3,}|^\w+ : ")


def sources(package: str) -> Iterator[Path]:
    """Yield the Python files of an installed package in name order, without its tests."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        sys.exit(f"demo_text: {package} is not installed: the demo needs the extras text, train, x86 and plot")
    root = Path(found.origin).parent
    for path in sorted(root.rglob("*.py")):
        if not {"tests", "testing", "benchmarks"} & set(path.relative_to(root).parts):
            yield path


def documents(path: Path) -> list[str]:
    """Return the prose of a file's docstrings, of those that are long enough."""
    found = map(prose, docstrings(path))
    return [text for text in found if len(text) >= SHORTEST]


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file: of the module, its classes and its functions."""
    text = path.read_text("utf-8")
    if '"""' not in text:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            found = ast.get_docstring(node)
            if found and len(found) >= SHORTEST:
                yield found


def prose(docstring: str) -> str:
    """Return the paragraphs that read as English sentences, one a line, without markup."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        text = " ".join(paragraph.split())
        if NOT_PROSE.search(text) or not text[:1].isupper() or text[-1:] != ".":
            continue
        text = QUOTED.sub(r"\1", ROLE.sub(r"\1", text))
        letters = sum(c.isalpha() or c == " " for c in text)
        if len(text) >= 60 and letters >= 0.93 * len(text):
            kept.append(text)
    return "\n".join(kept)


def main() -> None:
    """Write both files."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    paths = [path for package in PACKAGES for path in sources(package)]
    with ProcessPoolExecutor() as pool:
        found = itertools.chain.from_iterable(pool.map(documents, paths, chunksize=50))
        texts = dict.fromkeys(found)  # in order, each once
    parts: dict[str, list[str]] = {"train": [], "val": []}
    for text in texts:
        first = hashlib.sha256(text.encode()).digest()[0]
        parts["val" if first < 13 else "train"].append(text)
    for name, part in parts.items():
        path = folder / f"{name}.txt"
        path.write_text("".join(text + "\n" + SEPARATOR for text in part), "utf-8")
        print(f"{path}: {len(part):,} documents, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
