"""Differences between gigatoken 0.10 and Hugging Face `tokenizers` 0.23, and how builds avoid them.

Found by fuzzing both with every kind of step (tests/property/test_tokenizer_properties.py):

- gigatoken has Unicode 17.0, `tokenizers` 16.0. The pieces of a text that hold newer letters,
  marks and numbers are encoded by `tokenizers`.
- Added tokens: `tokenizers` first searches for those that are not `normalized`, then for the
  others; gigatoken searches for all at once. Tokens with `lstrip`, `rstrip` or `single_word` are
  left to `tokenizers`.
- gigatoken has scanners for some patterns only.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokmill.text.tokenizers import tokenizer_json as files
from tokmill.text.tokenizers.patterns import CL100K, O200K


class Panic(ValueError):
    """A library in Rust panicked."""


@contextlib.contextmanager
def no_panic() -> Iterator[None]:
    """Turn a panic of a library in Rust into the exception `Panic`, with its first line.

    Rust also writes the place in its source to stderr, and a trace if RUST_BACKTRACE is set.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        lines = str(error).splitlines() or ["it gave up"]
        raise Panic(lines[0][:300]) from None


Array = NDArray[Any]

_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_WORDS = (
    [{**_BYTES, "use_regex": True}],
    *(
        [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            },
            {**_BYTES, "use_regex": False},
        ]
        for pattern in (CL100K, O200K)
    ),
)
"""The pre-tokenizers that gigatoken knows."""

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
    result: list[int] = []
    position = 0
    for run in _NEWER.split():
        gap, _, length = run.partition("+")
        start = position + int(gap, 16)
        position = start + int(length or "1", 16)
        result += range(start, position)
    return result


def why_not_gigatoken(data: Mapping[str, Any]) -> str:
    """Return why gigatoken may not encode for a tokenizer.json; an empty string if it may."""
    model, added = data["model"], data.get("added_tokens") or []
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_token")
    if model["type"] != "BPE":
        return f"its model is {model['type']}"
    if key := next((key for key in (*odd, "byte_fallback") if model.get(key)), ""):
        return f"it has {key} = {model[key]!r}"
    if len({*map(tuple, model["merges"])}) < len(model["merges"]):
        return "a merge stands twice"
    if data.get("normalizer") is not None:
        return f"it has the normalizer {data['normalizer'].get('type')!r}"
    steps = [
        {"use_regex": True, **step} if step["type"] == "ByteLevel" else step
        for step in files.flatten(data.get("pre_tokenizer"), "pretokenizers")
    ]
    if [{k: v for k, v in step.items() if k != "trim_offsets"} for step in steps] not in _WORDS:
        return "its pre-tokenizers are not known"
    if any(character not in model["vocab"] for character in files.ALIASES.values()):
        return "some byte has no token"
    if any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word")):
        return "an added token has lstrip, rstrip or single_word"
    if len({bool(token.get("normalized")) for token in added}) > 1:
        return "some added tokens are normalized and some are not"
    return ""


def with_newer_characters(texts: Sequence[bytes]) -> list[int]:
    """Return the numbers of the texts, in UTF-8, that hold characters newer than Unicode 16.0."""
    others = [number for number, text in enumerate(texts) if not text.isascii()]
    if not others:
        return []
    ends = np.cumsum([len(texts[number]) for number in others])
    data = np.frombuffer(b"".join([texts[number] for number in others]), np.uint8)
    characters, suspects = _newer_characters()
    # For nearly all characters the first two bytes show that it is none of them.
    leads = np.flatnonzero(data[:-1] >= 0xC0)
    leads = leads[suspects[_two_bytes(data[leads], data[leads + 1])]]
    hits = []
    for lead in leads.tolist():
        width = 2 if data[lead] < 0xE0 else 3 if data[lead] < 0xF0 else 4
        if ord(str(data[lead : lead + width].data, "utf-8")) in characters:
            hits.append(lead)
    found = np.unique(np.searchsorted(ends, hits, side="right"))
    return [others[place] for place in found.tolist()]


def _two_bytes(first: Array, second: Array) -> Array:
    return (first.astype(np.int64) & 0x3F) << 6 | (second & 0x3F)


@functools.cache
def _newer_characters() -> tuple[frozenset[int], Array]:
    characters = frozenset(newer_characters())
    # From U+0800 on the last six bits are not in the first two bytes.
    starts = {number if number < 0x800 else number & ~0x3F for number in characters}
    pairs = np.array([tuple(chr(number).encode()[:2]) for number in starts], np.uint8)
    suspects = np.zeros(1 << 12, bool)
    suspects[_two_bytes(pairs[:, 0], pairs[:, 1])] = True
    return characters, suspects


def give_back_memory() -> None:
    """Return freed memory to the system, if the C library can do that (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
