"""What a file says is decoded in `headers`, files of stores and runs are opened in `files`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokmill
from tokmill.base.headers import loads_json

SOURCES = Path(tokmill.__file__).parent
DECODES = re.compile(r"\b(?:json\.loads?|json\.decode|tomllib\.loads?|np\.load)\(")
OWN = {
    "base/headers.py": 2,  # the doors
    # What this process, or one that it started, has just written or checked.
    "builds/plan.py": 1, "training/recipe/read_recipe.py": 1,
    "training/recipe/settings.py": 1,
    "training/runs/run.py": 1, "x86/tokens/vocabularies/vocabulary.py": 1,
    # A line that the fast decoder refused, for its reason; a word of an option; what
    # a hint shows in a command.
    "text/jsonl.py": 3, "text/make_document.py": 1,
    # What `json` wrote with infinities and NaN, and every error of it is caught; the library's own.
    "text/tokenizers/tokenizer.py": 2,
}  # fmt: skip
"""File → how often it decodes by itself."""


def test_nothing_else_decodes() -> None:
    found = {
        path.relative_to(SOURCES).as_posix(): len(DECODES.findall(path.read_text()))
        for path in SOURCES.rglob("*.py")
    }
    assert {name: count for name, count in found.items() if count} == OWN


OPENS = re.compile(r"(?<![\w.])open\(|\.read_(?:bytes|text)\(|\.open\(")
OPENED = {
    # The door; what the system says of itself.
    "base/files.py": 8, "base/locks.py": 2,
    "models/transformers/layers.py": 1,
    # What the user names, read once from its beginning: it may be a pipe.
    "training/recipe/settings.py": 1,
    "similarity/keys_csv.py": 1, "builds/scan.py": 1,
    # Where it copies stdin to.
    "inference/predict.py": 1,
    # A member of an archive; a file that another node has just written.
    "report/describe/foreign.py": 1, "formats/windows/npz.py": 1,
    "formats/windows/npz_export.py": 1,
}  # fmt: skip
"""File → how often it opens a file by itself; domains open their own inputs."""
DOMAINS = ("text", "x86", "bbv", "mlir", "cli", "base/children")


def test_files_of_stores_and_runs_are_opened_at_one_door() -> None:
    """Elsewhere a pipe in the place of a file would keep a command waiting for ever."""
    found = {
        path.relative_to(SOURCES).as_posix(): len(OPENS.findall(path.read_text()))
        for path in SOURCES.rglob("*.py")
        if path.parent not in (SOURCES, SOURCES / "base") or path.name in ("files.py", "locks.py")
    }
    own = {n: c for n, c in found.items() if c and not n.startswith(DOMAINS)}
    assert own == OPENED


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b'"\xff"', b'"\\ud800"', b""])
@pytest.mark.parametrize("kind", [object, dict[str, int], list[object]])
def test_one_kind_of_error(raw: bytes, kind: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads_json(raw, kind)


RUNS = {"eval", "exec", "compile", "__import__"}
"""Functions of Python that run what a text says."""
LOADS = {
    ("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"),
    ("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("np", "load"),
}  # fmt: skip
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
LISTED = {
    "base/unpickle/reader.py": ["import pickle"],  # its subclass, which can neither import nor call
}


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
            yield from (f"import {name}" for name in names if name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in MODULES:
                yield f"import {node.module}"
        elif isinstance(node, ast.Call):
            function, given = node.func, {word.arg: word.value for word in node.keywords}
            for name in ("shell", "allow_pickle"):
                if name in given and ast.unparse(given[name]) != "False":
                    yield f"{name}="
            if isinstance(function, ast.Name) and function.id in RUNS:
                yield function.id
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                called = (function.value.id, function.attr)
                if called in LOADS and ast.unparse(given.get("weights_only", node)) != "True":
                    yield ".".join(called)


def test_nothing_runs_what_a_file_says() -> None:
    found = {
        path.relative_to(SOURCES).as_posix(): list(dangers(ast.parse(path.read_text())))
        for path in SOURCES.rglob("*.py")
    }
    assert {name: what for name, what in found.items() if what} == LISTED


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import pickle", "import pickle"),
        ("from marshal import loads", "import marshal"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("subprocess.run(line, shell=True)", "shell="),
        ("np.load(path, allow_pickle=flag)", "allow_pickle="),
        ("eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("yaml.load(text)", "yaml.load"),
    ],
)
def test_what_runs_a_file_is_found(line: str, what: str) -> None:
    assert what in list(dangers(ast.parse(line)))
    for good in ("torch.load(path, weights_only=True)", "model.eval()", "yaml.safe_load(text)"):
        assert not list(dangers(ast.parse(good)))
