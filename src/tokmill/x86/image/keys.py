"""The key of a program (project, compiler, level …), read from its path by a template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tokmill.base.errors import UsageError

UNKNOWN = "unknown"
LEVELS = ("O0", "O1", "O2", "O3", "Os", "Oz", "Og", "Ofast")
"""Optimisation levels of compilers."""
BINARYCORP = re.compile(
    r"(?=.*-(?:[0-9a-f]{32}|saved_index-\w+-[0-9]+)$)(?:.*/)?"
    rf"(?P<project>[^/]+)-(?P<program>[^/-]+)-(?P<level>{'|'.join(LEVELS)})-\w+"
)
"""Names of BinaryCorp, with an md5, and those of the programs of its `saved_index.pkl`."""


class Key(NamedTuple):
    """Distinguishes programs that were built from the same source; columns have these names."""

    project: str
    program: str
    version: str
    compiler: str
    level: str


class KeyTemplate:
    """A template such as `{project}/{compiler}-{level}/{program}`.

    A field matches within one name of the path; only `{program}` may contain slashes. If a path
    fits in several ways, fields are as long as possible; `{level}` contains no dash.
    """

    def __init__(self, template: str) -> None:
        """Read a template; raises `UsageError` if it has no field, an unknown one, or one twice.

        The empty template fits every path, and only sets the program, or in the names of
        `BINARYCORP` all that they say.
        """
        self.template = template
        parts = re.split(r"\{(.*?)\}", template)
        fields = parts[1::2]
        wrong = [field for field in fields if field not in Key._fields]
        if wrong or len(set(fields)) < len(fields) or (template and not fields):
            raise UsageError(
                f"layout: {template!r} is not a template of a path",
                hint=f"fields, each once: {' '.join(f'{{{field}}}' for field in Key._fields)}",
            )
        patterns = {"program": ".+", "level": "[^/-]+"}
        for place, field in enumerate(fields):
            parts[2 * place + 1] = f"(?P<{field}>{patterns.get(field, '[^/]+')})"
        parts[::2] = map(re.escape, parts[::2])
        self._pattern = re.compile("".join(parts)) if template else BINARYCORP

    def fields(self, name: str) -> Mapping[str, str] | None:
        """Return the fields of an input's name; None if it does not fit."""
        match = self._pattern.fullmatch(name)
        return match.groupdict() if match else None if self.template else {}

    def key(self, name: str, compiler: str = "", level: str = "") -> Key:
        """Return the key of a program; fields that are not known are `unknown`.

        Args:
            name: name of the input.
            compiler: the compiler by the file, for templates without this field.
            level: the optimisation level by the file.
        """
        values = {"program": name, "compiler": compiler, "level": level}
        values |= dict(self.fields(name) or {})
        return Key(*(values.get(field) or UNKNOWN for field in Key._fields))

    def check(self, names: Iterable[str]) -> None:
        """Refuse a template that no name fits."""
        name = None
        for name in names:
            if self.fields(name) is not None:
                return
        if name is not None:
            raise UsageError(
                f"layout: no path fits {self.template!r}, such as {name!r}",
                hint="it is matched with all of the path below the INPUT argument",
            )
