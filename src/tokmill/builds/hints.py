"""Hints for inputs that gave no record, or very few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokmill.builds.source import Source


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
    return hint_of_source(kind, config, paths, why) or _for_any(why, msgspec.to_builtins(config))


def _for_any(why: Mapping[str, int], options: Mapping[str, Any]) -> str:
    if "utf8" in why and max(why.values()) == why["utf8"]:
        other = ", or --invalid-utf8 replace" * ("invalid_utf8" in options)
        return f"it is not UTF-8: convert it: `iconv -f LATIN1 -t UTF-8`, or -f UTF-16{other}"
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
