"""The site is built without a warning, and its reference names every command, key and error."""

import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

FOLDERS = ("docs", "benchmarks", "examples", "recipes", "scripts", "src")


class Links(HTMLParser):
    """Collects the addresses of links, scripts, styles and pictures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in ("script", "img") or (tag == "link" and named.get("rel") == "stylesheet"):
            self.loaded.append(named.get("src") or named.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    root = tmp_path_factory.mktemp("root")
    for name in FOLDERS:
        shutil.copytree(
            repository / name, root / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in filter(Path.is_file, repository.glob("[!.]*")):
        shutil.copy(path, root)
    for words in (
        ("scripts/reference.py", "build-cache/reference"),
        ("-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs", ".", "site"),
    ):
        done = subprocess.run(
            [sys.executable, *words], cwd=root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return root / "site"


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        links = Links()
        links.feed(page.read_text())
        for address in links.loaded:
            assert "//" not in address, (page, address)


def test_tutorials_are_offered_as_notebooks(site: Path) -> None:
    pages = list((site / "docs/tutorials").glob("*.html"))
    assert len(pages) == 6
    for page in pages:
        assert f'<a href="{page.stem}.ipynb" download>' in page.read_text()
        assert page.with_suffix(".ipynb").is_file()


def test_the_reference_has_every_command_and_key(site: Path) -> None:
    commands = (site / "build-cache/reference/commands.html").read_text()
    for name in ("tokmill tokenizer train", "tokmill store export npz", "tokmill diff"):
        assert f">{name}<" in commands
    assert "--vocab-size" in commands
    recipes = (site / "build-cache/reference/recipes.html").read_text()
    assert all(key in recipes for key in ("optim.lr", "task.length", "specials_in_text"))
    assert "train_tokenizer" in (site / "build-cache/reference/python.html").read_text()
    errors = (site / "build-cache/reference/errors.html").read_text()
    assert "extends is not the path of a recipe" in errors and "the path of a file" in errors
