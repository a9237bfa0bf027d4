"""Flags from structs: each key of a source's options is a flag that says `key = flag`."""

from __future__ import annotations

import copy
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec
import typer

from tokmill.recipe import overrides

PANEL = "options of the recipe"


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstrings that stand below a struct's fields, its parents' included."""
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


def struct_parameters(struct: type[msgspec.Struct]) -> list[inspect.Parameter]:
    """Return one keyword parameter for typer a field; None means that the flag was not given."""
    docs, hints = field_docs(struct), typing.get_type_hints(struct)
    parameters = []
    for field in msgspec.structs.fields(struct):
        flag = flag_type(hints[field.name])
        if flag is None:
            continue
        kind, many = flag
        default = field.default
        shown = "" if default in (msgspec.NODEFAULT, None, ()) else f" [{_show(default)}]"
        name = field.name.replace("_", "-")
        names = [f"--{name}/--no-{name}"] if kind is bool else [f"--{name}"]
        if many and name.endswith("s"):
            names.insert(0, f"--{name[:-1]}")
        help_text = f"{docs.get(field.name, '')} Sets {field.name}.{shown}".strip()
        # In help texts [word] would be taken for markup.
        help_text = help_text.replace("[", "\\[")
        if typing.get_origin(hints[field.name]) is Literal:
            help_text += f" One of: {', '.join(typing.get_args(hints[field.name]))}."
        option = typer.Option(*names, help=help_text, rich_help_panel=PANEL, show_default=False)
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
    """Return (type of the flag, may it be repeated), or None where only a recipe can say it."""
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
    """Return the struct keys among a command's arguments that were given."""
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

    Those of its own that are `hidden` are taken, and left out of the help.
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
