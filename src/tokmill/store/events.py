"""The log of a store's builds, `events.jsonl`: a JSON object a line, its last key a checksum."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokmill.files import machine_errors

EVENTS = "events.jsonl"
TAIL = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
MAX_LINE = 1 << 20


def event_line(event: Mapping[str, Any]) -> bytes:
    """Return an event as a line: a JSON object, as last key the CRC-32 of the text before it."""
    body = msgspec.json.encode(event)[:-1]
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def damaged_events(store: Path) -> list[int]:
    """Return the numbers (from 1) of the lines of `events.jsonl` that are damaged.

    A last line that a crash cut short does not count.
    """
    return [number for number, _, good in _lines(store / EVENTS) if not good]


def good_events(store: Path) -> bytes:
    """Return `events.jsonl` without its damaged lines."""
    return b"".join(line for _, line, good in _lines(store / EVENTS) if good)


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    if not path.exists():
        return
    with machine_errors("read", path), open(path, "rb") as handle:
        number = 0
        while line := handle.readline(MAX_LINE):
            number += 1
            yield number, line, _is_good(line)


def _is_good(line: bytes) -> bool:
    found = TAIL.search(line)
    if not line.endswith(b"\n"):
        # Cut short by a crash: the beginning of a line, without a checksum.
        return line.startswith(b"{") and found is None
    if found is None or found.end() != len(line) - 1:
        return False
    return b"%08x" % zlib.crc32(line[: found.start()]) == found[1]
