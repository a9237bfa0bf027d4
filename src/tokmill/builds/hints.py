"""Hints for inputs of which (nearly) nothing became a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokmill.builds.source import Source

KEYS = ("missing", "type", "json", "too long")
"""Reasons for which a source looks at its files again, to say what is in them."""


def hint_of_source(
    kind: type[Source], config: Any, paths: Sequence[str], why: Mapping[str, int]
) -> str:
    """Return what a source has to say of inputs that give (nearly) no record; "" for nothing.

    Args:
        kind: class of the source, whose `hints` and `why_nothing` are asked.
        config: its options.
        paths: the first files.
        why: reason → records that were left out for it.
    """
    reason = max(why, key=lambda reason: why[reason], default="")
    if reason in KEYS:
        said: str = kind.why_nothing(config, paths)
        if said:
            return said
    return kind.hints.get(reason, "")


def hint(kind: type[Source], config: Any, paths: Sequence[str], why: Mapping[str, int]) -> str:
    """Return what helps where not one record was found: of the source, or else for the reason."""
    return hint_of_source(kind, config, paths, why) or _for_any(why, msgspec.to_builtins(config))


def _for_any(why: Mapping[str, int], options: Mapping[str, Any]) -> str:
    if "utf8" in why and max(why.values()) == why["utf8"]:
        other = ", or --invalid-utf8 replace" * ("invalid_utf8" in options)
        return f"it is no text in UTF-8: convert it, as with `iconv -f LATIN1 -t UTF-8`{other}"
    if "missing" in why:
        fields = ", ".join(map(repr, options.get("fields", ())))
        return f"no record has one of the fields {fields}: name yours with --field"
    if "json" in why:
        return "is this JSON Lines? Plain text is built with `tokmill build text`"
    if "too long" in why:
        if options.get("record") == "separator":
            return "records end at the separator, which never comes: --record line takes lines"
        return "a record has 64 MiB of text at most, and there is no end of one: cut it before"
    if "too short" in why:
        return "nothing is as long as was asked for: allow shorter records"
    return "is it the right kind of input?"
