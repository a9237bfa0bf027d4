"""What iced-x86 calls things: its enumerations as tuples of names."""

from __future__ import annotations

import functools

from tokmill import plugins


@functools.cache
def names(enumeration: str) -> tuple[str, ...]:
    """Return the names of an enumeration of iced-x86 (such as `Register`), by value."""
    members = vars(getattr(plugins.require("iced_x86"), enumeration))
    values = {value: name for name, value in members.items() if name.isupper()}
    return tuple(values[value] for value in range(len(values)))
