"""The `tokmill` command; the file of a command is imported when the command is used."""

import contextlib
import gc
import importlib
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tokmill.base import bounds
from tokmill.base.bounds import explain_crashes, keep_out_of_working_directory
from tokmill.base.errors import Interrupted, TokmillError, plain
from tokmill.base.files import HINTS, machine_error
from tokmill.plugins import COMMANDS, load
from tokmill.terminal.frame import as_command, flowing, hint_of_option, lazy_group
from tokmill.terminal.output import with_escapes

# typer has its own copy of click, which is private; this is how its class is reached.
ClickException: type[Exception] = typer.BadParameter.__mro__[2]

TYPER_INTERRUPTED = 130
"""The exit code that typer returns for a KeyboardInterrupt in a command."""
ERROR, INTERRUPTED = ("error", "31"), ("interrupted", "33")
"""Labels of messages, and their colours on a terminal: red, yellow."""

SHORT_OF_MEMORY = ("failed to map segment", "annot allocate memory", "can't start new thread")
"""What errors of the loader, of threads and of libraries say where memory is short."""

PANELS = {
    "any data": ("build", "train", "eval", "predict", "sample", "embed"),
    "results": ("inspect", "trace", "compare", "plot", "report"),
    "files": ("store", "recipe", "model"),
    "text": ("tokenizer",),
    "programs": ("diff", "similarity", "cfg", "vocab"),
    "executions": ("bbv", "simpoint"),
    "MLIR": ("rl",),
    "this machine": ("demo", "doctor"),
}
"""Panel of `tokmill --help` → its commands, in this order; those of plug-ins come last."""
OTHERS = "plug-ins"
OTHER_COMMANDS = {
    "version": "--version",
    "config": "recipe",
    **dict.fromkeys(["generate", "complete"], "sample"),
    **dict.fromkeys(["info", "stats", "show", "ls", "head"], "inspect"),
    **dict.fromkeys(["finetune", "fine-tune", "pretrain", "fit", "resume"], "train"),
    **dict.fromkeys(["tokenize", "preprocess", "prepare", "convert", "ingest"], "build"),
    **dict.fromkeys(["disasm", "disassemble", "lift"], "cfg"),
    **dict.fromkeys(["classify", "infer"], "predict"),
    **dict.fromkeys(["evaluate", "test"], "eval"),
}
"""What other programs call a command → ours."""


def load_command(name: str) -> Any:
    """Import a command of the table; typer apps and functions become commands."""
    if name not in COMMANDS:
        return None
    value: Any = load(COMMANDS, name)
    if isinstance(value, TyperGroup):
        return value
    if not isinstance(value, typer.Typer):
        return as_command(value)
    command: Any = typer.main.get_command(value)
    for inner in command.commands.values():
        inner.callback = with_escapes(inner.callback)
        flowing(inner)
    return command


def listed() -> dict[str, tuple[str | None, str]]:
    """Return command → its panel and its line of help."""
    lines = {name: part.help for name, part in COMMANDS.items()}
    ours = {name: panel for panel, names in PANELS.items() for name in names}
    return {name: (ours.get(name, OTHERS), lines[name]) for name in dict.fromkeys([*ours, *lines])}


