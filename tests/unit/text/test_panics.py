"""Libraries in Rust that give up: an error of our own."""

import json
from pathlib import Path

import pytest

from making import TOKENIZER
from tokmill.base.errors import TokmillError
from tokmill.text.encoding.encoders import make_encoder
from tokmill.text.learning.train_tokenizer import train_tokenizer
from tokmill.text.tokenizers.tokenizer import Tokenizer

ENDLESS = "(a+)+$"
TEXT = "a" * 60 + "!"


def with_pattern(pattern: str) -> bytes:
    data = json.loads(Path(TOKENIZER).read_bytes())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    split["invert"] = False
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level["trim_offsets"] = True
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    return json.dumps(data).encode()


@pytest.mark.parametrize("threads", [True, False])
def test_an_endless_pattern_is_an_error(threads: bool) -> None:
    encode = make_encoder(with_pattern(ENDLESS), threads=threads)
    with pytest.raises(TokmillError, match="cannot encode a text: Onig"):
        encode([TEXT] * 3)
    encode = make_encoder(with_pattern(r"\p{L}+"), threads=threads)
    assert sum(encode(["ab cd"])[1].tolist()) > 0


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_training_with_an_endless_pattern_ends_cleanly(engine: str) -> None:
    with pytest.raises(TokmillError, match="tokenizers gave up") as caught:
        train_tokenizer([TEXT], 300, pattern=ENDLESS, engine=engine)
    assert "(a+)+" in caught.value.hint and ENDLESS in caught.value.where


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_encode_stops_at_an_endless_pattern(place: str) -> None:
    data = json.loads(with_pattern(ENDLESS if place == "pre_tokenizer" else r"\p{L}+"))
    if place == "normalizer":
        data["normalizer"] = {"type": "Replace", "pattern": {"Regex": ENDLESS}, "content": "b"}
    tokenizer = Tokenizer.from_data(data, "own/tokenizer.json")
    with pytest.raises(TokmillError, match="cannot encode a text") as caught:
        tokenizer.encode(TEXT)
    assert caught.value.where == "own/tokenizer.json"
    assert tokenizer.decode(tokenizer.encode("xaa")) == ("xb" if place == "normalizer" else "xaa")
