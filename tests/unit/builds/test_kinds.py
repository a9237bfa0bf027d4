"""`tokmill.build.KIND`: at run time, and as type checkers and editors see it."""

import inspect
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokmill
from making import TOKENIZER
from tokmill.base.errors import UsageError
from tokmill.builds.plan import Amount, How

RIGHT = """\
import tokmill

store = tokmill.build.text("a.txt", "out", tokenizer="t", record="line", strip=True)
tokmill.build.x86(["ls", "cat"], "out", unit="function")
tokmill.build.jsonl("a.jsonl", "out", fields=["body"], keep=("page",))
tokmill.build("plugged", "in", "out", anything=1)
"""
WRONG = {
    'tokmill.build.text("a.txt", "out", recrod="line")': 'keyword argument "recrod"',
    'tokmill.build.text("a.txt", "out", record="lines")': "incompatible type",
    'tokmill.build.jsonl("a.jsonl", "out", fields="body")': "incompatible type",
    'tokmill.build.txt("a.txt", "out")': 'no attribute "txt"',
    'tokmill.build.x86("ls", "out", tokenizer="t")': 'keyword argument "tokenizer"',
}


def test_the_stub_is_that_of_the_sources(repository: Path) -> None:
    made = runpy.run_path(str(repository / "scripts/build_stub.py"))["stub"]()
    assert (repository / "src/tokmill/builds/kinds.pyi").read_text() == made


@pytest.mark.long
def test_type_checkers_know_the_options(repository: Path, tmp_path: Path) -> None:
    """Only the stub is checked here: the package itself would take a minute."""
    (tmp_path / "tokmill/builds").mkdir(parents=True)
    for name in ("__init__.py", "builds/__init__.py", "builds/kinds.pyi"):
        shutil.copy(repository / "src/tokmill" / name, tmp_path / "tokmill" / name)
    (tmp_path / "user.py").write_text(RIGHT + "\n".join(WRONG) + "\n")
    options = ["--ignore-missing-imports", "--follow-imports=silent", "--config-file="]
    words = [sys.executable, "-m", "mypy", "user.py", *options, "--cache-dir", "cache"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(lines) == len(WRONG), done.stdout + done.stderr
    for line, said in zip(lines, WRONG.values(), strict=True):
        assert said in line


def test_a_kind_builds_and_has_its_signature(corpus: Any, tmp_path: Path) -> None:
    parameters = inspect.signature(tokmill.build.text).parameters
    assert {"inputs", "out", "tokenizer", "record", "glob"} <= set(parameters)
    assert parameters["record"].default == "separator"
    assert "record: " in str(tokmill.build.text.__doc__)
    assert "token_dicts" in dir(tokmill.build)
    options = {"tokenizer": TOKENIZER, "record": "line"}
    store = tokmill.build.text(corpus.txt, tmp_path / "a", **options)
    same = tokmill.build("text", corpus.txt, tmp_path / "b", **options)
    assert store.fingerprint == same.fingerprint


def test_a_misspelt_kind_or_option_is_named(corpus: Any, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="did you mean 'jsonl'"):
        tokmill.build.json  # noqa: B018
    with pytest.raises(UsageError) as error:
        tokmill.build.text(corpus.txt, tmp_path / "a", tokenizer=TOKENIZER, recrod="line")
    assert "record" in error.value.hint


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (How(part=(3, 2)), "no part 3 of 2"),
        (How(part=(0, 2)), "no part 0 of 2"),
        (How(limit_seconds=-1), "limit_seconds"),
        (How(amount=Amount(workers=-1)), "amount.workers"),
        (How(amount=Amount(workers=2.5)), "amount.workers"),  # type: ignore[arg-type]
        (How(amount=Amount(preset="fast")), "amount.preset"),  # type: ignore[arg-type]
    ],
)
def test_how_a_build_runs_is_checked_in_python_too(how: How, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match=says):
        tokmill.build.text(tmp_path / "a.txt", tmp_path / "out", tokenizer=TOKENIZER, how=how)
    assert not (tmp_path / "out").exists()


def test_how_a_build_runs_takes_numbers_of_numpy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    how: Any = How(
        quiet=True,
        max_rejects=np.float64(0.01),
        limit_seconds=np.float32(60),
        amount=Amount(workers=np.int64(0)),
    )
    assert tokmill.build.text(tmp_path / "a.txt", tmp_path / "out", tokenizer=TOKENIZER, how=how)


def test_mistakes_in_python_are_told_as_those_of_commands(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="returns one text"):
        tokmill.sample(tmp_path, samples=2)
    with pytest.raises(UsageError, match="this is a folder"):
        tokmill.diff(tmp_path, tmp_path)
