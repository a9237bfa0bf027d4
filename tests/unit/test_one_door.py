"""What a file says is decoded at the doors of `headers`, where nesting without end is an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tokmill
from tokmill.headers import loads_json

SOURCES = Path(tokmill.__file__).parent
DECODES = re.compile(r"\b(?:json\.loads?|json\.decode|tomllib\.loads?|np\.load)\(")
OWN = {
    "headers.py": 2,  # the doors
    # What this process, or one that it started, has just written or checked.
    "builds/plan.py": 1, "text/chat.py": 1, "text/documents.py": 1,
    "text/tsv_encode.py": 1, "training/recipe/changes.py": 1, "training/recipe/settings.py": 1,
    "training/runs/run.py": 1, "x86/tokens/vocabulary.py": 1,
    # A line that the fast decoder refused, for its reason; a word of an option.
    "text/jsonl.py": 2, "text/paths.py": 1,
    # In a command that a hint shows.
    "text/seen_keys.py": 1,
    # What `json` wrote with infinities and NaN, and every error of it is caught; the library's own.
    "text/tokenizer.py": 2,
}  # fmt: skip
"""File → how often it decodes by itself."""


def test_nothing_else_decodes() -> None:
    found = {
        path.relative_to(SOURCES).as_posix(): len(DECODES.findall(path.read_text()))
        for path in SOURCES.rglob("*.py")
    }
    assert {name: count for name, count in found.items() if count} == OWN


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b'"\xff"', b'"\\ud800"', b""])
@pytest.mark.parametrize("kind", [object, dict[str, int], list[object]])
def test_one_kind_of_error(raw: bytes, kind: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads_json(raw, kind)
