"""The known texts of probes: many scripts, code, white space and names of special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokmill.base.errors import TokmillError
from tokmill.store.checks.probe import Probe
from tokmill.store.schema import Array

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
        encode: texts → (ids, offsets (n + 1)), as a build writes them.
        before: number of ids that the build puts before each text.
        after: number of ids that it puts after each text.
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
        ids: list[int] = encode([text])[0].tolist()
        return ids
    except TokmillError:
        return []
