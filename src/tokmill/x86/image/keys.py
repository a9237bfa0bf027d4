"""What a program is called: its key, from a template of paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tokmill.errors import UsageError

UNKNOWN = "unknown"


class Key(NamedTuple):
    """What tells programs apart that were made of the same source; columns of these names."""

    project: str
    program: str
    version: str
    compiler: str
    level: str


class KeyTemplate:
    """A template such as `{project}/{compiler}-{level}/{program}`.

    A field is part of one name in the path, but `{program}`, which may hold slashes. Where a path
    can be read in several ways, a field takes as much as it can; `{level}` holds no dash.
    """

    def __init__(self, template: str) -> None:
        """Read a template; raises `UsageError` where it names no field, a wrong one, or one twice.

        Without a template every path fits, and says nothing but the program.
        """
        self.template = template
        parts = re.split(r"\{(.*?)\}", template)
        fields = parts[1::2]
        wrong = [field for field in fields if field not in Key._fields]
        if wrong or len(set(fields)) < len(fields) or (template and not fields):
            raise UsageError(
                f"layout: {template!r} is no template of a path",
                hint=f"fields, each once: {' '.join(f'{{{field}}}' for field in Key._fields)}",
            )
        patterns = {"program": ".+", "level": "[^/-]+"}
        for place, field in enumerate(fields):
            parts[2 * place + 1] = f"(?P<{field}>{patterns.get(field, '[^/]+')})"
        parts[::2] = map(re.escape, parts[::2])
        self._pattern = re.compile("".join(parts))

    def fields(self, name: str) -> Mapping[str, str] | None:
        """Return what the name of an input says; None where it does not fit."""
        if not self.template:
            return {}
        found = self._pattern.fullmatch(name)
        return found.groupdict() if found else None

    def key(self, name: str, compiler: str = "", level: str = "") -> Key:
        """Return the key of a program; `unknown` is what neither its name nor its file says.

        Args:
            name: of the input.
            compiler: what the file says of its compiler, for templates that do not name it.
            level: the same of the level of optimisation.
        """
        said = {"program": name, "compiler": compiler, "level": level}
        said |= dict(self.fields(name) or {})
        return Key(*(said.get(field) or UNKNOWN for field in Key._fields))

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
