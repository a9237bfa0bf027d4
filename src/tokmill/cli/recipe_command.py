"""`tokmill recipe list` and `recipe schema`."""

import itertools
import re
import typing
from typing import Annotated, Any, Literal

import msgspec
import typer

from tokmill import plugins
from tokmill.base.errors import UsageError, nearest
from tokmill.base.recipe import read_toml, shipped, struct_of
from tokmill.terminal.frame import AsJson, field_docs
from tokmill.terminal.output import print_json, print_table

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the recipes that come with tokmill; `tokmill train NAME` uses one."""
    rows = []
    for name, path in shipped().items():
        # A recipe begins with a comment, whose first sentence says what it is for.
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
def schema(
    kind: Annotated[str, typer.Argument(help="`train`, `build`, or a source: text, jsonl, …")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="For `train`: only this model, task or optimiser. May be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the keys of a recipe: type, default and meaning."""
    if only and kind != "train":
        raise UsageError("--kind is for `tokmill recipe schema train`", hint="leave it out")
    if kind == "train":
        keys = training_keys(only or [])
    elif kind == "build":
        from tokmill.builds.plan import BuildRecipe

        keys = keys_of(BuildRecipe)
    elif kind in plugins.SOURCES:
        keys = keys_of(plugins.load(plugins.SOURCES, kind).Config)
    else:
        raise UsageError(
            f"there is no recipe of the kind {kind!r}",
            hint=nearest(kind, ["train", "build", *plugins.SOURCES]),
        )
    if as_json:
        print_json(keys)
        return
    rows = [[k["key"], k["type"], _shown(k), k["doc"]] for k in keys]
    headers = ["key", "type", "default", "meaning"]
    if kind == "train":
        headers = ["key", "kind", *headers[1:]]
        rows = [
            [row[0], ", ".join(k["kinds"]), *row[1:]] for k, row in zip(keys, rows, strict=True)
        ]
    print_table(headers, rows)


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> list[dict[str, Any]]:
    """Return key, type, default and doc of a struct's fields, also of inner structs."""
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


def training_keys(only: list[str]) -> list[dict[str, Any]]:
    """Return the keys of trainings; `kinds`: the models, tasks or optimisers that have a key.

    `only`: kinds that replace all others of their table.
    """
    from tokmill.training.recipe import config as module

    named = [kind for table in module.KINDS.values() for kind in table]
    if wrong := [kind for kind in only if kind not in named]:
        raise UsageError(f"no kind is called {wrong[0]!r}", hint=nearest(wrong[0], named))
    keys = []
    for section, struct in typing.get_type_hints(module.config_type()).items():
        kinds = module.KINDS.get(section, {})
        if not kinds:
            keys += [key | {"kinds": []} for key in keys_of(struct, f"{section}.")]
        for kind in [kind for kind in kinds if kind in only] or kinds:
            config = plugins.load(kinds, kind).Config
            for key in keys_of(config, f"{section}."):
                same = [one for one in keys if {**one, "kinds": []} == {**key, "kinds": []}]
                if same:
                    same[0]["kinds"].append(kind)
                else:
                    keys.append(key | {"kinds": [kind]})
    from tokmill.training.recipe.read_recipe import OTHER_NAMES

    for name, place in OTHER_NAMES.items():
        for key in keys:
            if key["key"] == place:
                key["doc"] += f", {name}" if "Also: " in key["doc"] else f" Also: {name}"
    return keys


def _shown(key: dict[str, Any]) -> str:
    if key["required"]:
        return "(required)"
    if key["default"] is None:
        return ""
    return msgspec.json.encode(key["default"]).decode()
