"""Importing costs nothing, the public names are frozen, every module can be imported."""

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import tokmill

# What loads at its one door only. numpy too: a person who asks for help waits for nothing.
HEAVY = {
    "awkward",
    "gigatoken",
    "iced_x86",
    "jinja2",
    "matplotlib",
    "numpy",
    "obstore",
    "pandas",
    "psutil",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "zstandard",
}

PUBLIC = [
    "Feed",
    "Packed",
    "Run",
    "Store",
    "Stream",
    "TokenDataset",
    "Tokenizer",
    "TokmillError",
    "Tuples",
    "Whole",
    "Windows",
    "X86Tokenizer",
    "__version__",
    "align",
    "build",
    "diff",
    "embed",
    "evaluate",
    "export",
    "generate",
    "predict",
    "sample",
    "tokenize_binary_instruction",
    "tokenize_bytes",
    "train",
    "train_tokenizer",
]

HELP = """
import contextlib, io
from tokmill.cli import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main(["--help"])
assert "build" in out.getvalue() and "train" in out.getvalue(), out.getvalue()
"""


def loaded_by(code: str) -> set[str]:
    """Return the top-level names in sys.modules after running code in a fresh Python."""
    report = (
        "\nimport json, sys"
        "\nprint(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("code", ["import tokmill", HELP], ids=["import", "help"])
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert loaded_by(code) & HEAVY == set()


def test_reading_a_store_loads_no_extra() -> None:
    assert loaded_by("import tokmill; tokmill.Store, tokmill.Feed") & HEAVY == {"numpy"}


def test_public_names_are_frozen() -> None:
    assert sorted(tokmill.__all__) == PUBLIC


def test_type_checkers_see_the_public_names() -> None:
    """Each stands in an import that a checker reads, from the module that it is loaded from."""
    tree = ast.parse(Path(tokmill.__file__).read_text("utf-8"))
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    )
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == tokmill._PUBLIC
    assert {*seen, "__version__"} == set(PUBLIC)


TYPED = """import tokmill
reveal_type(tokmill.Store)
reveal_type(tokmill.train)
tokmill.Stoer
"""


@pytest.mark.long
def test_types_of_public_names(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "use.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    store, train, wrong = (line for line in done.stdout.splitlines() if line.startswith("use.py:"))
    assert "tokmill.store.store.Store" in store, done.stdout
    assert "pathlib.Path" in train, done.stdout
    assert 'Module has no attribute "Stoer"' in wrong, done.stdout


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_loads(name: str) -> None:
    assert getattr(tokmill, name) is not None


def test_public_names_outlive_the_packages_of_the_same_name() -> None:
    """Importing a package must not put it over a public function."""
    loaded_by(
        "import tokmill, tokmill.builds.build, tokmill.training.session, tokmill.inference.sample\n"
        "for name in set(tokmill.__all__) - {'__version__'}:\n"
        "    assert callable(getattr(tokmill, name)), name"
    )


def test_a_public_name_says_which_extra_it_needs() -> None:
    loaded_by(
        "import sys; sys.modules['torch'] = None  # as if it were not installed\n"
        "import tokmill\n"
        "try:\n"
        "    tokmill.TokenDataset\n"
        "except tokmill.TokmillError as error:\n"
        "    assert error.exit_code == 4 and 'tokmill[train]' in error.hint, error\n"
        "else:\n"
        "    raise SystemExit('torch was imported')"
    )


def test_commands_show_their_help_without_the_extra_x86() -> None:
    """A mistyped command looks through all commands, so each must load without any extra."""
    loaded_by(
        "import contextlib, io, sys\n"
        "sys.modules['iced_x86'] = None  # as if it were not installed\n"
        "from tokmill.cli import main\n"
        "for words, said in [\n"
        "    (['trian'], \"mean 'train'\"), (['vocab', '--help'], 'compress'),\n"
        "    (['build', 'x86', '--help'], '--layout'), (['recipe', 'schema', 'x86'], 'layout'),\n"
        "]:\n"
        "    shown = io.StringIO()\n"
        "    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):\n"
        "        with contextlib.suppress(SystemExit):\n"
        "            main(words)\n"
        "    assert said in shown.getvalue(), shown.getvalue()"
    )


def test_a_notebook_shows_no_traceback() -> None:
    """IPython shows the lines that `_render_traceback_` of an error returns."""
    with pytest.raises(tokmill.TokmillError) as error:
        tokmill.Store("no\x1bthing")
    (shown,) = error.value._render_traceback_()
    assert shown.startswith("TokmillError: no\\x1bthing: there is no such store\nhint: `tokmill")


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stoer'"):
        tokmill.Stoer  # noqa: B018


MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(tokmill.__path__, "tokmill.")
    if not module.name.endswith(".__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_module_imports(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_public_names_are_described(name: str) -> None:
    """Inside of the package a docstring stands where it says more than the name and the types."""
    value = getattr(tokmill, name)
    own = vars(value) if isinstance(value, type) else {}
    inner = {key: one for key, one in own.items() if callable(one) and not key.startswith("_")}
    for key, one in {name: value, **inner}.items():
        assert one.__doc__ if one is value else inspect.getdoc(getattr(value, key)), key
