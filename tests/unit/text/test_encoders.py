import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import TOKENIZER
from tokenizers_peer import reference_ids
from tokmill.base.errors import TokmillError, UsageError
from tokmill.text.encoding import encoders
from tokmill.text.encoding.encoders import make_encoder
from tokmill.text.encoding.guards import with_newer_characters
from tokmill.text.learning.train_tokenizer import train_tokenizer
from tokmill.text.tokenizers.tokenizer import Tokenizer

pytest.importorskip("gigatoken", reason="needs the extra text")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")
models, pre_tokenizers = tokenizers.models, tokenizers.pre_tokenizers

NEWER = "\u088f"  # a letter of Unicode 17.0
TEXTS = ["hello world", "", "<|endoftext|>x", "\u00e9t\u00e9", f"{NEWER}a{NEWER}", "end"]


@pytest.fixture(scope="module")
def tokenizer(corpus: Any) -> Tokenizer:
    return train_tokenizer([*corpus.texts[:60], f" {NEWER}a" * 50], 800, ["<|endoftext|>"])


def flat(texts: list[str]) -> tuple[Any, Any]:
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)])
    return np.frombuffer(b"".join(encoded), np.uint8), offsets.astype(np.int64)


@pytest.mark.parametrize("engine", ["auto", "gigatoken", "tokenizers"])
@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("mode", ["plain", "special", "reject"])
def test_both_ways_in_give_the_ids_of_the_reference(
    tokenizer: Tokenizer, engine: str, threads: bool, mode: str
) -> None:
    encoder = make_encoder(
        tokenizer.to_json(), engine=engine, specials_in_text=mode, threads=threads
    )
    assert encoder.name == ("tokenizers" if engine == "tokenizers" else "gigatoken")
    specials: Any = "special" if mode == "special" else "plain"
    expected = [reference_ids(tokenizer, text, specials) for text in TEXTS]
    assert [tokenizer.encode(text, specials) for text in TEXTS] == expected
    for ids, lengths in (encoder(TEXTS), encoder.encode_utf8(*flat(TEXTS))):
        assert ids.dtype == np.uint32 and lengths.dtype == np.int64
        assert lengths.tolist() == [len(part) for part in expected]
        assert ids.tolist() == [number for part in expected for number in part]


def test_a_buffer_may_hold_more_than_its_texts(tokenizer: Tokenizer) -> None:
    data, offsets = flat(["skip", *TEXTS, "skip"])
    for engine in ("gigatoken", "tokenizers"):
        encoder = make_encoder(tokenizer.to_json(), engine=engine)
        ids, lengths = encoder.encode_utf8(data, offsets[1:-1])
        assert ids.tolist() == encoder(TEXTS)[0].tolist()
        assert len(lengths) == len(TEXTS)


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_nothing_in_nothing_out(tokenizer: Tokenizer, engine: str) -> None:
    encoder = make_encoder(tokenizer.to_json(), engine=engine)
    for texts in ([], ["", ""]):
        ids, lengths = encoder(texts)
        assert ids.dtype == np.uint32 and len(ids) == 0
        assert lengths.dtype == np.int64 and lengths.tolist() == [0] * len(texts)


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_a_lone_surrogate_is_named(tokenizer: Tokenizer, engine: str) -> None:
    encoder = make_encoder(tokenizer.to_json(), engine=engine)
    with pytest.raises(TokmillError, match="text 1, character 2.*lone surrogate"):
        encoder(["fine", "ab\udc00"])


def test_wrong_names_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="did you mean 'gigatoken'"):
        make_encoder(tokenizer.to_json(), engine="gigatokens")
    with pytest.raises(UsageError, match="specials_in_text"):
        make_encoder(tokenizer.to_json(), specials_in_text="allow")
    with pytest.raises(TokmillError, match=r"not a tokenizer\.json"):
        make_encoder(b"{")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalizer": {"type": "NFC"}}, "normalizer 'NFC'"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "not known"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "not known"),
    ],
)
def test_where_gigatoken_may_differ_tokenizers_is_taken(
    tokenizer: Tokenizer, change: dict[str, Any], reason: str
) -> None:
    changed = json.dumps(
        {**tokenizer.data, **{k: {"trim_offsets": True, **v} for k, v in change.items()}}
        if "ByteLevel" in str(change)
        else {**tokenizer.data, **change}
    ).encode()
    assert make_encoder(changed).name == "tokenizers"
    with pytest.raises(TokmillError, match=reason):
        make_encoder(changed, engine="gigatoken")


def test_dropout_and_wrong_added_ids_are_refused(tokenizer: Tokenizer) -> None:
    data = json.loads(tokenizer.to_json())
    data["model"]["dropout"] = 0.1
    with pytest.raises(TokmillError, match="dropout"):
        make_encoder(json.dumps(data).encode())
    data["model"]["dropout"] = None
    data["added_tokens"].append({**data["added_tokens"][0], "id": 900, "content": "<|far|>"})
    with pytest.raises(TokmillError, match="says id 900"):
        make_encoder(json.dumps(data).encode(), engine="tokenizers", specials_in_text="special")


