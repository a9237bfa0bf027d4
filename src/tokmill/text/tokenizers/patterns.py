"""Patterns that cut text into words before byte pairs are merged.

A pattern is a regular expression of the library Oniguruma, as in tokenizer files (`\\p{L}`,
`(?i:…)`); the package `tokenizers` runs it.
"""

from __future__ import annotations

import re

from tokmill.base.errors import UsageError, nearest

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's words (Radford et al. 2019; the contractions in its later spelling)."""

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4's words as tokenizer.json files have them (Llama 3 too)."""

O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""GPT-4o's words (tiktoken's `o200k_base`)."""

PATTERNS = {"gpt2": GPT2, "cl100k": CL100K, "o200k": O200K}
"""Names for `--pattern`; any other value is a regular expression."""

WELL_KNOWN = {GPT2, CL100K, O200K}
SAFE_CUT = re.compile(
    r"(?<=\S)(?= )"
    r"|(?<=[0-9A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3])"
    r"(?=[\n!-&(-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1f])"
)
"""Matches places where a text may be cut, except at its end: before a space, or between a letter or
digit and what cannot go on with its word (an apostrophe can: `'s`). All patterns of `WELL_KNOWN`
end a word there, whatever follows, so the words of the parts are those of the whole."""


def resolve_pattern(name: str) -> str:
    """Return the pattern called `name`, or `name` itself if it is a regular expression.

    Raises `UsageError` for an unknown plain word (a pattern of letters only is a mistake).
    """
    if name in PATTERNS:
        return PATTERNS[name]
    if not name or re.fullmatch(r"[\w.-]+", name):
        raise UsageError(
            f"no pattern is called {name!r}",
            hint=f"{nearest(name, PATTERNS)}; or give a regular expression",
        )
    return name


def safe_cut(pattern: str) -> re.Pattern[str] | None:
    """Return `SAFE_CUT` for a pattern that is well known; else None."""
    return SAFE_CUT if pattern in WELL_KNOWN else None
