"""Hints for inputs that gave no record, or very few."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokmill.builds.source import Source
from tokmill.files import reading
from tokmill.inflate import CAT, inflate, packing

BYTE_ORDER = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
HEAD = 1 << 12
"""Bytes of a file by which its encoding is told."""


def hint_of_source(
    kind: type[Source], config: Any, paths: Sequence[str], why: Mapping[str, int]
) -> str:
    """Return the source's hint for inputs that gave no record, or very few; "" if it has none.

    Args:
        kind: class of the source, with `hints` and `why_nothing`.
        config: its options.
        paths: the first files.
        why: reason → number of records left out.
    """
    reason = max(why, key=lambda reason: why[reason], default="")
    if reason in kind.explained:
        said: str = kind.why_nothing(config, paths)
        if said:
            return said
    return kind.hints.get(reason, "")


def hint(kind: type[Source], config: Any, paths: Sequence[str], why: Mapping[str, int]) -> str:
    """Return the hint if no record was found: that of the source, or one for the reason."""
    return hint_of_source(kind, config, paths, why) or _for_any(
        why, msgspec.to_builtins(config), paths
    )


def encoding_of(head: bytes) -> str:
    """Return the name of UTF-16 or UTF-32 as iconv has it if text begins so, else "".

    Without a byte order mark the zero bytes of ASCII characters tell.
    """
    for name in ("UTF-32", "UTF-16"):
        if head.startswith(BYTE_ORDER[name]):
            return name
    for width in (4, 2) if len(head) >= 8 else ():
        zeros = [head[place::width].count(0) > len(head) // (2 * width) for place in range(width)]
        if sum(zeros) == width - 1 and not (zeros[0] and zeros[-1]):
            return f"UTF-{8 * width}{'BE' if zeros[0] else 'LE'}"
    return ""


def conversion(path: str) -> str:
    """Return how to convert a file that is not UTF-8: the command, where its encoding is known."""
    with reading(path) as file:
        head = file.read(HEAD)
    packed = packing(head)
    found = encoding_of(next(inflate(path, kind=packed), b"")[:HEAD] if packed else head)
    name = f"iconv -f {found or 'LATIN1'} -t UTF-8"
    quoted = shlex.quote(path)
    command = f"{CAT[packed]} {quoted} | {name} > NEW" if packed else f"{name} {quoted} > NEW"
    unsure = "" if found else " (or another encoding: `iconv -l` lists them)"
    return f"convert it, as with `{command}`{unsure}"


def _for_any(why: Mapping[str, int], options: Mapping[str, Any], paths: Sequence[str]) -> str:
    if "utf8" in why and max(why.values()) == why["utf8"]:
        other = ", or --invalid-utf8 replace" * ("invalid_utf8" in options)
        return f"it is not UTF-8: {conversion(paths[0])}{other}"
    if "missing" in why:
        fields = ", ".join(map(repr, options.get("fields", ())))
        return f"no record has one of the fields {fields}: name yours with --field"
    if "json" in why:
        return "is this JSON Lines? Plain text is built with `tokmill build text`"
    if "too long" in why:
        if options.get("record") == "separator":
            return "the separator that ends records does not occur: --record line reads lines"
        return "a record has at most 64 MiB of text, and this one has no end: split it before"
    if "too short" in why:
        return "all records are shorter than was asked for: allow shorter ones"
    return "is it the right kind of input?"
