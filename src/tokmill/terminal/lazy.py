"""Groups of commands that are imported only when they are called, so that `--help` is fast."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tokmill.base.errors import UsageError, nearest
from tokmill.terminal.output import behind_doors

LISTING = "tokmill.listing"


class LazyGroup(TyperGroup):
    """A group made of a table, name → (panel, line of help), and a function to load commands."""

    table: Callable[[], dict[str, tuple[str | None, str]]]
    load: Callable[[str], Any]
    before: Callable[[list[str]], list[str]] | None = None
    """Puts the command before words that begin with a path."""
    other_names: Mapping[str, str] = {}
    """What other programs call a command → its name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command's name, the command, and its words; a path may stand for a name."""
        path = os.path.lexists(args[0]) or {os.sep, "."} & {*args[0]}
        if self.before and args[0] not in self.table() and path:
            args = self.before(args)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.table())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command; for a listing, a placeholder with its line of help."""
        if ctx.meta.get(LISTING) and cmd_name in self.table():
            panel, line = self.table()[cmd_name]
            return TyperCommand(cmd_name, short_help=line, help=line, rich_help_panel=panel)
        command = self.load(cmd_name)
        if command is None:
            raise UsageError(
                f"`{ctx.command_path}` has no command {cmd_name!r}",
                hint=self._hint(ctx, cmd_name),
            )
        command.name = cmd_name
        return command

    def _hint(self, ctx: Any, name: str) -> str:
        """Return a hint: a group with this command, or names."""
        deeper = {inner: self.load(inner) for inner in self.table()}
        groups = {inner: group.list_commands(ctx) for inner, group in deeper.items()
                  if isinstance(group, TyperGroup)}  # fmt: skip
        if holders := [inner for inner, names in groups.items() if name in names]:
            named = (f"`{ctx.command_path} {holder} {name}`" for holder in holders)
            return f"did you mean {' or '.join(named)}?"
        if name in self.other_names:
            return f"here it is `{ctx.command_path} {self.other_names[name]}`"
        return nearest(name, self.table())

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List the commands without importing them."""
        ctx.meta[LISTING] = True
        super().format_help(ctx, formatter)


def lazy_group(
    name: str,
    help_text: str,
    table: Callable[[], dict[str, tuple[str | None, str]]],
    load: Callable[[str], Any],
    before: Callable[[list[str]], list[str]] | None = None,
    other_names: Mapping[str, str] | None = None,
    **settings: Any,
) -> LazyGroup:
    group = LazyGroup(name=name, help=help_text, no_args_is_help=True, **settings)
    group.table, group.load, group.before = table, load, before
    group.other_names = other_names or {}
    return group


def group_of(
    name: str,
    help_text: str,
    functions: Mapping[str, Callable[..., Any]],
    groups: Mapping[str, LazyGroup] | None = None,
) -> LazyGroup:
    """Return a group of functions, whose docstrings are their help, and of other groups."""
    inner = groups or {}
    lines = {key: (None, (f.__doc__ or "").splitlines()[0]) for key, f in functions.items()}
    lines |= {key: (None, str(group.help)) for key, group in inner.items()}

    def load(key: str) -> Any:
        return as_command(functions[key], key) if key in functions else inner.get(key)

    return lazy_group(name, help_text, lambda: {**lines}, load)


def as_command(function: Callable[..., Any], name: str | None = None) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(name=name)(behind_doors(function))
    return flowing(typer.main.get_command(app))


def flowing(command: Any) -> Any:
    """Join the lines of each paragraph of a command's help: the terminal breaks them anew."""
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = " "  # else the help names a value, <bool>
    if command.help:
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help))
    return command
