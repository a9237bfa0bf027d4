"""Known texts and the ids that a store's engine gave them; other engines must give the same ids.

A tokenizer's file does not decide everything. Another engine, or another version, may leave out the
token that begins a text, or cut text differently, and nothing in a store would show it. So a store
of text keeps 64 short texts with their ids in `vocab/probe.json`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from tokmill.base.errors import TokmillError
from tokmill.base.files import sha256_file
from tokmill.store.manifest import read_checked
from tokmill.store.schema import Array

FILE = "probe.json"
"""Name in `vocab/`."""
SHOWN = 24
"""Ids of a text that an error shows."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Known texts, and for each the ids of its record in the store."""

    before: Count
    """Number of ids that the build put before every text (`bos`)."""
    after: Count
    """Number of ids that it put after every text (`eot`)."""
    answers: list[tuple[str, list[int]]]
    """Text, and its ids including those before and after; no ids if the engine refused the text."""

    def texts(self) -> list[str]:
        return [text for text, _ in self.answers]

    def bare(self) -> list[tuple[str, list[int]]]:
        """Return each text with its own ids, without those before and after."""
        return [(text, ids[self.before : len(ids) - self.after]) for text, ids in self.answers]


def probe_path(store: Path) -> Path:
    return store / "vocab" / FILE


def read_probe(store: Path) -> Probe:
    return read_checked(probe_path(store), Probe)


def probe_digest(store: Path) -> str | UnsetType:
    """Return the sha256 of the probe's file for the manifest; `UNSET` if there is none."""
    path = probe_path(store)
    return sha256_file(path) if path.is_file() else UNSET


def compare(
    then: Sequence[tuple[str, list[int]]],
    now: Sequence[tuple[str, list[int]]],
    *,
    where: str,
    who: str,
    hint: str,
) -> None:
    """Refuse answers that differ from earlier ones."""
    for number, ((text, before), (_, after)) in enumerate(zip(then, now, strict=True), 1):
        if before != after:
            raise TokmillError(
                f"{who}: text {number} of {len(then)}, {text!r}, was {_ids(before)} then and is "
                f"{_ids(after)} now{_missing(before, after)}",
                where=where,
                hint=hint,
            )


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids[:SHOWN])) + " …" * (len(ids) > SHOWN) if ids else "refused"


def _missing(before: list[int], after: list[int]) -> str:
    for longer, shorter, word in ((before, after, "without"), (after, before, "with")):
        if longer and longer[1:] == shorter:
            return f", {word} the {longer[0]} that begins it"
        if longer and longer[:-1] == shorter:
            return f", {word} the {longer[-1]} that ends it"
    return ""


def check_coder(
    path: Path, encode: Callable[[str], list[int] | None], specials: Sequence[str] = ()
) -> None:
    """Refuse an encoder that gives the texts of a probe's file other ids than the build did.

    `encode` returns None for a text that it refuses; such texts are not compared, nor those that
    the build's engine refused. `specials`: names of special tokens; texts with one are not
    compared, as a build may read a name as text or as the token. Without a file nothing is checked.
    """
    if not path.is_file():
        return
    then, now = [], []
    for text, ids in read_checked(path, Probe).bare():
        if ids and not any(name in text for name in specials):
            again = encode(text)
            if again is not None:
                then.append((text, ids))
                now.append((text, again))
    compare(
        then,
        now,
        where=str(path),
        who="this program gives other ids than the engine with which the store was built",
        hint="install the packages with which the store was built (`tokmill doctor` lists the "
        "installed ones)",
    )


TEXTS = (
    "The quick brown fox jumps over the lazy dog.", "hello", "Hello", " hello", "HELLO WORLD",
    "it's we'll I'VE don’t", "naïve café", "nai\u0308ve", "Straße, Größe", "¿Qué? ¡Sí!",
    "Привет, мир", "Καλημέρα", "مرحبا بالعالم", "שלום", "नमस्ते", "สวัสดีครับ", "你好，世界。",
    "こんにちは", "안녕하세요", "\u1112\u1161\u11ab", "ሰላም", "ᚠᚢᚦ", "👍🏽", "👩‍👩‍👧", "🇩🇪 🇫🇷",
    "①②½ﬁ",
    "", " ", "  ", "   x", "\t", "\t\tx", "\n", "\n\n\n", "a\r\nb", "a \n b", "x  \n", "\u00a0",
    "a\u200bb", "\u3000x", "\ufeffx", "\x00", "\x1b[0m",
    "0", "1234567", "3.14159", "1,000,000", "0xFF", "2026-11-22",
    "def f(x):\n    return x + 1\n", "if (a[i] != '\\0') { i++; }", "<p class=\"x\">&amp;</p>",
    "{\"a\": [1, 2.5, null]}", "SELECT * FROM t;", "https://example.org/?q=a%20b#c", "a_b-c.d/e\\f",
    "!!!???...", "$x^2$ ∑ → ≤", "<|endoftext|>", "<s>a</s>", "[CLS] a [SEP] [MASK]",
    "<|im_start|>user", "aaaaaaaaaaaaaaaaaaaaaaaa", "Donaudampfschifffahrt",
)  # fmt: skip
"""64 texts. They may be changed: existing stores keep their own."""


def make_probe(
    encode: Callable[[Sequence[str]], tuple[Array, Array]],
    before: int,
    after: int,
    texts: Sequence[str],
) -> Probe:
    """Return a probe: the ids that an engine gives known texts.

    Args:
        texts: the texts of an existing probe; empty: `TEXTS`.
    """
    asked = list(texts) or list(TEXTS)
    try:
        ids, offsets = encode(asked)
        cuts = offsets.tolist()
        ids_of_texts = [ids[a:b].tolist() for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    except TokmillError:
        # A model without `unk` refuses texts with unknown characters.
        ids_of_texts = [_alone(encode, text) for text in asked]
    answers = list(zip(asked, ids_of_texts, strict=True))
    return Probe(before=before, after=after, answers=answers)


def _alone(encode: Callable[[Sequence[str]], tuple[Array, Array]], text: str) -> list[int]:
    try:
        return encode([text])[0].tolist()
    except TokmillError:
        return []
