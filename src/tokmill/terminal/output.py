"""Printing: results to stdout, messages to stderr, JSON for `--json`."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar, cast

import msgspec

from tokmill.base.errors import UNSAFE, UsageError, one_line, plain
from tokmill.plugins import extras

P = ParamSpec("P")
T = TypeVar("T")


class EscapedStream:
    """A stream that escapes control characters, which names of files may contain."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        """The stream itself, for our own control sequences and for results that are raw text."""

    def write(self, text: str) -> int:
        self.inner.write(plain(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextlib.contextmanager
def escaped_streams() -> Iterator[None]:
    """Replace stdout and stderr by streams that escape while a command runs."""
    before = sys.stdout, sys.stderr
    streams = EscapedStream(before[0]), EscapedStream(before[1])
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", streams)
    try:
        yield
    finally:
        # A stream that somebody else has replaced in the meantime stays.
        for name, escaped, stream in zip(("stdout", "stderr"), streams, before, strict=True):
            if getattr(sys, name) is escaped:
                setattr(sys, name, stream)


def with_escapes(function: Callable[P, T]) -> Callable[P, T]:
    """Return a command that runs `function` with escaped output, and numbers of at most 64 bits."""

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        with escaped_streams(), extras():
            for name, value in options.items():
                if isinstance(value, int) and value.bit_length() > 63:
                    from tokmill.base.recipe import check_numbers

                    check_numbers(value, place=f"--{name.removeprefix('opt_')}".replace("_", "-"))
            return function(*arguments, **options)

    return run


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path]) -> None:
    """Refuse an output that is an input or another output, as one would replace the other.

    `outputs`: option → file. Raises `UsageError`.
    """
    read = {path.resolve() for path in inputs}
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        place = path.resolve()
        if place in read:
            raise UsageError(
                f"{option} would replace what is read", where=str(path), hint="name another file"
            )
        if place in taken:
            raise UsageError(
                f"{taken[place]} and {option} name the same file",
                where=str(path),
                hint="name two files",
            )
        taken[place] = option


def print_text(text: str) -> None:
    """Print a text as a result: escaped on a terminal, unchanged in a pipe or a file."""
    stream = sys.stdout if sys.stdout.isatty() else getattr(sys.stdout, "inner", sys.stdout)
    stream.write(text)
    stream.flush()


def print_line(*lines: str) -> None:
    """Print a result, each line as one: a newline in the name of a file is escaped."""
    print(*map(one_line, lines), sep="\n")


def say(*lines: str) -> None:
    """Print a message (not a result) to stderr, each line as one."""
    print(*map(one_line, lines), sep="\n", file=sys.stderr)


def say_not_reached(size: int, asked: int) -> None:
    """Explain why a trained tokenizer has fewer ids than asked for, if so."""
    if size < asked:
        say(
            f"{size:,} ids, not {asked:,}: no two tokens stand side by side often enough to be "
            "joined (more text gives more)"
        )


def print_json(value: Any) -> None:
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        # It contains a name that is not UTF-8.
        encoded = msgspec.json.encode(_plain_values(msgspec.to_builtins(value)))
    text = msgspec.json.format(encoded, indent=2).decode()
    # Escaped as JSON requires, before the stream would escape it in its own way.
    text = UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    sys.stdout.write(text + "\n")


def _plain_values(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {_plain_values(key): _plain_values(inner) for key, inner in value.items()}
    return [_plain_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def print_table(headers: list[str], rows: list[list[Any]]) -> None:
    """Print rows as an aligned plain table to stdout; numbers to the right."""
    headers = list(map(one_line, headers))
    cells = [[one_line(in_words(value)) for value in row] for row in rows]
    widths = [
        max([len(header), *(len(row[i]) for row in cells)]) for i, header in enumerate(headers)
    ]
    right = [bool(rows) and isinstance(rows[0][i], int | float) for i in range(len(headers))]

    def line(values: list[str]) -> str:
        padded = [
            value.rjust(width) if is_right else value.ljust(width)
            for value, width, is_right in zip(values, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    print(line(headers))
    print(line(["-" * width for width in widths]))
    for row in cells:
        print(line(row))


def html_table(title: str, rows: Mapping[str, object]) -> str:
    cells = "".join(
        f"<tr><th>{escape(plain(name))}</th><td>{escape(plain(str(value)))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(plain(title))}</caption>{cells}</table>"


def in_words(value: Any) -> str:
    """Return a value as people read it: yes or no, 1,234, four digits of a fraction."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
