"""Ids of a vocab.txt equal those of transformers' tokenizers of BERT on difficult text."""

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tokmill.base.errors import TokmillError
from tokmill.text.encoding.encoders import make_encoder
from tokmill.text.learning.train_wordpiece import train_wordpiece
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_json import template_tokens

transformers = pytest.importorskip("transformers", reason="needs transformers")

PIECES = [
    *"abcdefgXYZ 0123 .,!?'\"-_()[]{}#@/\\$^`~|<>\n\t\r ",
    *"éÉñçåßİıſŁøÀÿΑΣσςЖжёЙ",
    *["e\u0301", "n\u0303", "a\u0323\u0307"],
    *"中文字。、日本語のテスト한국어\U00020000\u3400\uf900\U0002b821",
    *"\x00\x01\x1b\x7f\x85\xad\u200b\u200d\u200e\ufeff\ufffd\ue000\U000e0001",
    *"\x0b\x0c\x1c\u00a0\u1680\u2000\u2003\u2028\u2029\u202f\u205f\u3000",
    *["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "❤️"],
    *"“”‘’…–—·•§¡¿«»‰№™½²",
    *["the", "The ", " of", "ing", "don't", "naïve", "unaffable", "x" * 99, "y" * 101, "z" * 300],
    *"اللغة العربية עברית हिन्दी ไทย",
]


def difficult(size: int, seed: int = 0) -> list[str]:
    """Return texts of so many characters of pieces in all, and of any code points."""
    choose = random.Random(seed)
    texts, left = [], size
    while left > 0:
        drawn = choose.choices(PIECES, k=choose.randrange(1, 200))
        drawn += [chr(number) for number in choose.choices(range(0xD800), k=choose.randrange(4))]
        choose.shuffle(drawn)
        texts.append("".join(drawn))
        left -= len(texts[-1].encode())
    return texts


def split(found: Any) -> list[list[int]]:
    ids, lengths = found
    flat, parts, start = ids.tolist(), [], 0
    for length in lengths.tolist():
        parts.append(flat[start : start + length])
        start += length
    return parts


@pytest.fixture(scope="module", params=["uncased", "cased"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a vocab.txt that was trained on such text."""
    made = train_wordpiece(difficult(200_000, 9), 3000, cased=request.param == "cased")
    path: Path = tmp_path_factory.mktemp(request.param)
    tokens = sorted(made.data["model"]["vocab"].items(), key=lambda item: item[1])
    (path / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in tokens), newline="")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": request.param == "uncased"})
    )
    return path


def check(folder: Path, texts: list[str]) -> None:
    """Compare every way to encode with transformers' BertTokenizer."""
    peer = transformers.BertTokenizer.from_pretrained(folder)
    wanted = peer(texts, add_special_tokens=False)["input_ids"]
    tokenizer = Tokenizer.from_file(folder)
    assert tokenizer.size == len(peer)
    encoder = make_encoder(tokenizer.to_json(), specials_in_text="special")
    assert encoder.name == "tokenizers"
    assert split(encoder(texts)) == wanted
    plain = make_encoder(tokenizer.to_json())
    assert split(plain(texts)) == wanted
    for text, ids in zip(texts[:300], wanted, strict=False):
        assert tokenizer.encode(text) == tokenizer.encode(text, "plain") == ids
        parts = [text[i : i + 7] for i in range(0, len(text), 7)]
        assert [*tokenizer.encode_iterable(parts)] == ids


def test_difficult_text(folder: Path) -> None:
    texts = difficult(150_000)
    check(folder, texts)
    found = split(make_encoder(Tokenizer.from_file(folder).to_json())(texts))
    assert sum(map(len, found)) > 10_000 and len({i for ids in found for i in ids}) > 500


@pytest.mark.long
def test_five_megabytes_of_difficult_text(folder: Path) -> None:
    check(folder, difficult(5_000_000, 1))


def test_special_tokens_pairs_and_decoding(folder: Path) -> None:
    peer = transformers.BertTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(folder / "vocab.txt")
    text = "the [MASK] of[SEP]the [unused] [CLS]a"
    assert tokenizer.encode(text) == peer(text, add_special_tokens=False)["input_ids"]
    # Words that the vocabulary has not are [UNK] either way.
    special = {number for token, number in tokenizer.specials.items() if token != "[UNK]"}
    assert special.isdisjoint(tokenizer.encode(text, "plain"))
    assert tokenizer.vocabulary()[0].roles == {
        "pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4,
    }  # fmt: skip
    before, after = template_tokens(tokenizer.data)
    ids = tokenizer.encode("the end")
    assert [*before, *ids, *after] == peer("the end")["input_ids"]
    for text in difficult(20_000, 3):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == peer.backend_tokenizer.decode(ids, False)


def test_a_text_of_millions_is_cut(folder: Path) -> None:
    """In parts, whose ids are those of the whole text."""
    text = "".join(difficult(1_500_000, 5))
    assert len(text) > 1 << 20
    tokenizer = Tokenizer.from_file(folder)
    whole = transformers.BertTokenizer.from_pretrained(folder)(text, add_special_tokens=False)
    assert split(make_encoder(tokenizer.to_json())([text, "a"]))[0] == whole["input_ids"]


def test_the_tokenizer_in_plain_python(folder: Path) -> None:
    """Where both know a character equally: Python has another version of Unicode."""
    legacy = pytest.importorskip(
        "transformers.models.bert.tokenization_bert_legacy", reason="needs transformers 5"
    )
    lower = json.loads((folder / "tokenizer_config.json").read_text())["do_lower_case"]
    peer = legacy.BertTokenizerLegacy(str(folder / "vocab.txt"), do_lower_case=lower)
    tokenizer = Tokenizer.from_file(folder)
    old = unicodedata.ucd_3_2_0
    compared = 0
    for text in difficult(100_000, 7):
        # Known in 2002, and no capital sigma, which Python writes otherwise at the end of words.
        kept = "".join(c for c in text if old.category(c) not in ("Cn", "Co") and c not in "Σİ")
        # It composes characters first.
        kept = unicodedata.normalize("NFC", kept).replace("\u180e", "")
        wanted = peer.convert_tokens_to_ids(peer.tokenize(kept))
        assert tokenizer.encode(kept) == wanted, ascii(kept)
        compared += len(wanted)
    assert compared > 10_000


def test_gigatoken_is_not_used(folder: Path) -> None:
    with pytest.raises(TokmillError, match="its model is WordPiece") as caught:
        make_encoder(Tokenizer.from_file(folder).to_json(), engine="gigatoken")
    assert "--engine auto" in caught.value.hint
