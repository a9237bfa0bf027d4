"""What all tests share: a quiet environment, the command in a child process, a small corpus."""

import os
import signal
import threading

# Before anything loads torch or tokenizers; child processes inherit it. One thread a process:
# pytest-xdist fills the cores with processes.
os.environ.update(
    NO_COLOR="1",
    TERM="dumb",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    MPLBACKEND="agg",
)
os.environ.pop("FORCE_COLOR", None)
# Whoever starts the tests in the background of a shell has them, and so their children, ignore
# Ctrl-C, which some of the tests send.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

import ast
import json
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from listed_skips import reason_of, unlisted

# People look for new counter-examples; a landing should depend on the change alone.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of continuous integration."""
    parser.addoption(
        "--only-listed-skips",
        action="store_true",
        help="fail if a test is skipped for a reason that tests/listed_skips.py does not list",
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that skipped what it should not (see `listed_skips`)."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--only-listed-skips"):
        return
    strange = unlisted(reason_of(report.longrepr) for report in reporter.stats.get("skipped", ()))
    if strange:
        reporter.section("skips that tests/listed_skips.py does not list", red=True)
        for reason in strange:
            reporter.line(reason)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def as_a_new_command() -> Iterator[None]:
    """Forget which notes on settings were printed, and what a command set in its environment."""
    if settings_module := sys.modules.get("tokmill.training.recipe.settings"):
        settings_module.tell.cache_clear()
    before = dict(os.environ)
    yield
    os.environ.update(before)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


REPOSITORY = Path(__file__).resolve().parent.parent
SEPARATOR = "<|endoftext|>"

# Old, pure-Python modules that every Python has, with code and prose of several kinds.
MODULES = (
    "argparse bisect calendar copy csv datetime difflib doctest fractions functools heapq inspect "
    "ipaddress json.decoder logging.handlers mailbox nntplib optparse pathlib pdb pickle "
    "pickletools random shutil statistics string subprocess tarfile textwrap threading turtle "
    "typing unittest.mock uuid zipfile"
)

Completed = subprocess.CompletedProcess


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture
def tokmill(tmp_path: Path) -> Callable[..., Completed[str]]:
    """The command in a child process, in `tmp_path`: tokmill("inspect", store).stdout.

    Keywords: `code` is the exit code that is expected (None: any), `env` adds variables, `cwd`
    is another folder, `input` goes to stdin, `timeout` is in seconds.
    """

    def run(
        *arguments: object,
        code: int | None = 0,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        input: str | None = None,  # noqa: A002
        timeout: float = 120,
    ) -> Completed[str]:
        done = subprocess.run(
            [sys.executable, "-m", "tokmill", *map(str, arguments)],
            capture_output=True,
            text=True,
            input=input,
            cwd=cwd or tmp_path,
            env={**os.environ, **(env or {})},
            timeout=timeout,
            check=False,
        )
        if code is not None and done.returncode != code:
            pytest.fail(
                f"tokmill {' '.join(map(str, arguments))}: exit code {done.returncode}, not {code}"
                f"\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}",
                pytrace=False,
            )
        return done

    return run


@dataclass(frozen=True, repr=False)
class Corpus:
    """A few hundred documents of the standard library: sources and docstrings.

    The same documents in the same order as plain text, JSON Lines (fields `id`, `title`, `text`)
    and Parquet (the same fields). Do not write to the files: tests of a worker share them.
    """

    folder: Path
    titles: list[str]
    texts: list[str]

    @cached_property
    def txt(self) -> Path:
        """Documents between `<|endoftext|>` separators."""
        path = self.folder / "corpus.txt"
        path.write_text(SEPARATOR.join(self.texts), "utf-8")
        return path

    @cached_property
    def jsonl(self) -> Path:
        """One object a line."""
        path = self.folder / "corpus.jsonl"
        with path.open("w", encoding="utf-8") as handle:
            for row in self.rows():
                handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        return path

    @cached_property
    def parquet(self) -> Path:
        """Row groups of 100 documents."""
        pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
        path = self.folder / "corpus.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(list(self.rows())), path, row_group_size=100)
        return path

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the documents as objects."""
        for number, (title, text) in enumerate(zip(self.titles, self.texts, strict=True)):
            yield {"id": number, "title": title, "text": text}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A small real corpus (about 2 MB) from files that every machine with Python has."""
    documents = dict(_library_documents())
    return Corpus(tmp_path_factory.mktemp("corpus"), list(documents), list(documents.values()))


def _library_documents() -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES.split():
        path = library / (name.replace(".", "/") + ".py")
        if not path.exists():  # gone in a later Python
            continue
        source = path.read_text("utf-8")
        yield name, source
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found = ast.get_docstring(node)
                if found and len(found) > 80:
                    yield f"{name}:{getattr(node, 'name', '')}:{getattr(node, 'lineno', 0)}", found


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `torch.empty` and `torch.empty_like` return NaN, so that what is not written shows."""
    torch = pytest.importorskip("torch", reason="needs the extra train")

    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        def empty(*arguments: Any, **options: Any) -> Any:
            made = make(*arguments, **options)
            if made.is_floating_point():
                with torch.no_grad():
                    made.fill_(float("nan"))
            return made

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
