"""What a stranger finds in the repository: links that lead somewhere, no traces of one machine."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

# `_` stands for nothing, so that this file does not name them either. Where packages come from is
# the business of pip's configuration, and a path of one machine means nothing on another.
TRACES = {
    "a registry's host": r"py_pi\.(org|io)|python_hosted|download\.py_torch|ana_conda\.",
    "a path of one machine": r"(?<![\w.*/])/(wo_rk|op_t|ro_ot|ho_me/\w+|Us_ers)/",
}
EXAMPLES = {"a registry's host": "files.python_hosted.org", "a path of one machine": "/wo_rk/x"}

LINES_OF_SRC = 79_500
"""The budget of src: it only goes down."""


def test_the_size_of_src() -> None:
    sources = [
        path for path in tracked() if path.is_relative_to(ROOT / "src") and path.suffix == ".py"
    ]
    assert sum(path.read_text().count("\n") for path in sources) <= LINES_OF_SRC
    folders = Counter(path.parent for path in sources)
    assert not {folder: count for folder, count in folders.items() if count > 15}
    names = Counter(path.name for path in sources if path.name != "__init__.py")
    assert not {name: count for name, count in names.items() if count > 1}
    functions = {
        f"{path.name}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert not {name: lines for name, lines in functions.items() if lines > 60}


def tracked() -> Iterator[Path]:
    """Yield the files that git tracks or would track."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            yield ROOT / name


def texts() -> Iterator[tuple[str, str]]:
    """Yield name and text of each tracked file that is text."""
    for path in tracked():
        try:
            yield str(path.relative_to(ROOT)), path.read_text("utf-8")
        except UnicodeDecodeError:
            continue


@pytest.mark.parametrize("what", TRACES)
def test_no_traces(what: str) -> None:
    pattern = re.compile(TRACES[what].replace("_", ""), re.IGNORECASE)
    assert pattern.search("see " + EXAMPLES[what].replace("_", ""))
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"{what} is named:\n" + "\n".join(found)


def anchors(text: str) -> set[str]:
    """Return the anchors of a Markdown page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_resolve() -> None:
    broken = []
    for name, text in texts():
        if not name.endswith(".md"):
            continue
        for target in LINK.findall(text):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            path = (ROOT / name).parent / file if file else ROOT / name
            page = path.read_text("utf-8") if path.suffix == ".md" and path.exists() else ""
            if not path.exists() or (anchor and anchor not in anchors(page)):
                broken.append(f"{name}: {target}")
    assert not broken


def test_files_stay_short() -> None:
    """A file has one subject; past 600 lines there is a second one."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked()
        if path.suffix == ".py" and (lines := path.read_text("utf-8").count("\n")) > 600
    }
    assert not long


def test_a_linked_environment_is_ignored(tmp_path: Path) -> None:
    """`.venv` may be a link to one that is shared, which is not a folder for git."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".venv").symlink_to("elsewhere")
    done = subprocess.run(["git", "check-ignore", ".venv"], cwd=tmp_path, capture_output=True)
    assert done.stdout == b".venv\n"


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports test files by their name alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
