"""Training of byte-level BPE by the readable functions of `tokmill.text.learning.bpe`."""

from collections.abc import Iterable, Sequence

from tokmill.text.learning.bpe import TieBreak, check_request, count_words, train_words
from tokmill.text.tokenizers.patterns import GPT2


def train_bpe(
    texts: Iterable[str],
    size: int,
    specials: Sequence[str] = (),
    tie_break: TieBreak = "greatest-bytes",
    *,
    pattern: str = GPT2,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Return id → bytes, and the merges, of records."""
    check_request(size, specials)
    words = count_words(texts, specials, pattern)
    return train_words(words, size, specials, tie_break)
