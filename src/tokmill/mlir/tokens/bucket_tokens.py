"""Vectors of operations as tokens, a token for each number: the tokenizer of MLIR-RL's DistilBERT.

A number is clipped to [0, 1] and falls into one of 50 buckets. Its id says which number it is and
which bucket. The original's ids repeat after 100 numbers, and its configuration cuts 4,104 tokens
to 128; both are there on request alone (`seed_compatible`, `truncate`).
"""

from typing import Any, NamedTuple

import numpy as np

from tokmill.base.errors import UsageError

CLS, SEP, PAD, UNK = 0, 1, 2, 3
SPECIAL = 4
"""Ids below are special tokens."""
BUCKETS = 50
PERIOD = 100
"""Numbers after which the original's ids repeat."""

Array = np.ndarray[Any, Any]


class Sequences(NamedTuple):
    """Tokens of a batch."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    """(B, T)."""
    mask: np.ndarray[Any, np.dtype[np.int64]]
    """(B, T): 1 for tokens, 0 for padding."""


class Coverage(NamedTuple):
    """How much of its input a configuration keeps."""

    numbers: int
    """Numbers of consumer and producer."""
    kept: int
    """Those that have a token of the sequence."""
    distinct: int
    """Those whose ids belong to them alone."""

    @property
    def share(self) -> float:
        return self.kept / self.numbers if self.numbers else 1.0


class MLIROperationTokenizer:
    """Turns vectors of a consumer and a producer into `[CLS] consumer producer [SEP] [PAD]…`.

    `features` is the length of one vector. Raises `UsageError` if the sequence or the ids have no
    room, unless `truncate` allows to cut or `seed_compatible` makes ids repeat as the original's
    do.
    """

    def __init__(
        self,
        features: int,
        *,
        max_seq_length: int = 0,
        vocab_size: int = 0,
        truncate: bool = False,
        seed_compatible: bool = False,
    ) -> None:
        if features < 1:
            raise UsageError("a vector has no number", hint="`Sizes.operation` is its length")
        self.features = features
        self.seed_compatible = seed_compatible
        whole = 2 + 2 * features
        self.max_seq_length = max_seq_length or whole
        needed = SPECIAL + BUCKETS * (min(features, PERIOD) if seed_compatible else features)
        self.vocab_size = vocab_size or needed
        if self.max_seq_length < 2:
            raise UsageError(
                f"max_seq_length = {max_seq_length} has no room for [CLS] and [SEP]",
                hint=f"{whole} keeps everything",
            )
        if self.max_seq_length < whole and not truncate:
            kept = self.coverage()
            raise UsageError(
                f"max_seq_length = {self.max_seq_length} keeps {kept.kept:,} of {kept.numbers:,} "
                "numbers",
                hint=f"{whole} keeps all; truncate = true allows to cut",
            )
        if self.vocab_size < needed:
            raise UsageError(
                f"vocab_size = {self.vocab_size} has no room for {needed:,} ids",
                hint=f"vocab_size = {needed}, or seed_compatible = true, whose ids repeat after "
                f"{PERIOD} numbers",
            )

    def tokens(self, vectors: Array) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return ids (…, features) of vectors (…, features); NaN and infinities are `UNK`."""
        given = np.asarray(vectors, np.float64)
        if given.shape[-1:] != (self.features,):
            raise UsageError(
                f"a vector has {given.shape[-1] if given.ndim else 0} numbers, not {self.features}",
                hint="make vectors and tokenizer of the same sizes",
            )
        sound = np.isfinite(given)
        # Truncated towards 0, as int() does in the original.
        buckets = (np.clip(np.where(sound, given, 0), 0, 1) * (BUCKETS - 1)).astype(np.int64)
        number = np.arange(self.features)
        if self.seed_compatible:
            number %= PERIOD
        return np.where(sound, SPECIAL + number * BUCKETS + buckets, UNK)

    def __call__(self, consumers: Array, producers: Array) -> Sequences:
        """Return the sequences of consumers and producers, each (B, features) or (features,)."""
        left, right = (self.tokens(np.atleast_2d(one)) for one in (consumers, producers))
        if len(left) != len(right):
            raise UsageError(
                f"{len(left)} consumers and {len(right)} producers",
                hint="an operation without a producer has zeros",
            )
        inner = np.concatenate((left, right), axis=1)
        ends = [np.full((len(left), 1), token, np.int64) for token in (CLS, SEP)]
        # What is cut is cut from behind, the end with it, as in the original.
        ids = np.concatenate((ends[0], inner, ends[1]), axis=1)[:, : self.max_seq_length]
        missing = self.max_seq_length - ids.shape[1]
        mask = np.pad(np.ones_like(ids), ((0, 0), (0, missing)))
        return Sequences(np.pad(ids, ((0, 0), (0, missing)), constant_values=PAD), mask)

    def coverage(self) -> Coverage:
        """Return how many numbers of consumer and producer have a token, and one of their own."""
        numbers = 2 * self.features
        kept = min(numbers, max(self.max_seq_length - 1, 0))
        seen = np.arange(kept) % self.features
        ids = seen % PERIOD if self.seed_compatible else seen
        # Consumer and producer are told apart by their places; two numbers of one of them with
        # the same ids are not.
        distinct = 0
        for part in (ids[: self.features], ids[self.features :]):
            _, counts = np.unique(part, return_counts=True)
            distinct += int(np.sum(counts == 1))
        return Coverage(numbers, kept, distinct)