@pytest.mark.parametrize("engine", ["auto", "tokenizers"])
@pytest.mark.parametrize("words", [{"rstrip": True}, {"lstrip": True}, {"single_word": True}])
def test_tokens_that_were_added_later_keep_their_ids(engine: str, words: dict[str, bool]) -> None:
    """Special tokens in the vocabulary and after it, then others that are not special."""
    data = json.loads(TOKENIZER.read_text())
    first = len(data["model"]["vocab"])
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, name in enumerate(("<s>", "hello", "more")):
        token = {"id": first + number, "content": name, "special": name == "<s>"}
        data["added_tokens"].append(plain | token | (words if name == "hello" else {}))
    text = "say hello hello, othello and more"
    ids = tokenizers.Tokenizer.from_str(json.dumps(data)).encode(text).ids
    assert {first + 1, first + 2} <= set(ids)
    found, _ = make_encoder(json.dumps(data).encode(), engine=engine)([text])
    assert found.tolist() == ids
    found, _ = make_encoder(json.dumps(data).encode(), engine=engine)(["<s><|endoftext|>"])
    assert not {first, 0} & set(found.tolist())


def test_template_tokens_are_never_added(tokenizer: Tokenizer) -> None:
    data = json.loads(tokenizer.to_json())
    data["post_processor"] = {
        "type": "RobertaProcessing",
        "cls": ["<|endoftext|>", 0],
        "sep": ["<|endoftext|>", 0],
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    for engine in ("gigatoken", "tokenizers"):
        encoder = make_encoder(json.dumps(data).encode(), engine=engine, specials_in_text="special")
        assert encoder(["end"])[0].tolist() == tokenizer.encode("end")


def test_whole_word_specials_stay_text_in_plain_mode(tokenizer: Tokenizer) -> None:
    data = json.loads(tokenizer.to_json())
    data["model"]["ignore_merges"] = True
    data["model"]["vocab"]["zebra"] = 800
    data["added_tokens"].append({**data["added_tokens"][0], "id": 800, "content": "zebra"})
    raw = json.dumps(data).encode()
    expected = reference_ids(tokenizer, "zebra", "plain")
    assert Tokenizer.from_json(raw).encode("zebra", "plain") == expected
    assert Tokenizer.from_json(raw).encode("zebra") == [800]
    for engine in ("gigatoken", "tokenizers"):
        assert make_encoder(raw, engine=engine)(["zebra"])[0].tolist() == expected


def special_file(model: Any, pre: Any, *specials: str) -> bytes:
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre
    made.add_special_tokens(list(specials))
    return made.to_str().encode()


LETTERS = {c: n for n, c in enumerate("</s>abcd")}
MERGED = {**LETTERS, "</": 8, "s>": 9, "</s>": 10, "<unk>": 11}
BPE = models.BPE(MERGED, [("<", "/"), ("s", ">"), ("</", "s>")], unk_token="<unk>")
SUFFIXED = models.BPE(
    {"[": 0, "##S": 1, "##]": 2, "[S": 3, "[S]": 4},
    [("[", "##S"), ("[S", "##]")],
    continuing_subword_prefix="##",
)
WORDPIECE = models.WordPiece({"[UNK]": 0, "[SEP]": 1, "a": 2, "##b": 3}, unk_token="[UNK]")
WORDLEVEL = models.WordLevel({"[UNK]": 0, "[SEP]": 1, "a": 2}, unk_token="[UNK]")


@pytest.mark.parametrize(
    ("model", "special", "text", "right"),
    [
        (BPE, "</s>", "a </s> b", [4, 8, 9, 5]),
        (BPE, "</s>", "a</s>b", [4, 8, 9, 5]),
        (models.BPE({**LETTERS, "</": 8}, [("<", "/")]), "</", "</s", [0, 1, 2]),
        (SUFFIXED, "[S]", "[S]", [3, 2]),
        (WORDPIECE, "[SEP]", "a [SEP] ab [UNK]", [2, 0, 2, 3, 0]),
        (WORDLEVEL, "[SEP]", "a [SEP] [UNK] a", [2, 0, 0, 2]),
    ],
)
def test_no_model_makes_special_tokens_of_plain_text(
    model: Any, special: str, text: str, right: list[int]
) -> None:
    raw = special_file(model, pre_tokenizers.WhitespaceSplit(), special, "[UNK]", "<unk>")
    assert make_encoder(raw)([text])[0].tolist() == right
    meant = make_encoder(raw, specials_in_text="special")([text])[0].tolist()
    assert json.loads(raw)["model"]["vocab"][special] in meant


def test_unigram_makes_no_control_token_of_text(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra text")
    words = tmp_path / "c.txt"
    words.write_text("the cat sat\nhello world s x < > / |\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(words), model_prefix=str(tmp_path / "u"), vocab_size=40, model_type="unigram",
        hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity",
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "u.model"))
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    pre = pre_tokenizers.Metaspace(prepend_scheme="always")
    raw = special_file(models.Unigram(pieces, unk_id=0), pre, "<unk>", "<s>", "</s>")
    texts = ["hello </s> world <s>", "</s>", "the <unk> cat ?", "</s></s>"]
    encode = make_encoder(raw)
    for text in texts:
        assert encode([text])[0].tolist() == model.encode(text)


def test_a_merge_that_stands_twice_has_its_last_place(tokenizer: Tokenizer) -> None:
    data = json.loads(tokenizer.to_json())
    data["model"]["merges"].append(data["model"]["merges"][0])
    raw = json.dumps(data).encode()
    right = tokenizers.Tokenizer.from_str(raw.decode())
    for text in TEXTS:
        ids = right.encode(text, add_special_tokens=False).ids
        assert make_encoder(raw, specials_in_text="special")([text])[0].tolist() == ids
    with pytest.raises(TokmillError, match="a merge stands twice"):
        make_encoder(raw, engine="gigatoken")


@pytest.mark.parametrize("threads", [True, False])
def test_a_character_without_a_token_is_an_error(threads: bool, tokenizer: Tokenizer) -> None:
    raw = special_file(models.BPE({"a": 0, "b": 1}, []), pre_tokenizers.Whitespace())
    encode = make_encoder(raw, threads=threads)
    assert encode(["ab a"])[0].tolist() == [0, 1, 0]
    with pytest.raises(TokmillError, match="no token for 'z' and no unknown token"):
        encode(["ab", "az"])
    data = json.loads(tokenizer.to_json())
    lost = data["model"]["vocab"].pop("Z")
    assert [m for m in data["model"]["merges"] if "Z" in "".join(m)] == [] and lost
    with pytest.raises(TokmillError, match="no token for 'Z'"):
        make_encoder(json.dumps(data).encode(), threads=threads)(["Z"])


def test_odd_texts_are_found() -> None:
    texts = ["plain", "\u4e2d\u6587", f"a{NEWER}", "", "\U000323b0", "\U0001f600", "a "]
    assert with_newer_characters([text.encode() for text in texts]) == [2, 4]
    assert with_newer_characters([]) == with_newer_characters([b"a"]) == []


@pytest.mark.parametrize("mode", ["plain", "special"])
def test_only_what_stands_about_newer_characters_goes_to_tokenizers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, mode: str, corpus: Any
) -> None:
    whole = " ".join(corpus.texts[60:70])
    texts = [f"{whole} {NEWER}a<|endoftext|> x{NEWER}\n{whole}", "a", f"{NEWER}", "\u4e2d a"]
    wanted = make_encoder(tokenizer.to_json(), engine="tokenizers", specials_in_text=mode)(texts)
    monkeypatch.setattr(encoders, "_STRETCH", 20)
    encoder = make_encoder(tokenizer.to_json(), engine="gigatoken", specials_in_text=mode)
    assert isinstance(encoder, encoders.GigatokenEncoder)
    seen: list[str] = []
    other = encoder._other.__call__
    monkeypatch.setattr(
        encoders.TokenizersEncoder,
        "__call__",
        lambda self, some: (seen.extend(some), other(some))[1],
    )
    for found, right in zip(encoder(texts), wanted, strict=True):
        assert found.tolist() == right.tolist()
    assert seen and all(NEWER in text and len(text) < 100 for text in seen)


