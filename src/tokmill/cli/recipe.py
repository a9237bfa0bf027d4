"""`tokmill recipe list|show|check|schema`."""

from __future__ import annotations

import itertools
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from tokmill import plugins
from tokmill.cli.output import print_json, print_table
from tokmill.cli.structs import field_docs
from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.recipe import convert, merge, overrides, read_toml, shipped, struct_of

app = typer.Typer(no_args_is_help=True, add_completion=False)

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Set a key of the recipe. May be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
TRAINING = {"data", "model", "task", "optim", "run"}


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the recipes that are shipped; `tokmill train NAME` takes one."""
    rows = []
    for name, path in shipped().items():
        # The comment that a recipe begins with says in its first sentence what it is for.
        lines = itertools.takewhile(lambda line: line[:1] == "#", path.read_text().splitlines())
        comment = " ".join(line[1:].strip() for line in lines)
        sentence = re.split(r"[:;.] ", re.sub(r" \([^)]*\)", "", comment))[0]
        what = "build" if "source" in read_toml(path) else "train"
        rows.append({"name": name, "for": what, "what": sentence.rstrip(".;")})
    if as_json:
        print_json(rows)
    else:
        print_table(["name", "for", "what"], [list(row.values()) for row in rows])


@app.command()
def show(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A TOML file, or the name of a shipped one.")
    ],
    set_: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON is what it prints anyhow.")] = False,
) -> None:
    """Print a recipe as JSON, over what it extends, with --set over both."""
    print_json(merge(read_toml(recipe), overrides(set_ or [])))


@app.command()
def check(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE…", help="TOML files.")],
    set_: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Check the keys and types of recipes; exit code 2 where one is wrong."""
    rows, code = [], 0
    for path in recipes:
        row = {"recipe": str(path), "ok": True, "what": "", "hint": ""}
        try:
            row["what"] = check_recipe(read_toml(path), overrides(set_ or []), str(path))
        except TokmillError as error:
            row |= {"ok": False, "what": error.what, "hint": error.hint}
            code = max(code, error.exit_code)
        rows.append(row)
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            print(f"{row['recipe']}: {'good' if row['ok'] else 'wrong'}: {row['what']}")
            if row["hint"]:
                print(f"  hint: {row['hint']}")
    if code:
        raise typer.Exit(code)


@app.command()
def schema(
    kind: Annotated[str, typer.Argument(help="`train`, `build`, or a source: text, jsonl, …")],
    as_json: AsJson = False,
) -> None:
    """List the keys of a recipe: type, default and meaning."""
    if kind == "train":
        keys = _training_keys()
    elif kind == "build":
        keys = keys_of(plugins.require("tokmill.builds.run").BuildRecipe)
    elif kind in plugins.SOURCES:
        keys = keys_of(plugins.load(plugins.SOURCES, kind).Config)
    else:
        raise UsageError(
            f"no recipe is of the kind {kind!r}",
            hint=nearest(kind, ["train", "build", *plugins.SOURCES]),
        )
    if as_json:
        print_json(keys)
        return
    rows = [[k["key"], k["type"], _shown(k), k["doc"]] for k in keys]
    print_table(["key", "type", "default", "meaning"], rows)


def check_recipe(value: dict[str, Any], options: dict[str, Any], where: str) -> str:
    """Check a recipe and options over it, as nested dicts, and say what it is."""
    if "source" in value:
        value = merge(value, options)
        kind = plugins.require("tokmill.builds.run").BuildRecipe
        recipe = convert(kind, value, where)
        config = plugins.load(plugins.SOURCES, recipe.source).Config
        try:
            convert(config, recipe.options, where)
        except UsageError as error:
            raise UsageError(f"options: {error.what}", where=where, hint=error.hint) from None
        return f"a build of {recipe.source}"
    if value.keys() & TRAINING:
        value = plugins.require("tokmill.training.recipe.key_names").merged(value, options, where)
        plugins.require("tokmill.training.recipe.check").from_dict(value, where)
        return "a training"
    raise UsageError(
        "it is neither a build (`source = …`) nor a training (`[data]`, `[model]`, `[task]`)",
        where=where,
        hint="`tokmill recipe schema train` and `tokmill recipe schema text` list the keys",
    )


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> list[dict[str, Any]]:
    """Return key, type, default and doc of a struct's fields, those of inner structs too."""
    docs, hints = field_docs(struct), typing.get_type_hints(struct)
    keys = []
    for field in msgspec.structs.fields(struct):
        name = f"{prefix}{field.encode_name}"
        inner = struct_of(hints[field.name])
        if inner is not None:
            keys += keys_of(inner, f"{name}.")
            continue
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = typing.cast(Any, field.default_factory)()
        required = default is msgspec.NODEFAULT
        keys.append(
            {
                "key": name,
                "type": type_name(hints[field.name]),
                "required": required,
                "default": None if required else msgspec.to_builtins(default),
                "doc": docs.get(field.name, ""),
            }
        )
    return keys


def type_name(annotation: Any) -> str:
    """Return a type as people write it in a recipe."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value)
                          for value in arguments)  # fmt: skip
    if origin is None:
        names = {str: "string", int: "integer", float: "number", bool: "true | false", Any: "any"}
        return names.get(annotation, getattr(annotation, "__name__", str(annotation)))
    inner = [type_name(a) for a in arguments if a not in (type(None), Ellipsis)]
    if origin in (tuple, list):
        same = len(set(inner)) == 1
        return f"list of {inner[0]}" if same else f"list of ({', '.join(inner)})"
    if origin is dict:
        return f"table of {inner[-1]}"
    return " | ".join(inner)


def _training_keys() -> list[dict[str, Any]]:
    keys = keys_of(plugins.require("tokmill.training.recipe.kinds").config_type())
    for name, key in plugins.require("tokmill.training.recipe.key_names").OTHER_NAMES.items():
        found = next(one for one in keys if one["key"] == key)
        found["doc"] += f", {name}" if "Also: " in found["doc"] else f" Also: {name}"
    return keys


def _shown(key: dict[str, Any]) -> str:
    if key["required"]:
        return "(required)"
    if key["default"] is None:
        return ""
    return msgspec.json.encode(key["default"]).decode()
