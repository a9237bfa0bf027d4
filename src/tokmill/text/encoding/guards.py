"""Differences between gigatoken 0.10 and Hugging Face `tokenizers` 0.23, and how builds avoid them.

Found by fuzzing both with every kind of step (tests/property/test_tokenizer_properties.py):

- gigatoken has Unicode 17.0, `tokenizers` 16.0. Texts with newer letters, marks and numbers are
  encoded by `tokenizers`, one by one.
- Added tokens: `tokenizers` first searches for those that are not `normalized`, then for the
  others; gigatoken searches for all at once. Tokens with `lstrip`, `rstrip` or `single_word` are
  left to `tokenizers`.
- gigatoken has scanners for some patterns only. tiktoken's newer spelling of cl100k gives the same
  words, except in texts that end in white space.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokmill.text.tokenizers import tokenizer_json as files
from tokmill.text.tokenizers.patterns import CL100K, CL100K_TIKTOKEN, O200K

Array = NDArray[Any]

_PATTERNS = {CL100K: CL100K, O200K: O200K, CL100K_TIKTOKEN: CL100K}
"""Pattern → pattern that gigatoken knows and that gives the same words.

tiktoken's spelling of cl100k differs in texts that end in white space; these are encoded by
`tokenizers`.
"""


_NEWER = """
295 2c2 32+2 3b+2 2c5 2c3+2 107 7f df2+22 59e d+3 872e+2 2 1 8 4 e 37a+2 5c4d+5 180+1a 56b+3 3+5
9+16 1+c c0e 55+8 248+2c 4+a 6+2 67d 5+b d0+137 4819+19 2+19 11e+5 1801+8 4d6+5 2e+18 5f+73 d+392
e+33 1f50+6 3f 1fbe+2 127+3 8+2 2 20+2 424 878+6 6+57 e+7 36+33 6c0+1f 1+16 8+2 d03a+6 de 1683+c
5502+10ca 9b86+2c40
"""
"""Letters, marks and numbers of Unicode 17.0 and the drafts of 18.0, as runs in hexadecimal: `gap`
(one code point) or `gap+length`, where the gap counts from the end of the run before."""


def newer_characters() -> list[int]:
    """Return the code points of letters, marks and numbers newer than Unicode 16.0, ascending."""
    found: list[int] = []
    position = 0
    for run in _NEWER.split():
        gap, _, length = run.partition("+")
        start = position + int(gap, 16)
        position = start + int(length or "1", 16)
        found += range(start, position)
    return found


def why_not_gigatoken(data: Mapping[str, Any]) -> str:
    """Return why gigatoken may not encode for a tokenizer.json; an empty string if it may."""
    model = data["model"]
    if model["type"] != "BPE":
        return f"its model is {model['type']}"
    if len({*map(tuple, model["merges"])}) < len(model["merges"]):
        return "a merge stands twice"
    if model.get("byte_fallback"):
        return _why_not_sentencepiece(data)
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if model.get(key):
            return f"it has {key} = {model[key]!r}"
    if data.get("normalizer") is not None:
        return f"it has the normalizer {data['normalizer'].get('type')!r}"
    steps = files.flatten(data.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1]["type"] != "ByteLevel":
        return "it is not byte-level"
    if steps[-1].get("add_prefix_space", True):
        return "it adds a space before each text"
    if len(steps) == 1:
        if not steps[0].get("use_regex", True):
            return "it does not cut text into words"
    elif len(steps) > 2 or steps[0]["type"] != "Split" or steps[1].get("use_regex", True):
        return "its pre-tokenizers are not known"
    elif steps[0]["pattern"].get("Regex") not in _PATTERNS:
        return "its pattern is not known"
    elif steps[0]["pattern"]["Regex"] == CL100K_TIKTOKEN and data.get("added_tokens"):
        return "its pattern sees the end of the text before each added token"
    elif steps[0]["behavior"] != "Isolated" or steps[0].get("invert"):
        return "its pattern does not keep all text"
    if any(character not in model["vocab"] for character in files.ALIASES.values()):
        return "some byte has no token"
    if len({bool(token.get("normalized")) for token in data.get("added_tokens") or []}) > 1:
        return "some added tokens are normalized and some are not"
    for token in data.get("added_tokens") or []:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                return f"the added token {token['content']!r} has {flag}"
    return ""


def _why_not_sentencepiece(data: Mapping[str, Any]) -> str:
    model = data["model"]
    for step in files.flatten(data.get("normalizer"), "normalizers"):
        if step not in (
            {"type": "Prepend", "prepend": files.SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": files.SPACE},
        ):
            return f"it has byte fallback and the normalizer {step.get('type')!r}"
    if data.get("pre_tokenizer") is not None:
        return "it has byte fallback and a pre-tokenizer"
    if model.get("dropout") or model.get("ignore_merges"):
        return "it has byte fallback and dropout or ignore_merges"
    if any(f"<0x{byte:02X}>" not in model["vocab"] for byte in range(256)):
        return "some byte has no token"
    if data.get("added_tokens"):
        return "it has byte fallback and added tokens that text may become"
    return ""


def texts_with_newer_characters(data: Array, offsets: Array) -> Array:
    """Return the numbers of the texts that hold characters newer than Unicode 16.0.

    Args:
        data: uint8, UTF-8.
        offsets: int64 (n + 1).
    """
    none = np.zeros(0, np.int64)
    if not len(data) or int(data.max()) < 0xC0:
        return none
    characters, suspects = _newer_characters()
    # For nearly all characters the first two bytes show that it is none of them.
    leads = np.flatnonzero(data[:-1] >= 0xC0)
    leads = leads[suspects[_two_bytes(data[leads], data[leads + 1])]]
    hits = []
    for lead in leads.tolist():
        width = 2 if data[lead] < 0xE0 else 3 if data[lead] < 0xF0 else 4
        if bytes(data[lead : lead + width]) in characters:
            hits.append(lead)
    if not hits:
        return none
    return np.unique(np.searchsorted(offsets, np.array(hits, np.int64), side="right") - 1)


def _two_bytes(first: Array, second: Array) -> Array:
    return (first.astype(np.int64) & 0x3F) << 6 | (second & 0x3F)


@functools.cache
def _newer_characters() -> tuple[frozenset[bytes], Array]:
    characters = frozenset(chr(number).encode() for number in newer_characters())
    suspects = np.zeros(1 << 12, bool)
    pairs = np.array([tuple(character[:2]) for character in characters], np.uint8)
    suspects[_two_bytes(pairs[:, 0], pairs[:, 1])] = True
    return characters, suspects


def texts_with_white_tails(data: Array, offsets: Array) -> Array:
    """Return the numbers of the texts that end in white space other than a newline."""
    full = np.flatnonzero(np.diff(offsets))
    last = data[offsets[full + 1] - 1]
    # With a newline at the end both patterns give the same words.
    full = full[(last == 0x20) | (last == 0x09) | (last == 0x0B) | (last == 0x0C) | (last >= 0x80)]
    found = [
        text
        for text in full.tolist()
        if bytes(data[max(offsets[text], offsets[text + 1] - 3) : offsets[text + 1]])
        .decode("utf-8", errors="ignore")[-1:]
        .isspace()
    ]
    return np.array(found, np.int64)


def sees_end_of_text(data: Mapping[str, Any]) -> bool:
    """Say whether white space at the end of a text is special (tiktoken's cl100k)."""
    steps = files.flatten(data.get("pre_tokenizer"), "pretokenizers")
    return bool(steps) and steps[0].get("pattern") == {"Regex": CL100K_TIKTOKEN}


def for_gigatoken(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file with its pattern as gigatoken knows it."""
    steps = files.flatten(data.get("pre_tokenizer"), "pretokenizers")
    if len(steps) < 2:
        return dict(data)
    known = _PATTERNS[steps[0]["pattern"]["Regex"]]
    split = {**steps[0], "pattern": {"Regex": known}}
    return {**data, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, steps[1]]}}


START = 20 << 20
"""Bytes by which an engine may always grow."""
YOUNG = 4 << 20
"""Bytes of text up to which memory is measured often: a table that doubles needs three times its
size meanwhile."""
OFTEN = 512 << 10
SELDOM = 4 << 20
EACH = 1.0
"""More bytes of growth for each byte of text: source code needs less, random words need ten."""
MOST = 128 << 20
"""Bytes of growth after which an engine is always replaced."""


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not state it."""
    try:
        with open("/proc/self/statm", "rb", 0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def give_back_memory() -> None:
    """Return freed memory to the system, if the C library can do that (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Growth:
    """Follows the memory of the process while one engine encodes.

    Other growth of the process counts too. At worst an engine is replaced too early, which costs
    some milliseconds and an empty cache.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self.resident = resident
        self.start_again()

    def start_again(self) -> None:
        """Forget the past: the engine is new."""
        self._base: int | None = None
        self._bytes = 0

    @property
    def step(self) -> int:
        """Bytes of text to encode before the next measurement, about."""
        return OFTEN if self._bytes < YOUNG else SELDOM

    def too_large(self, encoded: int) -> bool:
        """Say whether to replace the engine, after `encoded` more bytes of text."""
        now = self.resident()
        self._bytes += encoded
        if self._base is None:
            # The tables that an engine makes for its first text are no growth.
            self._base = now
            return False
        self._base = min(self._base, now)
        return now - self._base > min(START + EACH * self._bytes, MOST)
