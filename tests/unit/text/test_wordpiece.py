"""WordPiece: a vocab.txt read, vocabularies trained, and what is refused."""

import json
from pathlib import Path

import pytest

from tokmill.base.errors import TokmillError, UsageError
from tokmill.text.encoding.encoders import make_encoder
from tokmill.text.learning.train_wordpiece import train_wordpiece
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_files import SPECIALS, read_words

TEXTS = ["The unaffable cat, the affable dog: able, unable!", "Un été à Paris 日本", "the cat"] * 3
WORDS = ["un", "##aff", "##able", "the", "cat", ",", "!", "日", "本"]


def write(path: Path, tokens: list[str], ending: str = "\n") -> Path:
    path.write_bytes("".join(token + ending for token in tokens).encode())
    return path


def test_the_line_is_the_id(tmp_path: Path) -> None:
    path = write(tmp_path / "vocab.txt", ["[PAD]", "[unused0]", *SPECIALS[1:], *WORDS])
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.size == 15
    assert tokenizer.vocabulary()[0].roles == {"pad": 0, "unk": 2, "cls": 3, "sep": 4, "mask": 5}
    ids = [6, 7, 8, 9, 10, 11, 13, 14, 2, 12]
    assert tokenizer.encode("UNAFFABLE thé CAT,日本 unafraid!") == ids
    assert tokenizer.decode(ids) == "unaffable the cat, 日 本 [UNK]!"
    found, _ = make_encoder(tokenizer.to_json())(["UNAFFABLE thé CAT,日本 unafraid!"])
    assert found.tolist() == ids
    # Of a folder too, with other ends of lines, a byte order mark and lines without a token.
    windows = tmp_path / "folder/vocab.txt"
    windows.parent.mkdir()
    write(windows, ["\ufeff[PAD]", "[unused0]", *SPECIALS[1:], *WORDS, "", ""], "\r\n")
    assert Tokenizer.from_file(windows.parent).to_json() == tokenizer.to_json()
    # What it makes is read again as it is.
    assert Tokenizer.from_file(tokenizer.save(tmp_path / "saved")).encode("the cat") == [9, 10]


def test_whether_text_is_put_into_lower_case(tmp_path: Path) -> None:
    """Said by the file beside it, else by capital letters in the vocabulary."""
    small, capital = [*SPECIALS, "the", "The"], [*SPECIALS, "the", "été"]
    for tokens, lower in ((small, False), (capital, True)):
        step = Tokenizer.from_file(write(tmp_path / "vocab.txt", tokens)).data["normalizer"]
        assert (step["lowercase"], step["strip_accents"]) == (lower, None)
    said = {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    step = Tokenizer.from_file(tmp_path / "vocab.txt").data["normalizer"]
    assert not step["lowercase"] and step["strip_accents"] and not step["handle_chinese_chars"]
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokmillError, match="not a JSON object"):
        Tokenizer.from_file(tmp_path / "vocab.txt")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"the\ncat\n", "no token \\[UNK\\]"),
        (b"[UNK]\n\xff\n", "text in UTF-8"),
        (b"", "the file is empty"),
    ],
)
def test_what_is_no_vocabulary(raw: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(raw)
    with pytest.raises(TokmillError, match=said) as caught:
        Tokenizer.from_file(tmp_path / "vocab.txt")
    assert caught.value.hint


def test_a_token_that_stands_twice_has_its_last_line(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(write(tmp_path / "vocab.txt", ["the", *SPECIALS, "the"]))
    assert tokenizer.encode("the") == [6] and tokenizer.size == 7


def test_white_space_around_a_token_is_none_of_it(tmp_path: Path) -> None:
    """BERT's own reader strips lines: one that holds white space alone only counts as a line."""
    lines = [*SPECIALS, "the ", "\u2028", " cat\t", "##s\u00a0"]
    path = write(tmp_path / "vocab.txt", lines)
    ids = {line.strip(): number for number, line in enumerate(lines)}
    expected = [ids["the"], ids["cat"], ids["##s"]]
    assert Tokenizer.from_file(path).encode("the cats") == expected
    assert read_words(path).ids == {token: number for token, number in ids.items() if token}
    assert read_words(path).empty == 1


def test_training_is_repeatable_and_covers_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [train_wordpiece(TEXTS, 90) for _ in range(4)]
    assert len({one.to_json() for one in made}) == 1
    tokenizer = made[0]
    assert list(tokenizer.specials) == [*SPECIALS] and tokenizer.specials["[PAD]"] == 0
    assert tokenizer.vocabulary()[0].roles.keys() == {"pad", "unk", "cls", "sep", "mask"}
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.specials["[UNK]"] not in ids
    assert len(tokenizer.encode("the cat")) < 5
    vocab = set(tokenizer.data["model"]["vocab"])
    assert "##," not in vocab and "##日" not in vocab and {"t", "##t", "日", ","} <= vocab
    cased = train_wordpiece(TEXTS, 120, ["[NEW]"], cased=True)
    assert cased.specials["[NEW]"] == 5 and "É" not in cased.data["model"]["vocab"]
    assert cased.encode("Un")[0] != cased.encode("un")[0]
    # Rare characters are left out, and words with them are unknown.
    monkeypatch.setattr("tokmill.text.learning.train_wordpiece.ALPHABET", 12)
    few = train_wordpiece(TEXTS, 60)
    assert few.specials["[UNK]"] in few.encode("paris")


def test_vocabularies_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="of 20 is too small") as caught:
        train_wordpiece(TEXTS, 20)
    assert "--vocab-size" in caught.value.hint
    for specials in (["x"], ["[A]", "[A]"]):
        with pytest.raises(UsageError, match="special token"):
            train_wordpiece(TEXTS, 90, specials)
    with pytest.raises(TokmillError, match="no text"):
        train_wordpiece(["", "  "], 90)
