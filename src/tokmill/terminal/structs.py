"""Flags of commands that are made from structs of options."""

from __future__ import annotations

import copy
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec
import typer

from tokmill.base.recipe import overrides

PANEL = "options of the recipe"


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstrings below a struct's fields, also those of its parents."""
    import ast
    import textwrap

    docs: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if not issubclass(kind, msgspec.Struct) or kind is msgspec.Struct:
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[field.target.id] = " ".join(str(after.value.value).split())
    return docs


def struct_parameters(
    struct: type[msgspec.Struct],
    panel: str = PANEL,
    *,
    only: Collection[str] = (),
    prefix: str | None = "",
) -> list[inspect.Parameter]:
    """Return a keyword parameter for typer for each field; None: the flag was not given.

    `panel`: of the help. `only`: fields that have a flag; all by default. `prefix`: the table of
    the recipe in which the fields are keys; None: they are no keys.
    """
    docs, hints = field_docs(struct), typing.get_type_hints(struct)
    parameters = []
    for field in msgspec.structs.fields(struct):
        flag = flag_type(hints[field.name])
        if flag is None or (only and field.name not in only):
            continue
        kind, many = flag
        default = field.default
        shown = "" if default in (msgspec.NODEFAULT, None, (), "") else f" [{_show(default)}]"
        name = field.name.replace("_", "-")
        names = [f"--{name}/--no-{name}"] if kind is bool else [f"--{name}"]
        if many and name.endswith("s"):
            names.insert(0, f"--{name[:-1]}")
        sets = "" if prefix is None else f" Sets {prefix}{field.name}."
        help_text = f"{docs.get(field.name, '')}{sets}{shown}".strip()
        # In help texts [word] is markup.
        help_text = help_text.replace("[", "\\[")
        if typing.get_origin(hints[field.name]) is Literal:
            help_text += f" One of: {', '.join(typing.get_args(hints[field.name]))}."
        option = typer.Option(
            *names, help=help_text, rich_help_panel=panel or None, show_default=False
        )
        annotation = (list[kind] | None) if many else (kind | None)  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(
                f"opt_{field.name}",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[annotation, option],
            )
        )
    return parameters


def flag_type(annotation: Any) -> tuple[Any, bool] | None:
    """Return (type of a flag, whether it may be repeated), or None if only a recipe can set it."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return str, False
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return flag_type(inner[0]) if len(inner) == 1 else None
    if origin in (tuple, list):
        inner_flag = flag_type(typing.get_args(annotation)[0])
        return (inner_flag[0], True) if inner_flag and not inner_flag[1] else None
    return (annotation, False) if annotation in (str, int, float, bool) else None


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command that are fields of a struct and were given."""
    return {
        name.removeprefix("opt_"): value
        for name, value in arguments.items()
        if name.startswith("opt_") and value is not None and value != []
    }


def with_parameters(
    function: Callable[..., Any],
    parameters: list[inspect.Parameter],
    doc: str,
    hidden: Collection[str] = (),
) -> Callable[..., Any]:
    """Return a function for typer with more parameters than `function`, which takes **options.

    `hidden`: names of its own parameters that the help does not show.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [_hide(p) if p.name in hidden else p for p in own]

    def command(**arguments: Any) -> Any:
        return function(**arguments)

    command.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *parameters]}
    command.__doc__ = doc
    return command


def _hide(parameter: inspect.Parameter) -> inspect.Parameter:
    kind, option = typing.get_args(parameter.annotation)
    option = copy.copy(option)
    option.hidden = True
    return parameter.replace(annotation=Annotated[kind, option])


def settings(values: list[str] | None) -> dict[str, Any]:
    """Return `--set` values as nested dicts."""
    return overrides(values or [])


def _show(value: Any) -> str:
    if isinstance(value, str | int | float | bool):
        return repr(value) if isinstance(value, str) else str(value).lower()
    return ", ".join(repr(v) for v in value)
