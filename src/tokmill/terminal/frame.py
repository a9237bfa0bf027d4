"""Commands that are imported when they are called, and their flags, made of structs of options."""

import copy
import inspect
import os
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from tokmill.base.errors import UsageError, nearest
from tokmill.terminal.output import say, with_escapes

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
At = Annotated[str, typer.Option(metavar="best|last|STEP", help="Which weights of the run.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Json = Annotated[bool, typer.Option("--json", help="Report as JSON.")]
FilesFrom = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LIST",
        help="Text file with an INPUT on each line; - for stdin. Lines with # are ignored, and "
        "relative paths are relative to the folder of the list. May be repeated.",
    ),
]

OTHER_NAMES = {
    **dict.fromkeys(["output", "output-dir", "output-file", "save-dir"], "-o PATH"),
    **dict.fromkeys(["use-params", "train-cfg", "model-cfg", "deepspeed-config"], "--config FILE"),
    "batch-size": "--preset memory|balanced|speed, which sets the size of blocks",
    "deepspeed": "--engine deepspeed",
    "max-length": "--max-tokens N",
    **dict.fromkeys(["limit-time", "max-minutes", "minutes", "timeout"], "--max-time 10m"),
    "merge-type": "--key function,level, which makes a dict; without it the file is a list",
    "min-length": "--min-tokens N",
    "num-workers": "--workers N",
    "sample-ratio": "--ratio 0.2",
    "save-frequency": "--windows-per-file N",
    "semi-hard": "--negatives semi-hard",
    "special-tokens": "--special TOKEN",
    "tokenizer-path": "--tokenizer PATH",
    "train-file": "--train FILE",
    "val-file": "--val FILE",
    "vocab-dir": "--vocab FOLDER",
}
"""An option of other programs → that of a command which has it."""
INPUTS = ("input", "input-dir", "input-file", "directory", "binary-dir", "cfg-dir", "data-dir")
"""Their options for what a command takes without an option."""
WINDOWS = (
    "`tokmill store export npz STORE --max-length 1024 --stride 512 --windows-per-file 10000 "
    "-o DIR` cuts windows"
)
SELECT = "`tokmill build select STORE --min-length 50 --max-length 2048 --ratio 0.2 -o NEW` chooses"
MINE = "`tokmill build mine STORE --what bbv --negatives semi-hard --margin 0.25 -o TRIPLETS` draws"
DICT = "`tokmill store export token-dicts STORE --key function,level -o FILE` writes a dict"
ELSEWHERE = {
    **dict.fromkeys(["stride", "padding", "save-frequency", "windows-per-file"], WINDOWS),
    **dict.fromkeys(["margin", "negatives", "semi-hard"], f"{MINE} triplets"),
    "max-length": f"{WINDOWS}; {SELECT} records",
    **dict.fromkeys(
        ["executor", "address"],
        "`--part i/n` is a machine's part of a build, and `--workers` the processes on it",
    ),
    "merge-type": f"{DICT}, without --key a list",
    **dict.fromkeys(["min-length", "ratio", "sample-ratio", "unique"], f"{SELECT} records"),
}
"""An option that a command of data does not have → the command that does."""


def hint_of_option(option: str, context: Any) -> str:
    """Return where to find an option that a command, given by its context, does not have, or ""."""
    name = option.lstrip("-").replace("_", "-")
    parameters = context.command.params
    names = [opt for parameter in parameters for opt in parameter.opts]
    arguments = [p.metavar or p.name.upper() for p in parameters if p.param_type_name == "argument"]
    for form in (f"--{name}", OTHER_NAMES.get(name, "")):
        if form and form.split()[0] in names:
            return f"here it is {form}"
    if name in INPUTS and arguments:
        return f"it needs no option: {context.command_path} {' '.join(arguments)}"
    of_data = context.command_path.startswith(("tokmill build", "tokmill store export"))
    return ELSEWHERE.get(name, "") if of_data else ""


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
        if self.before and path and args[0] not in self.table():
            args = self.before(args)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
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
    app.command(name=name)(with_escapes(function))
    return flowing(typer.main.get_command(app))


NAMING = ("tokenizer", "out", "at", "name", "projects", "pairs")
"""Options that name something, beside those whose type is a path."""


def flowing(command: Any) -> Any:
    """Join the lines of each paragraph of a command's help: the terminal breaks them anew.

    The command also says which options of one value were given several times, and refuses an
    empty name, which would be the working directory, or all.
    """
    parse = command.parse_args

    def parse_args(context: Any, words: list[str]) -> Any:
        values, _, order = command.make_parser(context).parse_args([*words])
        for one, times in Counter(order).items():
            if context.resilient_parsing:
                break
            value, names = values[one.name], one.type.name == "path" or one.name in NAMING
            if names and "" in (value if isinstance(value, list | tuple) else (value,)):
                what = one.opts[-1] if one.param_type_name == "option" else one.name.upper()
                raise UsageError(f"{what} is empty", hint="is a variable empty?")
            takes_one = one.param_type_name == "option" and not (one.multiple or one.is_flag)
            if times > 1 and takes_one:
                say(f"note: {one.opts[-1]} is given {times} times, and its last value counts")
        return parse(context, words)

    command.parse_args = parse_args
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = " "  # else the help names a value, <bool>
    if command.help:
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help))
    return command


PANEL = "options of the recipe"


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstrings below a struct's fields, also those of its parents."""
    import ast

    docs: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if not issubclass(kind, msgspec.Struct) or kind is msgspec.Struct:
            continue
        try:
            # `inspect.getsource` of a class parses the whole file.
            source = inspect.getsource(sys.modules[kind.__module__])
            own = re.search(rf"^class {kind.__name__}\b.*?(?=^[^\s)]|\Z)", source, re.M | re.S)
            body = ast.parse(own[0]).body[0] if own else None
        except (OSError, TypeError, KeyError, SyntaxError):
            continue
        if not isinstance(body, ast.ClassDef):
            continue
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
    the recipe in which the fields are keys; None: they are not keys.
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


def _show(value: Any) -> str:
    if isinstance(value, str | int | float | bool):
        return repr(value) if isinstance(value, str) else str(value).lower()
    return ", ".join(repr(v) for v in value)
