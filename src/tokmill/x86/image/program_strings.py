"""Printable strings at addresses of a program: of C, in UTF-8 or UTF-16, and those of a length.

Go and Rust put strings side by side without a zero between them; their lengths are in the code.
"""

from __future__ import annotations

import re

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, Section

FEWEST = 3
"""Characters that a string has at least: fewer are found in tables of numbers, too."""
LONGEST = 4096
"""Bytes that a string has at most before its end."""
LONGEST_COUNTED = 512
"""Bytes of a string without an end: larger numbers beside an address are mostly no lengths."""
STEP = 64
"""Characters that are looked at together."""
AT_ONCE = 1 << 16
"""Addresses that are looked at together."""
ESCAPES = "\a\b\t\n\v\f\r\x1b"
"""What may be in a string and is not printable."""


GO = "runtime.morestack"
"""A function that every program by Go has, which its table of functions names."""
RUST = re.compile(rb"/rustc/[0-9a-f]{40}/")
"""Where the library's source lay; errors name places in it."""


def _printable() -> Array:
    result = np.zeros(256, bool)
    result[0x20:0x7F] = True
    result[[ord(letter) for letter in ESCAPES]] = True
    return result


ASCII = _printable()
MAY_BE = ASCII | (np.arange(256) >= 0x80)
"""Which bytes may be in a string of UTF-8."""


def strings_at(program: Program, addresses: Array) -> dict[int, str]:
    """Return the strings that begin at some addresses (u8, different ones): address → string.

    A string ends in a zero. It is UTF-8, or UTF-16 that begins with an ASCII character and is
    ASCII for the larger part. A string of another kind is left out.
    """
    result: dict[int, str] = {}
    for section in program.sections:
        place = addresses - np.uint64(section.address)
        inside = np.sort(place[place < np.uint64(len(section.data))].astype(np.int64))
        for begin in range(0, len(inside), AT_ONCE):
            result |= _in_section(section, inside[begin : begin + AT_ONCE])
    return result


def has_counted_strings(program: Program) -> bool:
    """Say whether a program is by Go or Rust, by what stays in stripped ones too."""
    if any(name.startswith(GO) for name in program.function_name):
        return True
    return any(
        RUST.search(section.linked.data) for section in program.sections if not section.execute
    )


def counted_strings(
    program: Program, addresses: Array, lengths: Array
) -> dict[tuple[int, int], str]:
    """Return the strings of UTF-8 that begin at some addresses (u8) and have some lengths (i8).

    The result is by address and length in bytes.
    """
    result: dict[tuple[int, int], str] = {}
    for section in program.sections:
        data, place = section.linked, addresses - np.uint64(section.address)
        rows = np.flatnonzero((place < np.uint64(len(data))) & (lengths >= FEWEST))
        begin, length = place[rows].astype(np.int64), lengths[rows]
        inside = (length <= LONGEST_COUNTED) & (begin + length <= len(data))
        for first, size in set(zip(begin[inside].tolist(), length[inside].tolist(), strict=True)):
            text = _text(data[first : first + size].tobytes(), "utf-8")
            if text:
                result[section.address + first, size] = text
    return result


def _in_section(section: Section, place: Array) -> dict[int, str]:
    """Return the strings that begin at places (i8) of a section, by address."""
    data = section.linked
    end, ended = _ends(data, place, MAY_BE)
    result = _decoded(data, place[ended], end[ended], "utf-8", section.address)
    # A zero after one character is half of one of UTF-16.
    rows = place[ended & (end == place + 1) & ASCII[data[place]]]
    for odd in (0, 1):
        units = data[odd : odd + (len(data) - odd) // 2 * 2].view("<u2")
        first = (rows[rows % 2 == odd] - odd) // 2
        end, ended = _ends(units, first, None)
        begin, end = 2 * first[ended] + odd, 2 * end[ended] + odd
        result |= _decoded(data, begin, end, "utf-16-le", section.address)
    return result


def _ends(units: Array, place: Array, allowed: Array | None) -> tuple[Array, Array]:
    """Return where runs from some places end (i8), and whether a zero ends them in time (bool).

    `allowed` tells for each unit but zero whether it may be in a run; None: every one.
    """
    end, ended = place.copy(), np.zeros(len(place), bool)
    going = np.arange(len(place))
    for _ in range(0, LONGEST, STEP):
        if not len(going):
            break
        at = end[going][:, None] + np.arange(STEP)
        cells = units[np.minimum(at, len(units) - 1)]
        stops = (cells == 0) | (at >= len(units))
        if allowed is not None:
            stops |= ~allowed[cells]
        stopped = stops.any(axis=1)
        first = np.where(stopped, stops.argmax(axis=1), STEP)
        end[going] += first
        rows = going[stopped]
        here = end[rows]
        inside = here < len(units)
        ended[rows[inside]] = units[here[inside]] == 0
        going = going[~stopped]
    return end, ended


def _decoded(data: Array, begin: Array, end: Array, encoding: str, base: int) -> dict[int, str]:
    result: dict[int, str] = {}
    for first, last in zip(begin.tolist(), end.tolist(), strict=True):
        text = _text(data[first:last].tobytes(), encoding)
        if text and (encoding == "utf-8" or _is_wide(text)):
            result[base + first] = text
    return result


def _text(raw: bytes, encoding: str) -> str:
    """Return some bytes as text; "" where they are too few or not printable."""
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        return ""
    printable = text.isprintable() or all(one.isprintable() or one in ESCAPES for one in text)
    return text if printable and len(text) >= FEWEST else ""


def _is_wide(text: str) -> bool:
    """Say whether most of a text is ASCII: other pairs of bytes are letters of some script too."""
    return 2 * sum(one.isascii() for one in text) > len(text)
