"""Ids equal those of Hugging Face `tokenizers` on adversarial text."""

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from tokenizers_peer import reference_ids
from tokmill.text.encoding.encoders import make_encoder
from tokmill.text.encoding.guards import newer_characters
from tokmill.text.learning.train_tokenizer import train_tokenizer

pytest.importorskip("tokenizers", reason="needs the extra text")
pytest.importorskip("gigatoken", reason="needs the extra text")

SPECIALS = ["<|endoftext|>", "<|pad|>", "<|endoftext|><|endoftext|>"]
PIECES = [
    *"aAbzZ sSrRtTlLvVedDmM'  \n\r\t.,!/09",
    *"\u00a0\u0661\u00b2\u0301\u00e9\u0416\u4e2d\u6587\u3002\u017f\u00df\u01c5\u200d\x1c\x85\u2028",
    *"\u2019\u0295\u088f\U000323b0\u1acf\U0001f600",
    *["'s", "'LL", "\r\n", "     ", "<|endoftext|>", "<|pad|>", "<|pad", "|>", " the", "def self"],
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "a" * 300,
    " " * 300,
]

ASSIGNED = [*range(0x34000), *range(0xE0000, 0xE0200)]
"""Planes 0 to 3 as far as letters go, and tags; the rest is private use or nothing."""


def adversarial(count: int, seed: int = 0) -> list[str]:
    choose = random.Random(seed)
    return ["".join(choose.choices(PIECES, k=choose.randrange(14))) for _ in range(count)]


def texts_of(corpus: Any) -> list[str]:
    extra = "\u4e2d\u6587\u5b57\u7b26\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 don't we'LL\r\n  "
    return [*corpus.texts[:60], extra * 40]


def split(ids: Any, lengths: Any) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", "o200k"])
def test_all_engines_and_the_reference_agree(corpus: Any, pattern: str) -> None:
    texts = texts_of(corpus)
    tokenizer = train_tokenizer(texts, 1200, SPECIALS, pattern=pattern)
    documents = adversarial(700) + texts[:8]
    modes: tuple[Any, ...] = ("plain", "special")
    for mode in modes:
        mine = [reference_ids(tokenizer, text, mode) for text in documents]
        assert [tokenizer.encode(text, mode) for text in documents] == mine
        for engine in ("gigatoken", "tokenizers"):
            encoder = make_encoder(tokenizer.to_json(), engine=engine, specials_in_text=mode)
            assert encoder.name == engine
            assert split(*encoder(documents)) == mine
        assert [tokenizer.decode(ids) for ids in mine] == documents


def test_long_runs() -> None:
    tokenizer = train_tokenizer(["a" * 5000 + " " * 5000 + "ab" * 3000], 300, [])
    documents = [
        "a" * 50_001,
        " " * 50_001 + "x",
        "\n" * 9_999,
        "ab" * 20_000 + "b",
        "\u4e2d" * 5000,
    ]
    expected = [reference_ids(tokenizer, text) for text in documents]
    for engine in ("gigatoken", "tokenizers"):
        assert split(*make_encoder(tokenizer.to_json(), engine=engine)(documents)) == expected


def members(category: str, points: list[int]) -> np.ndarray:
    """Return which characters are of a category, by the classes of `tokenizers`."""
    step = pre_tokenizers.Split(Regex(rf"\p{{{category}}}+"), "removed")
    found = np.ones(len(points), bool)
    for _, (start, stop) in step.pre_tokenize_str("".join(map(chr, points))):
        found[start:stop] = False
    return found


def test_gigatoken_differs_only_in_the_newer_characters() -> None:
    import gigatoken

    newer = set(newer_characters())
    points = [n for n in ASSIGNED[128:] if not 0xD800 <= n < 0xE000 and n not in newer]
    # Between two letters a letter makes one word, between two digits a digit does.
    for category, around in (("L", "a"), ("N", "1")):
        text = "\n".join(f"{around}{chr(number)}{around}" for number in points) + "\n"
        words = set(gigatoken.pretokenizer(text.encode()))
        for number, inside in zip(points, members(category, points), strict=True):
            whole = f"{around}{chr(number)}{around}".encode()
            assert (whole in words) == inside, hex(number)
