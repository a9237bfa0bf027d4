"""The reference of cutting words: patterns of tokenizer files for Python's `re`.

The classes are those of Unicode 16.0 (`unicode_classes`), as in `tokenizers`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from tokmill.base.errors import TokmillError
from unicode_classes import CATEGORIES, WHITE_SPACE, class_body


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


def split_words(pattern: str, text: str) -> Iterator[str]:
    """Cut a text into words: the matches of a pattern and the text between them.

    Nothing is lost: the words joined are the text (Hugging Face's behaviour `Isolated`).
    """
    end = 0
    for match in compile_pattern(pattern).finditer(text):
        start, stop = match.span()
        if start > end:
            yield text[end:start]
        if stop > start:
            yield text[start:stop]
        end = stop
    if end < len(text):
        yield text[end:]


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
