"""What can go wrong for a user, and the exit code of each kind.

An error says what is wrong and where (file, line or byte, key) and ends in a hint. The command
line prints it without a traceback; anything that is no `TokmillError` is a bug.
"""

import difflib
import os
import re
import shlex
from collections.abc import Collection, Iterable

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that control a terminal or cannot be printed: control characters except tab and
newline, marks of text direction, and bytes of file names that are not UTF-8."""


def plain(text: str) -> str:
    """Return text that is safe to print: `UNSAFE` characters are written as `\\x1b`, `\\u202e`."""
    return UNSAFE.sub(_escaped, text)


def one_line(text: str) -> str:
    """Return text as `plain`, also without tabs and newlines: as a cell of a table it stays one."""
    return plain(text).replace("\n", "\\n").replace("\t", "\\t")


def shell_word(path: str | os.PathLike[str]) -> str:
    """Return a path as a word of a bash command: no option, and printable."""
    text = os.fspath(path)
    text = f"./{text}" if text.startswith("-") else text
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_in_shell, text)) + "'"


def _in_shell(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def _escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


class TokmillError(Exception):
    """An input was refused or a check failed (exit code 1)."""

    exit_code = 1

    def __init__(self, what: str, *, hint: str, where: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(what, where, hint)

    def __str__(self) -> str:
        where = one_line(self.where)
        text = f"{where}: {self.what}" if where else self.what
        return plain(f"{text}\nhint: {self.hint}" if self.hint else text)

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes; the default pickling loses keyword arguments.
        return _rebuild, (type(self), self.what, self.where, self.hint)


def _rebuild(kind: type[TokmillError], what: str, where: str, hint: str) -> TokmillError:
    return kind(what, where=where, hint=hint)


class UsageError(TokmillError):
    """A wrong command line or recipe (exit code 2)."""

    exit_code = 2


class Interrupted(TokmillError):
    """Work was stopped by a signal or a time limit and can be resumed (exit code 3)."""

    exit_code = 3


class MissingExtraError(TokmillError):
    """A part of the program needs packages that are not installed (exit code 4)."""

    exit_code = 4


class MachineError(TokmillError):
    """The machine refused: disk, permission, lock, a killed worker (exit code 5)."""

    exit_code = 5


def check_name(what: str, name: str, choices: Collection[str], where: str = "") -> None:
    """Refuse a name that is not among the choices: "no lifter is called 'x'"."""
    # A table of parts looks for those of installed packages when it is asked for a name.
    if name not in choices:
        raise UsageError(f"{what} called {name!r}", where=where, hint=nearest(name, choices))


def nearest(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Return "did you mean …?" for the nearest known name, or else `otherwise` or all of them."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    if otherwise:
        return otherwise
    return f"known: {', '.join(choices)}" if choices else ""
