"""Write the reference pages of the site from the program itself: commands, recipes, Python, errors.

python scripts/reference.py FOLDER
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokmill
from tokmill import plugins
from tokmill.base import errors as known
from tokmill.base.recipe import shipped
from tokmill.builds.plan import BuildRecipe
from tokmill.cli import PANELS, application, load_command
from tokmill.cli.recipe_command import keys_of, training_keys


class Code(str):
    """A text that is shown as code."""


def cell(value: object) -> str:
    """Return a value as the text of a cell of a table."""
    if isinstance(value, Code):
        return f"`{value}`"
    text = " ".join(str(value).replace("\\[", "[").split())
    return re.sub(r"([|<>*_`\[\]\\])", r"\\\1", text)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    lines = [list(head), *rows]
    body = ["| " + " | ".join(map(cell, row)) + " |" for row in lines]
    return [body[0], "|" + "---|" * len(lines[0]), *body[1:], ""]


def options(command: Any, context: Any) -> Iterator[list[str]]:
    """Yield names, value and help of the parameters of a command, without --help."""
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        if "--help" in names or getattr(parameter, "hidden", False):
            continue
        argument = parameter.param_type_name == "argument"
        value = parameter.metavar or parameter.make_metavar(context)
        flag = getattr(parameter, "is_flag", False) or value == "<bool>"
        value = value.strip("<>") + ", repeated" * getattr(parameter, "multiple", False)
        yield [
            value if argument else Code(", ".join(names)),
            "" if flag or argument else value,
            getattr(parameter, "help", "") or "",
        ]


def commands() -> Iterator[str]:
    """Yield the lines of the page of commands."""
    yield "# Commands\n"
    context = application().make_context("tokmill", [], resilient_parsing=True)
    for panel, names in PANELS.items():
        yield f"## {panel.capitalize()}\n"
        for name in names:
            yield from described(load_command(name), f"tokmill {name}", context)


def described(command: Any, path: str, context: Any) -> Iterator[str]:
    inner = command.list_commands(context) if hasattr(command, "list_commands") else []
    yield f"### {path}\n"
    yield f"{command.help or ''}\n"
    rows = list(options(command, context))
    if rows:
        yield from table(["option", "value", "meaning"], rows)
    for name in inner:
        yield from described(command.get_command(context, name), f"{path} {name}", context)


def recipes() -> Iterator[str]:
    """Yield the lines of the page of recipes and their keys."""
    yield "# Recipes\n"
    yield "`tokmill train NAME` uses one of these; `--set KEY=VALUE` sets any key.\n"
    for name, path in shipped().items():
        yield f"## {name}\n\n```toml\n{path.read_text().rstrip()}\n```\n"
    kinds = {"train": training_keys([]), "build": keys_of(BuildRecipe)}
    kinds |= {f"build {kind}": keys_of(plugins.load(plugins.SOURCES, kind).Config)
              for kind in plugins.SOURCES}  # fmt: skip
    for kind, keys in kinds.items():
        yield f"## Keys: {kind}\n"
        yield from table(
            ["key", "of", "type", "default", "meaning"],
            [[Code(key["key"]), ", ".join(key.get("kinds", [])), key["type"],
              "" if key["default"] in (None, "") else key["default"], key["doc"]] for key in keys],
        )  # fmt: skip


def python() -> Iterator[str]:
    """Yield the lines of the page of public names."""
    yield "# Python\n"
    for name in sorted(set(tokmill.__all__) - {"__version__"}):
        yield from documented(f"tokmill.{name}", getattr(tokmill, name), "##")


def documented(name: str, value: Any, level: str) -> Iterator[str]:
    """Yield the signature and the docstring of a function or class, and of its public methods."""
    yield f"{level} {name.rpartition('tokmill.')[2]}\n"
    yield f"```python\n{name.rpartition('.')[2]}{inspect.signature(value)}\n```\n"
    if text := inspect.getdoc(value):
        yield f"```text\n{text}\n```\n"
    if inspect.isclass(value):
        for key, method in vars(value).items():
            function = method.__func__ if isinstance(method, classmethod) else method
            public = inspect.isfunction(function) and not key.startswith("_")
            if public and inspect.getdoc(function):
                yield from documented(f"{name}.{key}", function, level + "#")


def errors() -> Iterator[str]:
    """Yield the lines of the page of error messages: what is printed, the hint, and the source."""
    yield "# Errors\n"
    yield "What commands print behind `error:`, and their hints; `…` is what differs each time."
    yield "Codes: 1 for an input that is refused, 2 for a wrong command or recipe, 4 for a package"
    yield "that is missing, 5 for a machine that refuses.\n"
    package = Path(tokmill.__file__).parent
    rows = sorted({row for path in package.rglob("*.py") for row in raised(path)})
    for area in sorted({row[0] for row in rows}):
        yield f"## {area}\n"
        yield from table(
            ["message", "hint", "code", "raised in"],
            [[what, hint, code, Code(place)] for of, what, hint, code, place in rows if of == area],
        )


EXIT_CODES = {
    name: kind.exit_code for name, kind in vars(known).items() if hasattr(kind, "exit_code")
}


def raised(path: Path) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield area, message, hint, exit code and file of the errors that a file makes."""
    place = path.relative_to(Path(tokmill.__file__).parent)
    area = place.parts[0] if len(place.parts) > 1 else "tokmill"
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
            continue
        what = words(node.args[0])
        if node.func.id in EXIT_CODES and what.strip("… "):
            hint = next((words(key.value) for key in node.keywords if key.arg == "hint"), "")
            yield area, what, hint, str(EXIT_CODES[node.func.id]), str(place)


def words(node: ast.expr) -> str:
    """Return the text of an expression, with … for what it fills in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(words, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left) + words(node.right)
    if isinstance(node, ast.IfExp):
        return f"{words(node.body)} / {words(node.orelse)}"
    return "…"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for page in (commands, recipes, python, errors):
        (folder / f"{page.__name__}.md").write_text("\n".join(page()) + "\n")


if __name__ == "__main__":
    main()
