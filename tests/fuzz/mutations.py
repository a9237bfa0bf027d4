"""Damage to a file: what disks, networks and people do to one, and what somebody might wish to do.

A mutation is a pure function of the good bytes and a number, so a failure is replayed by its seed.
"""

import random
import re
from collections.abc import Callable

Change = Callable[[bytearray, random.Random], bytes]

HUGE = (
    b"2147483648", b"4294967296", b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551616", b"-1", b"-9223372036854775809", b"1e400", b"-1e400", b"NaN",
    b"Infinity", b"0.5", b"1e18", b"9" * 5000, b"null", b"true", b'"x"', b"[]", b"{}", b"0",
)  # fmt: skip
"""What may stand where a number stood."""
TEXTS = (
    b"..", b"../../../../tmp/escaped", b"/etc/passwd", b"a\\u0000b", b"\\ud800", b"x" * 70_000,
    b"", b"\\u202e", b"%s%n", b"(a+)+$", b"\\\\x{110000}", b"[PAD]", b"\xff\xfe", b".",
)  # fmt: skip
"""What may stand where a string stood, between its quotes."""
DEEP = 100_000
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
STRING = re.compile(rb'"(?:[^"\\\n]|\\.){0,200}"')


def flip_bit(data: bytearray, draw: random.Random) -> bytes:
    """One bit."""
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def put_byte(data: bytearray, draw: random.Random) -> bytes:
    """Some bytes get other values."""
    for _ in range(draw.choice((1, 1, 2, 8))):
        data[draw.randrange(len(data))] = draw.choice((0, 255, 127, 128, draw.randrange(256)))
    return bytes(data)


def put_in_head(data: bytearray, draw: random.Random) -> bytes:
    """A number of 2, 4 or 8 bytes near the beginning, where lengths and counts stand."""
    size = draw.choice((2, 4, 8))
    value = draw.choice((0, 1, (1 << 8 * size) - 1, 1 << 8 * size - 1, draw.getrandbits(8 * size)))
    place = draw.randrange(min(len(data), 128))
    data[place : place + size] = value.to_bytes(size, "little")
    return bytes(data)


def put_at_end(data: bytearray, draw: random.Random) -> bytes:
    """The same near the end, where footers of zip and Parquet stand."""
    size = draw.choice((1, 2, 4, 8))
    place = max(0, len(data) - draw.randrange(1, 160))
    data[place : place + size] = draw.randbytes(size)
    return bytes(data)


def cut(data: bytearray, draw: random.Random) -> bytes:
    """The file ends early."""
    return bytes(data[: draw.randrange(len(data))])


def drop(data: bytearray, draw: random.Random) -> bytes:
    """A piece is missing."""
    place = draw.randrange(len(data))
    del data[place : place + draw.choice((1, 2, 4, 16, 200))]
    return bytes(data)


def insert(data: bytearray, draw: random.Random) -> bytes:
    """Random bytes come in between."""
    place = draw.randrange(len(data) + 1)
    data[place:place] = draw.randbytes(draw.choice((1, 2, 4, 16, 300)))
    return bytes(data)


def swap(data: bytearray, draw: random.Random) -> bytes:
    """Two blocks change places."""
    size = draw.choice((1, 4, 16, 64))
    one, two = draw.randrange(len(data)), draw.randrange(len(data))
    data[one : one + size], data[two : two + size] = (
        data[two : two + size],
        data[one : one + size],
    )
    return bytes(data)


def repeat(data: bytearray, draw: random.Random) -> bytes:
    """A piece stands twice."""
    place = draw.randrange(len(data))
    piece = data[place : place + draw.choice((4, 16, 64, 512))]
    data[place:place] = piece
    return bytes(data)


def zeros(data: bytearray, draw: random.Random) -> bytes:
    """A hole, as a lost block of a file system leaves it."""
    place, size = draw.randrange(len(data)), draw.choice((8, 64, 512))
    data[place : place + size] = bytes(min(size, len(data) - place))
    return bytes(data)


def other_number(data: bytearray, draw: random.Random) -> bytes:
    """Another value where a number is written."""
    return _replaced(data, NUMBER, draw.choice(HUGE), draw)


def other_text(data: bytearray, draw: random.Random) -> bytes:
    """Another value where a string is written."""
    return _replaced(data, STRING, b'"' + draw.choice(TEXTS) + b'"', draw)


def deep(data: bytearray, draw: random.Random) -> bytes:
    """Deep nesting where a value is written."""
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
    depth = draw.choice((300, 2000, DEEP))
    value = opening * depth + b"0" + (closing * depth if draw.random() < 0.5 else b"")
    return _replaced(data, draw.choice((NUMBER, STRING)), value, draw)


def other_type(data: bytearray, draw: random.Random) -> bytes:
    """A value of another type where a string is written."""
    return _replaced(data, STRING, draw.choice((b"0", b"null", b"[]", b"{}", b"true", b"-1")), draw)


def _replaced(data: bytearray, what: re.Pattern[bytes], by: bytes, draw: random.Random) -> bytes:
    found = list(what.finditer(data))
    if not found:
        return put_byte(data, draw)
    chosen = draw.choice(found)
    return bytes(data[: chosen.start()] + by + data[chosen.end() :])


EVERYWHERE: tuple[Change, ...] = (
    flip_bit, put_byte, put_in_head, put_at_end, cut, drop, insert, swap, repeat, zeros,
)  # fmt: skip
WRITTEN: tuple[Change, ...] = (other_number, other_text, deep, other_type)
"""Of files, or parts of files, that are text: JSON, TOML, headers of safetensors and npy."""


def mutate(data: bytes, seed: int) -> tuple[str, bytes]:
    """Return (name of the mutation, damaged bytes); equal arguments give equal results."""
    draw = random.Random(seed)
    kinds = EVERYWHERE if not data or not NUMBER.search(data) else EVERYWHERE + 2 * WRITTEN
    change = draw.choice(kinds)
    if not data:
        return "insert", insert(bytearray(), draw)
    found = change(bytearray(data), draw)
    if found == data:
        change, found = flip_bit, flip_bit(bytearray(data), draw)
    return change.__name__, found