@pytest.mark.parametrize("mode", ["plain", "special"])
def test_long_texts_go_to_tokenizers_in_parts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, mode: str, corpus: Any
) -> None:
    from tokmill.text.encoding import encoders

    text = "<|endoftext|>".join(corpus.texts[60:70]) + " <|endoftext|>\n"
    encoder = make_encoder(tokenizer.to_json(), engine="tokenizers", specials_in_text=mode)
    ids, lengths = encoder(["a", text, ""])
    monkeypatch.setattr(encoders, "_LONG", 500)
    parts = encoder(["a", text, ""])
    assert parts[0].tolist() == ids.tolist() and parts[1].tolist() == lengths.tolist()


def test_tokenizers_encodes_some_texts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["ab " * n for n in (0, 5, 1, 40, 0, 7, 0)]
    whole = encoders.TokenizersEncoder(json.loads(TOKENIZER.read_bytes()), threads=True)(texts)
    for most in (1, 7, 50, 120, 10_000):
        monkeypatch.setattr(encoders, "_AT_ONCE", most)
        encoder = encoders.TokenizersEncoder(json.loads(TOKENIZER.read_bytes()), threads=True)
        for found, wanted in zip(encoder(texts), whole, strict=True):
            assert found.tolist() == wanted.tolist()
        assert [part.tolist() for part in encoder([])] == [[], []]