def application() -> TyperGroup:
    return lazy_group(
        "tokmill",
        "Train and compare sequence models on text and on machine code. `tokmill demo` shows how, "
        "`tokmill inspect FILE` describes a file and names the command for it.",
        listed,
        load_command,
        lambda words: ["inspect", *words],
        OTHER_COMMANDS,
        params=general_options(),
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def general_options() -> list[Any]:
    """Return --version, and typer's options that install completion in a shell."""
    app = typer.Typer(add_completion=True)
    app.callback(invoke_without_command=True)(_general)
    return list(flowing(typer.main.get_command(app)).params)


def _show_version(wanted: bool) -> None:
    if wanted:
        from tokmill.version import __version__

        print(f"tokmill {__version__}")
        raise typer.Exit


def _general(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None: ...


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and exit: 0 done, 1 refused, 2 usage, 3 interrupted, 4 extra, 5 machine.

    For a bug the exit code is 70; the traceback is written to a file and its path is printed.
    """
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminated)
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        # `obj`: `train` passes its arguments on to the processes that it starts.
        code = application().main(
            arguments, prog_name="tokmill", standalone_mode=False, obj=arguments
        )
        code = code if isinstance(code, int) else 0
        if code == TYPER_INTERRUPTED:
            raise KeyboardInterrupt
    except TokmillError as error:
        # A file that the user names and that is not there is no fault of the machine.
        is_named = bool(error.where) and Path(error.where) in map(Path, arguments)
        missing = is_named and isinstance(error.__cause__, FileNotFoundError)
        if missing and error.what.startswith("read"):
            error = TokmillError("there is no such file", where=error.where, hint="check the path")
        _complain(str(error), INTERRUPTED if isinstance(error, Interrupted) else ERROR)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _complain("by a signal\nhint: run it again: builds and trainings continue", INTERRUPTED)
        code = Interrupted.exit_code
    except ClickException as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            _complain(_usage(error))
        code = 2
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        code = 0
    except RecursionError:
        _complain("an input is nested too deeply\nhint: look for a long run of [ or { in it")
        code = 1
    except Exception as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in SHORT_OF_MEMORY):
            _complain("memory ran out\nhint: use less memory, as with --preset memory")
            sys.exit(5)
        if isinstance(error, OSError) and error.errno in HINTS:
            # The machine refused something: this is no bug.
            refused = machine_error("work", error.filename or "", error)
            _complain(str(refused))
            sys.exit(refused.exit_code)
        odd = [word for word in arguments if any("\udc80" <= char <= "\udcff" for char in word)]
        if isinstance(error, UnicodeEncodeError) and odd:
            _complain(f"{odd[0]} is not UTF-8\nhint: only names of files may hold other bytes")
            sys.exit(2)
        _report_bug()
        code = 70
    sys.exit(code)


def _report_bug() -> None:
    with tempfile.NamedTemporaryFile(
        "w",
        prefix="tokmill-bug-",
        suffix=".txt",
        delete=False,
        encoding="utf-8",
        errors="backslashreplace",
    ) as handle:
        handle.write(" ".join(sys.argv) + "\n\n" + traceback.format_exc())
    # Names of files in it may not be UTF-8 (`_complain` escapes them).
    last = traceback.format_exc().strip().splitlines()[-1]
    _complain(
        f"this is a bug in tokmill: {last}\nhint: please report it with the file {handle.name}"
    )


def entry() -> None:
    _open_closed_streams()
    explain_crashes()
    keep_out_of_working_directory()
    # Imports make hundreds of thousands of objects and no garbage. With the default thresholds, the
    # garbage collector takes a seventh of a short build.
    gc.set_threshold(200_000, 50, 50)
    bounds.own_process = True
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # All files are written by now. A normal exit of large packages would take 0.1 to 0.3 s.
    os._exit(code if isinstance(code, int) else 0)


def _open_closed_streams() -> None:
    # After `tokmill … >&-`, the next file that is opened would be number 1, and be printed into.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r+")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _usage(error: Any) -> str:
    command = error.ctx.command_path if getattr(error, "ctx", None) else "tokmill"
    option = getattr(error, "option_name", "")
    if type(error).__name__ == "NoSuchOption" and error.ctx:
        hint = hint_of_option(option, error.ctx)
        if not hint and command in ("tokmill train", "tokmill rl train"):
            # Users of other trainers may try keys of the recipe as options.
            name = option.lstrip("-").replace("-", "_")
            reading = importlib.import_module("tokmill.training.recipe.read_recipe")
            key = reading.plain_key(name)
            hint = f"it is a key of the recipe: --set {key}=VALUE" if key else ""
            hint = hint or reading.OTHER_WAYS.get(name, "")
        if hint:
            return f"there is no option {option}\nhint: {hint}"
    options = (
        [option for one in error.ctx.command.params for option in one.opts] if error.ctx else []
    )
    if "unexpected extra argument" in error.format_message() and "--prompt" in options:
        return f"{error.format_message()}\nhint: --prompt TEXT"
    return f"{error.format_message()}\nhint: {command} --help"


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _complain(text: str, kind: tuple[str, str] = ERROR) -> None:
    first, _, rest = plain(text).partition("\nhint:")
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    label, hint = f"{kind[0]}:", "hint:"
    if colour:
        label, hint = f"\x1b[1;{kind[1]}m{label}\x1b[0m", f"\x1b[1;36m{hint}\x1b[0m"
    # If stderr cannot be written (a log on a full disk), the exit code still shows the error.
    with contextlib.suppress(OSError):
        print(f"{label} {first}", file=sys.stderr)
        if rest:
            print(f"{hint}{rest}", file=sys.stderr)
