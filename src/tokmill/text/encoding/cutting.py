"""Cut text at special tokens, and streams of text at places that no token can cross."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator


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


def _pieces(text: str, found: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    start = 0
    for match in found.finditer(text) if found is not None else ():
        if match.start() > start:
            yield text[start : match.start()], False
        yield match.group(), True
        start = match.end()
    if start < len(text):
        yield text[start:], False
