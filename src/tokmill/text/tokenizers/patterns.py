"""Patterns that cut text into words, and where a text may be cut that arrives in parts.

A pattern is a regular expression of the library Oniguruma, as in tokenizer files (`\\p{L}`,
`(?i:…)`); the package `tokenizers` runs it.
"""

import functools
import re
from collections.abc import Collection, Iterable, Iterator

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
    """Return the pattern called `name`, or `name` itself if it is a regular expression."""
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


@functools.lru_cache(maxsize=64)
def specials_pattern(specials: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return a pattern of special tokens: it finds the leftmost, and there the longest."""
    if not specials:
        return None
    return re.compile("|".join(re.escape(token) for token in sorted(specials, key=len)[::-1]))


def pieces(text: str, specials: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Cut a whole text into (piece, is it a special token), losing nothing."""
    return _pieces(text, specials_pattern(tuple(sorted(specials))))


def segments(
    chunks: Iterable[str], specials: Collection[str], safe: re.Pattern[str] | None
) -> Iterator[tuple[str, bool]]:
    """Cut text that arrives in chunks into (piece, is it a special token), losing nothing.

    Special tokens across chunks are found too. Other text is cut at special tokens and where `safe`
    matches (`patterns.safe_cut`), so that the words of the pieces are those of the whole text.
    Without `safe` a piece extends to the next special token.
    Memory: a chunk, and the longest stretch without a safe place.
    """
    pattern = specials_pattern(tuple(sorted(specials)))
    hold = max(map(len, specials), default=1)
    parts: list[str] = []
    waiting = 0
    looked = 0
    for chunk in chunks:
        parts.append(chunk)
        waiting += len(chunk)
        # Search again only after the text has doubled: linear time for text without safe places.
        if waiting < 2 * looked:
            continue
        text = "".join(parts)
        start = 0
        # A special token that starts before `sure` is complete, and cannot become a longer one.
        sure = len(text) - hold
        if pattern is not None:
            for match in pattern.finditer(text):
                if match.start() > sure:
                    break
                if match.start() > start:
                    yield text[start : match.start()], False
                yield match.group(), True
                start = match.end()
        cut = _last_cut(safe, text, start, sure)
        if cut > start:
            yield text[start:cut], False
            start = cut
        parts = [text[start:]]
        waiting = looked = len(text) - start
    yield from _pieces("".join(parts), pattern)


def _last_cut(safe: re.Pattern[str] | None, text: str, start: int, end: int) -> int:
    if safe is None:
        return start
    # A small window before the end nearly always has a safe place. It grows backwards, so that the
    # last place is found without searching the whole text.
    width = 256
    while end > start:
        low = max(start, end - width)
        last = start
        for match in safe.finditer(text, low + 1, end + 1):
            if match.start() <= end:
                last = match.start()
        if last > start or low == start:
            return last
        width *= 4
    return start


def _pieces(text: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    start = 0
    for match in pattern.finditer(text) if pattern is not None else ():
        if match.start() > start:
            yield text[start : match.start()], False
        yield match.group(), True
        start = match.end()
    if start < len(text):
        yield text[start:], False
