"""What holds for any text: the engines agree, cuts do not matter, nothing is lost."""

import functools
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizers_peer import reference_ids, split_words
from tokmill.text.encoding.encoders import make_encoder
from tokmill.text.learning import bpe
from tokmill.text.learning.bpe import count_words, train_words
from tokmill.text.learning.train_tokenizer import train_tokenizer
from tokmill.text.tokenizers.patterns import PATTERNS, WELL_KNOWN, safe_cut, segments
from tokmill.text.tokenizers.tokenizer import Tokenizer

pytest.importorskip("tokenizers", reason="needs the extra text")
pytest.importorskip("gigatoken", reason="needs the extra text")

SPECIALS = ["<|a|>", "<|a|><|b|>", "<|b|>", "|><"]
SAMPLE = (
    "the cat's hat, don't! 1234 567\r\n\r\n  def f(x):\n\treturn x**2  # \u00e9t\u00e9 "
    "\u4e2d\u6587\u3002 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \U0001f468\u200d\U0001f469 <|a|> |> <| a"
)

texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [*SPECIALS, "<|", "'s", "'Ve", "\r\n", "   ", "ab ab", "123", "<|a|", " \n "]
        ),
        st.text(st.sampled_from("aA1 '\n.\u0301\u4e2d"), max_size=12),
    ),
    max_size=8,
).map("".join)
patterns = st.sampled_from(sorted(PATTERNS))
modes = st.sampled_from(["plain", "special"])


@functools.cache
def tokenizer(pattern: str) -> Tokenizer:
    return train_tokenizer([SAMPLE] * 3, 330, SPECIALS, pattern=pattern, engine="python")


@functools.cache
def encoder(pattern: str, engine: str, mode: str) -> Any:
    return make_encoder(
        tokenizer(pattern).to_json(), engine=engine, specials_in_text=mode, threads=False
    )


@settings(max_examples=150, deadline=None)
@given(documents=st.lists(texts, max_size=6), pattern=patterns, mode=modes)
def test_engines_agree(documents: list[str], pattern: str, mode: Any) -> None:
    expected = [reference_ids(tokenizer(pattern), text, mode) for text in documents]
    assert [tokenizer(pattern).encode(text, mode) for text in documents] == expected
    flat = list(itertools.chain.from_iterable(expected))
    for engine in ("gigatoken", "tokenizers"):
        ids, lengths = encoder(pattern, engine, mode)(documents)
        assert ids.tolist() == flat
        assert lengths.tolist() == [len(part) for part in expected]


@settings(max_examples=150, deadline=None)
@given(text=texts, pattern=patterns, mode=modes)
def test_decoding_gives_the_text_again(text: str, pattern: str, mode: Any) -> None:
    found = tokenizer(pattern)
    assert found.decode(found.encode(text, mode)) == text


@settings(max_examples=200, deadline=None)
@given(chunks=st.lists(texts, max_size=12), pattern=patterns, mode=modes)
def test_cuts_do_not_matter(chunks: list[str], pattern: str, mode: Any) -> None:
    found = tokenizer(pattern)
    assert list(found.encode_iterable(chunks, mode)) == found.encode("".join(chunks), mode)


@settings(max_examples=200, deadline=None)
@given(chunks=st.lists(texts, max_size=12), pattern=patterns)
def test_segments_lose_nothing_and_find_every_special(chunks: list[str], pattern: str) -> None:
    safe = safe_cut(PATTERNS[pattern])
    whole = list(segments(["".join(chunks)], SPECIALS, None))
    parts = list(segments(chunks, SPECIALS, safe))
    assert "".join(piece for piece, _ in parts) == "".join(chunks)
    assert [piece for piece, special in parts if special] == [
        piece for piece, special in whole if special
    ]
    assert all(piece for piece, _ in parts)


@settings(max_examples=200, deadline=None)
@given(
    text=st.one_of(
        texts, st.text(st.sampled_from("aZ0\u4e2d\u304c\u0301_ \n\t\u3002.,'/s\u0661\u0416"))
    ),
    pattern=st.sampled_from(sorted(WELL_KNOWN)),
)
def test_words_of_the_parts_are_words_of_the_whole(text: str, pattern: str) -> None:
    words = split_words(pattern, text)
    assert "".join(words) == text
    safe = safe_cut(pattern)
    assert safe is not None
    for match in safe.finditer(text):
        parts = [text[: match.start()], text[match.start() :]]
        assert [w for part in parts for w in split_words(pattern, part)] == words


@settings(max_examples=150, deadline=None)
@given(documents=st.lists(texts, max_size=4), pattern=patterns)
def test_words_are_counted_as_the_reference_cuts_them(documents: list[str], pattern: str) -> None:
    found = PATTERNS[pattern]
    words = Counter(
        word
        for text in documents
        for piece, special in segments([text], SPECIALS, None)
        if not special
        for word in split_words(found, piece)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "_BLOCK", 5)
        counted = count_words(documents, SPECIALS, found)
    assert counted == {word.encode(): count for word, count in words.items()}


@settings(max_examples=100, deadline=None)
@given(
    documents=st.lists(st.text(st.sampled_from("ab c\u00e9"), max_size=30), max_size=4),
    size=st.integers(256, 300),
    tie_break=st.sampled_from(["first", "greatest-bytes"]),
)
def test_the_trainer_equals_counting_again_after_each_merge(
    documents: list[str], size: int, tie_break: Any
) -> None:
    words = count_words(documents, [])
    vocab, merges = train_words(words, size, [], tie_break)
    numbers = {token: number for number, token in vocab.items()}
    spelled = {tuple(bytes([byte]) for byte in word): count for word, count in words.items()}
    for merge in merges:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word, count in spelled.items():
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + count
        most = max(counts.values())
        best = [pair for pair, count in counts.items() if count == most]
        if tie_break == "first":
            assert merge == min(best, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
        else:
            assert merge == max(best)
        spelled = {_merged(word, merge): count for word, count in spelled.items()}
    if len(vocab) < size:
        assert all(len(word) == 1 for word in spelled)


def _merged(word: tuple[bytes, ...], merge: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    done: list[bytes] = []
    for unit in word:
        # Only a unit that no merge of this round has made may be the left half.
        if done and (done[-1], unit) == merge and done[-1] != b"".join(merge):
            done[-1] = b"".join(merge)
        else:
            done.append(unit)
    return tuple(done)


@settings(max_examples=100, deadline=None)
@given(raw=st.lists(st.binary(max_size=12), max_size=4), pattern=patterns)
def test_any_utf8_buffer(raw: list[bytes], pattern: str) -> None:
    documents = [part.decode("utf-8", errors="replace") for part in raw]
    encoded = [text.encode() for text in documents]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int64)
    data = np.frombuffer(b"".join(encoded), np.uint8)
    one = encoder(pattern, "gigatoken", "plain").encode_utf8(data, offsets)
    two = encoder(pattern, "tokenizers", "plain").encode_utf8(data, offsets)
    assert one[0].tolist() == two[0].tolist() and one[1].tolist() == two[1].tolist()
