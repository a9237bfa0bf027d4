"""Patterns that cut text into words before byte pairs are merged.

A pattern is written in the dialect of tokenizer files (`\\p{L}`, `(?i:…)`, possessive `?+`).
`compile_pattern` translates it for Python's `re`, with the Unicode 16.0 tables of
`tokmill.text.unicode_classes`, so the words do not depend on the version of Python.
"""

from __future__ import annotations

import functools
import itertools
import re
import signal
import threading
from collections.abc import Iterator

from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.text.unicode_classes import CATEGORIES, WHITE_SPACE, class_body

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's words (Radford et al. 2019; the contractions in tiktoken's spelling)."""

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4's words as tokenizer.json files have them (Llama 3 too)."""

QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
"""Qwen2's words: digits one by one."""

CL100K_TIKTOKEN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!.|\n)|\s*[\r\n]|\s+(?!\S)|\s"
)
"""`cl100k_base` of tiktoken 0.14, in a spelling that all engines interpret in the same way.

It differs from `CL100K` at the end of a text: white space there is one word even if it has a
newline. tiktoken's own `{1,3}+` and `$` have another meaning in Hugging Face's regular expressions.
"""

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

WELL_KNOWN = {GPT2, CL100K, QWEN2, CL100K_TIKTOKEN, O200K}
LIMIT = 5.0
"""CPU seconds for `AT_ONCE` matches of a pattern that is not well known."""
AT_ONCE = 256
"""Matches that are searched with one timer, as setting it takes 5 microseconds."""


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


@functools.cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern for Python's `re`, with Unicode 16.0 classes.

    Raises `TokmillError` for an unknown class or construct.
    """
    try:
        return re.compile(_translate(pattern))
    except re.error as error:
        raise TokmillError(
            f"the pattern {pattern!r} cannot be read: {error}",
            hint="write it as Python's `re` does, with \\p{L}, \\p{N} and other categories "
            f"({' '.join(CATEGORIES)})",
        ) from None


def matches(pattern: str, text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern in a text.

    Raises `TokmillError` if the search for a match takes more than `LIMIT` CPU seconds: `(a+)+$`
    would take years. `re` has no limit of its own, but it lets signal handlers run, so a timer
    stops it. Handlers run in the main thread alone; in other threads there is no limit.
    """
    found = compile_pattern(pattern).finditer(text)
    if pattern in WELL_KNOWN or threading.current_thread() is not threading.main_thread():
        yield from found
        return

    def stop(number: int, frame: object) -> None:
        raise TokmillError(
            f"the pattern takes more than {LIMIT:g} seconds to find a word",
            where=f"pattern {pattern!r}",
            hint="a pattern such as (a+)+ takes endless time: write it without one + in another",
        )

    batch: list[re.Match[str]] | None = None
    while batch is None or len(batch) == AT_ONCE:
        before = signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
        try:
            batch = list(itertools.islice(found, AT_ONCE))
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        yield from batch


def split_words(pattern: str, text: str) -> Iterator[str]:
    """Cut a text into words: the matches of a pattern and the text between them.

    Nothing is lost: the words joined are the text (Hugging Face's behaviour `Isolated`).
    """
    end = 0
    for match in matches(pattern, text):
        start, stop = match.span()
        if start > end:
            yield text[end:start]
        if stop > start:
            yield text[start:stop]
        end = stop
    if end < len(text):
        yield text[end:]


@functools.cache
def safe_cut(pattern: str) -> re.Pattern[str] | None:
    """Return a pattern that matches places where a text may be cut, except at its end.

    Such a place lies after a letter or digit, and before a character that cannot belong to a word
    of letters or digits (an apostrophe can: `'s`; a mark can). All patterns of `PATTERNS` end a
    word there, whatever follows, so the words of the parts are those of the whole. None if this is
    not known for a pattern.
    """
    if pattern not in WELL_KNOWN:
        return None
    return compile_pattern(r"(?<=[\p{L}\p{N}])(?=[^\p{L}\p{N}\p{M}'])")


def _translate(pattern: str) -> str:
    parts: list[str] = []
    inside = False
    position = 0
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            piece, position = _escape(pattern, position, inside)
            parts.append(piece)
            continue
        if char == "[" and not inside:
            inside = True
            # A bracket at the beginning of a class is a literal.
            end = position + (2 if pattern[position + 1 : position + 2] == "^" else 1)
            if pattern[end : end + 1] == "]":
                end += 1
            parts.append(pattern[position:end])
            position = end
            continue
        if char == "[" and inside:
            parts.append(r"\[")
        else:
            if char == "]":
                inside = False
            parts.append(char)
        position += 1
    return "".join(parts)


def _escape(pattern: str, position: int, inside: bool) -> tuple[str, int]:
    kind = pattern[position + 1 : position + 2]
    if kind in ("p", "P"):
        match = re.match(r"\{(\^?)(\w+)\}", pattern[position + 2 :])
        if match is None or match[2] not in CATEGORIES:
            raise TokmillError(
                f"the class {pattern[position : position + 8]!r} is not known here",
                where=f"pattern {pattern!r}",
                hint=f"known categories: {' '.join(CATEGORIES)}",
            )
        negated = (kind == "P") != bool(match[1])
        body, end = class_body(match[2]), position + 2 + match.end()
    elif kind in ("s", "S"):
        negated, body, end = kind == "S", WHITE_SPACE, position + 2
    elif kind in tuple("dDwWbBhHRXxGKkzZA"):
        raise TokmillError(
            f"'\\{kind}' is not known here",
            where=f"pattern {pattern!r}",
            hint="write it with \\p{L}, \\p{N}, \\s and plain characters",
        )
    else:
        return pattern[position : position + 2], position + 2
    if not inside:
        return f"[{'^' if negated else ''}{body}]", end
    if negated:
        raise TokmillError(
            f"a negated class inside [...] is not known here: {pattern[position:end]!r}",
            where=f"pattern {pattern!r}",
            hint="write the class without a negation",
        )
    return body, end
