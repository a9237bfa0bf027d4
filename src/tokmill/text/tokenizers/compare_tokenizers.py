"""Compare tokenizers on one text: number of tokens, used ids, round trip, speed.

The figures are those of papers on tokenizers: bytes a token (compression), tokens a word
(fertility; words are separated by white space), ids that the text does not use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors
from tokmill.text.encoding.encoders import make_encoder
from tokmill.text.tokenizers.tokenizer import Tokenizer

_BLOCK = 1 << 20


class Comparison(msgspec.Struct, frozen=True):
    """The figures of one tokenizer."""

    tokenizer: str
    size: int
    """Number of ids, special tokens among them."""
    tokens: int
    bytes_a_token: float
    tokens_a_word: float
    unused_ids: int
    """How many of them the text does not use."""
    round_trip: bool
    """Whether decoding the ids gives the same bytes."""
    megabytes_a_second: float
    """Speed of encoding a text in memory: the best of three passes, or of those within a second."""
    engine: str


def compare(paths: Sequence[str], text_path: str, *, engine: str = "auto") -> list[Comparison]:
    """Encode a UTF-8 file with several tokenizers.

    Raises:
        TokmillError: the file is missing, empty or no UTF-8; a tokenizer cannot be read.
    """
    texts = read_text(text_path)
    return [compare_one(path, texts, engine) for path in paths]


def compare_one(path: str, texts: list[str], engine: str = "auto") -> Comparison:
    """Encode texts with one tokenizer; special tokens in them are text."""
    tokenizer = Tokenizer.from_file(path)
    encoder = make_encoder(tokenizer.to_json(), engine=engine)
    taken: list[float] = []
    while not taken or (len(taken) < 3 and sum(taken) < 1.0):
        begun = time.perf_counter()
        ids, lengths = encoder(texts)
        taken.append(time.perf_counter() - begun)
    size = sum(len(text.encode()) for text in texts)
    ends = np.cumsum(lengths).tolist()
    back = all(
        tokenizer.decode_bytes(ids[start:stop].tolist()) == text.encode()
        for start, stop, text in zip([0, *ends], ends, texts, strict=False)
    )
    return Comparison(
        tokenizer=path,
        size=len(tokenizer.vocab),
        tokens=len(ids),
        bytes_a_token=size / max(1, len(ids)),
        tokens_a_word=len(ids) / max(1, sum(len(text.split()) for text in texts)),
        unused_ids=len(tokenizer.vocab.keys() - np.unique(ids).tolist()),
        round_trip=back,
        megabytes_a_second=size / 1e6 / min(taken),
        engine=encoder.name,
    )


def read_text(path: str) -> list[str]:
    """Read a UTF-8 file in parts of about a megabyte that end after a newline."""
    file = Path(path)
    if not file.exists():
        raise TokmillError(
            "there is no such file", where=path, hint="name text files to compare on"
        )
    if file.is_dir():
        raise TokmillError("this is a folder", where=path, hint="give one text file")
    with machine_errors("read", file):
        raw = file.read_bytes()
    if not raw:
        raise TokmillError("the file is empty", where=path, hint="give a text to compare on")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise TokmillError(
            "the text is no UTF-8", where=f"{path}: byte {error.start}", hint="convert it: iconv"
        ) from None
    parts = []
    start = 0
    while start < len(text):
        stop = text.find("\n", start + _BLOCK) + 1 or len(text)
        parts.append(text[start:stop])
        start = stop
    return parts
