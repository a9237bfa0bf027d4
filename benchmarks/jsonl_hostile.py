"""Text that is no source code: memory of a build of words, bytes and lines that hardly repeat."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jsonl_store import remove, tokmill
from measure import Contestant, run_once

SIZES = (40, 400)
"""Megabytes; what memory grows by between the two is growth."""

LARGE = (400, 4000)
"""Megabytes of random words once more: a cache that grows slowly shows there."""


def random_words(draw: np.random.Generator) -> Iterator[str]:
    """Yield texts of words that hardly ever come again."""
    while True:
        letters = draw.integers(97, 123, 1 << 20, dtype=np.uint8)
        letters[np.cumsum(draw.integers(4, 12, (1 << 20) // 12))] = 32
        text = letters.tobytes().decode()
        yield from (text[start : start + 1000] for start in range(0, len(text), 1000))


def random_bytes(draw: np.random.Generator) -> Iterator[str]:
    """Yield bytes as Latin-1."""
    while True:
        yield draw.bytes(1500).decode("latin-1")


def chinese(draw: np.random.Generator) -> Iterator[str]:
    """Yield characters without a space."""
    while True:
        yield "".join(map(chr, draw.integers(0x4E00, 0x9FA0, 700)))


def base_64(draw: np.random.Generator) -> Iterator[str]:
    """Yield long words."""
    while True:
        yield base64.b64encode(draw.bytes(30_000)).decode()


KINDS = {
    "random words": random_words,
    "random bytes": random_bytes,
    "Chinese characters without spaces": chinese,
    "base64": base_64,
}
LINES = {"blank lines": b"\n", "lines of {}": b"{}\n", "good and bad lines": b'{"text": "a"}\nx\n'}


def write(path: Path, kind: str, megabytes: int) -> None:
    """Write JSON Lines of a kind, ended by one record."""
    size = megabytes * 1_000_000
    with path.open("wb") as out:
        if kind in LINES:
            line = LINES[kind]
            out.writelines(line * (1_000_000 // len(line)) for _ in range(megabytes))
        elif kind == "one line":
            out.write(b'{"text": "' + b"abcdefgh " * (size // 9) + b'"}\n')
        else:
            for text in KINDS[kind](np.random.default_rng(0)):
                out.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
                if out.tell() > size:
                    break
        out.write(b'{"text": "the end"}\n')


def main(cache: Path) -> list[str]:
    """Measure; return the section for RESULTS.md."""
    source, store = cache / "hostile.jsonl", cache / "store"
    lines = [
        "One process (`--workers 0`); growth is between the two sizes.",
        "",
        "| text | MB | peak MiB | MB | peak MiB | growth, MiB a GB | MB/s |",
        "|---|---|---|---|---|---|---|",
    ]
    sizes = [*((kind, SIZES) for kind in (*KINDS, *LINES, "one line")), ("random words", LARGE)]
    for kind, (small, large) in sizes:
        peaks, seconds = [], 0.0
        for megabytes in (small, large):
            write(source, kind, megabytes)
            command = tokmill(
                source, cache / "tokenizer.json", store, "--workers", "0", "--max-rejects", "1"
            )
            one = Contestant(kind, command, lambda: remove(store))
            run_once(one)
            peaks.append(one.memory / 2**20)
            seconds = one.best
        remove(source)
        remove(store)
        growth = (peaks[1] - peaks[0]) / (large - small) * 1000
        lines.append(
            f"| {kind} | {small} | {peaks[0]:.0f} | {large:,} | {peaks[1]:.0f} | {growth:.1f} "
            f"| {large / seconds:.0f} |"
        )
    return lines
