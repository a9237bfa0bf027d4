import pytest

from readable_bpe import train_bpe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.text.learning.train_tokenizer import train_tokenizer
from tokmill.text.tokenizers.tokenizer_json import BYTE_ORDER


def test_the_worked_example_of_cs336() -> None:
    text = "low low low low low lower lower widest widest widest newest newest newest newest newest"
    vocab, merges = train_bpe([text], 256 + 6, [], "greatest-bytes", pattern=r"\S+")
    joined = [left + right for left, right in merges]
    assert joined == [b"st", b"est", b"ow", b"low", b"west", b"ne"]
    assert vocab[256 + 5] == b"ne"


def test_ties_take_the_greatest_bytes_or_the_smallest_ids() -> None:
    texts = ["ab", "cd", "\u00e9"]
    assert train_bpe(texts, 257, [], "greatest-bytes")[1] == [(b"\xc3", b"\xa9")]
    assert train_bpe(texts, 257, [], "first")[1] == [(b"a", b"b")]
    # A longer token is greater than its own prefix.
    assert train_bpe(["abab" * 3 + " ab ab ab"], 258, [], "greatest-bytes")[1][0] == (b"a", b"b")


def test_ids_are_specials_bytes_merges() -> None:
    vocab, merges = train_bpe(["hello hello"], 260, ["<a>", "<b>"])
    assert list(vocab) == list(range(260))
    assert [vocab[0], vocab[1]] == [b"<a>", b"<b>"]
    assert [vocab[2 + place] for place in range(256)] == [bytes([byte]) for byte in BYTE_ORDER]
    assert [vocab[258 + place] for place in range(2)] == [left + right for left, right in merges]


def test_specials_never_enter_a_merge() -> None:
    text = "a<|endoftext|>b<|end" + "<|endoftext|>" * 500
    vocab, merges = train_bpe([text], 400, ["<|endoftext|>"])
    learned = {left + right for left, right in merges}
    assert learned == {b"<|", b"nd", b"end"}
    assert vocab[0] == b"<|endoftext|>"


def test_stops_when_no_pair_is_left() -> None:
    vocab, merges = train_bpe(["ab ab"], 10_000, [])
    assert len(merges) == 2 and len(vocab) == 258


def test_counts_are_exact_above_32_bits() -> None:
    from tokmill.text.learning.bpe import train_words

    words = {b"ab": 2**32 + 5, b"cd": 100, b"ef": 2**31 + 1}
    assert train_words(words, 259, [], "first")[1] == [(b"a", b"b"), (b"e", b"f"), (b"c", b"d")]


@pytest.mark.parametrize(
    ("size", "specials", "message"),
    [
        (255, [], "too small"),
        (257, ["<a>", "<b>"], "too small"),
        (300, ["<a>", "<a>"], "given 2 times"),
        (300, [""], "empty"),
        (300, ["a"], "one character"),
    ],
)
def test_impossible_requests_are_refused(size: int, specials: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train_bpe(["text"], size, specials)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "gpt3"}, "did you mean"),
        ({"tie_break": "last"}, "no tie-break"),
        ({"engine": "rust"}, "no engine"),
        ({"engine": "gigatoken", "pattern": "o200k"}, "GPT-2's pattern only"),
        ({"engine": "tokenizers", "tie_break": "greatest-bytes"}, "does not know the tie-break"),
        ({"pattern": "(a", "engine": "python"}, "cannot be read"),
        ({"pattern": "(a", "engine": "tokenizers"}, "cannot be read"),
    ],
)
def test_wrong_training_options_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(TokmillError, match=message):
        train_tokenizer(["some text"], 300, [], **options)  # type: ignore[arg-type]


def test_one_string_is_not_taken_for_its_characters() -> None:
    for texts, specials in (("a text", ["<s>"]), (["a text"], "<s>")):
        with pytest.raises(UsageError, match="not one"):
            train_tokenizer(texts, 300, specials)


def test_no_text_is_an_error() -> None:
    for engine in ("auto", "python"):
        with pytest.raises(TokmillError, match="no text"):
            train_tokenizer(["", "<|endoftext|>"], 300, engine=engine)


def test_a_lone_surrogate_in_a_record_is_an_error() -> None:
    with pytest.raises(TokmillError, match="lone surrogate"):
        train_tokenizer(["a\ud800"], 300)
    with pytest.raises(TokmillError, match="lone surrogate"):
        train_tokenizer(["a\ud800"], 300, engine="python")
