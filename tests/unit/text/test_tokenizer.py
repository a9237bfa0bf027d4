import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from making import TOKENIZER
from readable_bpe import train_bpe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.text.encoding.encoders import make_encoder
from tokmill.text.tokenizers import tokenizer_json
from tokmill.text.tokenizers.patterns import resolve_pattern
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_json import template_tokens

SPECIALS = ["<|endoftext|>", "<|pad|>", "<|endoftext|><|endoftext|>"]


@pytest.fixture(scope="module")
def tokenizer(corpus: Any) -> Tokenizer:
    vocab, merges = train_bpe(corpus.texts[:60], 800, SPECIALS, "first")
    return Tokenizer(vocab, merges, SPECIALS)


def test_attributes(tokenizer: Tokenizer) -> None:
    assert tokenizer.size == 800
    assert tokenizer.specials == {token: number for number, token in enumerate(SPECIALS)}
    assert repr(tokenizer) == f"Tokenizer(size={tokenizer.size}, specials={SPECIALS!r})"
    assert tokenizer.vocab[0] == b"<|endoftext|>"
    assert len(tokenizer.merges) == 800 - 256 - 3
    left, right = tokenizer.merges[0]
    assert tokenizer.vocab[259] == left + right


def test_the_longest_of_overlapping_specials_wins(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|endoftext|><|endoftext|>") == [2]
    assert tokenizer.encode("<|endoftext|><|endoftext|><|endoftext|>") == [2, 0]
    assert tokenizer.encode("<|pad|><|endoftext|>\n")[:2] == [1, 0]


def test_bytes_that_are_no_utf8_become_replacement_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\u00e9")
    assert tokenizer.decode(ids[:1]) == "\ufffd" or len(ids) == 1
    assert tokenizer.decode_bytes(ids) == "\u00e9".encode()


def test_wrong_ids_and_surrogates_are_errors(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokmillError, match="no id 800"):
        tokenizer.decode([800])
    with pytest.raises(TokmillError, match="lone surrogate"):
        tokenizer.encode("a\ud83d")


def test_encode_iterable_needs_constant_memory(tokenizer: Tokenizer) -> None:
    def lines() -> Iterator[str]:
        for number in range(8_000):
            yield f"line {number % 50} of many lines in a file of some megabytes\n"

    for _ in tokenizer.encode_iterable(["warm up the cache\n"]):
        pass
    tracemalloc.start()
    count = sum(1 for _ in tokenizer.encode_iterable(lines()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 80_000
    assert peak < 200_000


def test_canonical_bytes_and_vocabulary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tokenizer.save(tmp_path / "tok")
    again = Tokenizer.from_file(tmp_path / "tok")
    assert path == tmp_path / "tok" / "tokenizer.json"
    assert again.to_json() == tokenizer.to_json() == path.read_bytes()
    vocabulary, raw = again.vocabulary()
    assert raw == path.read_bytes()
    assert vocabulary.size == 800
    assert vocabulary.roles == {"eot": 0, "pad": 1}
    changed, _ = again.vocabulary({"eot": "<|endoftext|><|endoftext|>"})
    assert changed.role("eot") == 2
    config = json.loads((tmp_path / "tok" / "tokenizer_config.json").read_bytes())
    assert config["eos_token"] == "<|endoftext|>" and config["pad_token"] == "<|pad|>"


def test_size_counts_added_tokens(tokenizer: Tokenizer) -> None:
    data = json.loads(tokenizer.to_json())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 900, "content": "<|far|>"})
    far = Tokenizer.from_json(json.dumps(data))
    assert far.size == 901
    with pytest.raises(TokmillError, match="says id 900"):
        far.encode("<|far|>")
    assert far.decode([900]) == "<|far|>"


def test_specials_that_are_not_in_the_vocabulary_get_new_ids() -> None:
    vocab = {byte: bytes([byte]) for byte in range(256)}
    tokenizer = Tokenizer(vocab, [], ["<|a|>", "<|b|>"])
    assert tokenizer.encode("x<|b|>") == [120, 257]
    assert Tokenizer(vocab, [], {"<|a|>": 300}).size == 301
    with pytest.raises(UsageError, match="already"):
        Tokenizer(vocab, [], {"<|a|>": 5})


def test_a_special_spelled_like_a_token_is_refused() -> None:
    vocab = {byte: bytes([byte]) for byte in range(256)} | {256: b" a"}
    with pytest.raises(TokmillError, match="spelled like"):
        Tokenizer(vocab, [(b" ", b"a")], {"\u0120a": 257})


def test_files_of_gpt2_in_their_older_layout_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    for path in (tmp_path, tmp_path / "vocab.json", tmp_path / "merges.txt"):
        with pytest.raises(TokmillError, match="no(t a)? tokenizer") as caught:
            Tokenizer.from_file(path)
        assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"tokenizer_config.json": {"tokenizer_class": "CLIPTokenizer"}}, "CLIPTokenizer"),
        ({"tokenizer_config.json": {"tokenizer_class": "RobertaTokenizerFast"}}, "RobertaTok"),
        ({"tokenizer_config.json": {"pad_token": "<pad>"}}, "pad_token '<pad>', which it lacks"),
        ({"added_tokens.json": {"<pad>": 400}}, "its vocabulary lacks"),
        ({"added_tokens.json": {"a": 7}}, "its vocabulary lacks"),
        ({"added_tokens.json": {"<pad>": "x"}}, "without ids"),
        ({"added_tokens.json": []}, "not a JSON object"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {}}}}, "without ids"),
    ],
)
def test_layouts_that_are_not_known_are_refused(
    tmp_path: Path, files: dict[str, Any], what: str
) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\na\n")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(TokmillError, match=re.escape(what)) as caught:
        Tokenizer.from_file(tmp_path)
    assert "save_pretrained" in caught.value.hint or "fetch it again" in caught.value.hint


def test_the_end_token_of_a_tokenizer_config(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert Tokenizer.from_file(tmp_path).named == {"eot": "<|endoftext|>", "pad": "<|pad|>"}
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIALS[1]}))
    found = Tokenizer.from_file(tmp_path).vocabulary()[0].roles
    assert found["eot"] == tokenizer.specials[SPECIALS[1]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"", "empty"),
        ("tokenizer.json", b"{", "not a tokenizer.json"),
        ("tokenizer.json", b"[1]", "no model"),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE", "vocab": {}, "merges": ["a"]}}',
            "not a pair",
        ),
        ("r50k_base.tiktoken", b"YQ== 0\nYg== 1\n", "not a tokenizer.json"),
        ("tekken.json", b'{"vocab": [{"rank": 0, "token_bytes": "AA=="}]}', "no model"),
        ("x.model", b"\x0a\xff\xff", "not a tokenizer.json"),
    ],
)
def test_broken_files_say_what_is_wrong(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokmillError, match=message):
        Tokenizer.from_file(tmp_path / name)


def test_missing_files_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="no such"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(TokmillError, match="holds no tokenizer"):
        Tokenizer.from_file(tmp_path)


def test_template_tokens(tokenizer: Tokenizer) -> None:
    special = {"id": "<|pad|>", "ids": [1], "tokens": ["<|pad|>"]}
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|pad|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|pad|>", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<|pad|>": special},
    }
    steps = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
    for processor, expected in (
        (None, ([], [])),
        ({"type": "ByteLevel"}, ([], [])),
        (steps, ([1], [1])),
        ({"type": "RobertaProcessing", "cls": ["<s>", 7], "sep": ["</s>", 8]}, ([7], [8])),
    ):
        data = {**tokenizer.data, "post_processor": processor}
        assert tokenizer_json.template_tokens(json.dumps(data)) == expected
    with pytest.raises(TokmillError, match="'Own' is not known"):
        tokenizer_json.template_tokens({**tokenizer.data, "post_processor": {"type": "Own"}})


def test_an_unknown_pattern_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'gpt2'"):
        resolve_pattern("gtp2")


def test_files_of_others_beside_a_tokenizer_are_not_replaced(tmp_path: Path) -> None:
    """Those of its own are, when it is written again."""
    tokenizer = Tokenizer.from_file(TOKENIZER)
    tokenizer.save(tmp_path / "ours/a.json")
    tokenizer.save(tmp_path / "ours/b.json", {"pad": 1})
    for name, text in (
        ("tokenizer_config.json", '{"model_max_length": 1000000000000000019884624838656}'),
        ("special_tokens_map.json", "{}"),
        ("tokenizer_config.json", "not JSON"),
    ):
        folder = tmp_path / f"{name}-{len(text)}"
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(UsageError, match="not one of tokmill"):
            tokenizer.save(folder)
        assert [path.name for path in folder.iterdir()] == [name]
        assert (folder / name).read_text() == text


DECODERS: list[dict[str, Any] | None] = [
    None,
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": True},
    {"type": "BPEDecoder", "suffix": "</w>"},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": False},
    {"type": "CTC", "pad_token": "d", "word_delimiter_token": "c", "cleanup": False},
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", ["BPE", "WordLevel", "WordPiece", "Unigram"])
def test_ids_become_the_text_of_the_decoder(decoder: dict[str, Any] | None, kind: str) -> None:
    library = pytest.importorskip("tokenizers", reason="needs the extra text")
    tokens = ["[UNK]", "\u2581a", "b</w>", "##c", "c", "d", ".", "n't", "\u2581", "</s>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    model = {
        "BPE": lambda: library.models.BPE(vocab, []),
        "WordLevel": lambda: library.models.WordLevel(vocab, unk_token="[UNK]"),
        "WordPiece": lambda: library.models.WordPiece(vocab, unk_token="[UNK]"),
        "Unigram": lambda: library.models.Unigram([(t, -1.0) for t in tokens], 0),
    }[kind]()
    made = library.Tokenizer(model)
    made.add_special_tokens(["</s>", "<new>"])
    raw = json.dumps({**json.loads(made.to_str()), "decoder": decoder})
    reference, tokenizer = library.Tokenizer.from_str(raw), Tokenizer.from_json(raw)
    for ids in ([1, 3, 2, 9], [8, 1, 1, 5, 5, 4, 10], [2, 7, 6], [6], []):
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=False)


def test_added_tokens_are_found_before_and_after_the_normalizer() -> None:
    library = pytest.importorskip("tokenizers", reason="needs the extra text")
    data = json.loads(TOKENIZER.read_text())
    first = max(token["id"] for token in data["added_tokens"]) + 1000
    data["normalizer"] = {"type": "Replace", "pattern": {"String": "x"}, "content": "yo"}
    for place, (name, normalized) in enumerate([("ax", True), ("xx", False), ("yo yo", True)]):
        token = {**data["added_tokens"][0], "content": name, "normalized": normalized}
        data["added_tokens"].append({**token, "id": first + place, "special": False})
        data["model"]["vocab"][name] = first + place
    tokenizer = Tokenizer.from_json(raw := json.dumps(data))
    reference = library.Tokenizer.from_str(raw)
    for text in ("axx", "ax x", "ayo xx x", "the ax", "x yo", "xxx", "yox", " x x x ax"):
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


def template(*single: str, **ids: int) -> dict[str, Any]:
    pieces = [
        {"Sequence": {"id": piece[1:], "type_id": 0}}
        if piece[0] == "$"
        else {"SpecialToken": {"id": piece, "type_id": 0}}
        for piece in single
    ]
    known = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()}
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pair,
        "special_tokens": known,
    }


@pytest.mark.parametrize(
    "steps",
    [
        [template("x", "y", "$A", "z", x=1, y=2, z=3)],
        [template("x", "$A", x=1), template("z", "w", "$A", z=3, w=5)],
        [{"type": "BertProcessing", "sep": ["s", 7], "cls": ["c", 8]}, template("x", "$A", x=1)],
    ],
)
def test_tokens_around_a_text_are_those_of_tokenizers(steps: list[dict[str, Any]]) -> None:
    library = pytest.importorskip("tokenizers", reason="needs the extra text")
    data = json.loads(TOKENIZER.read_text())
    data["post_processor"] = {"type": "Sequence", "processors": steps}
    reference = library.Tokenizer.from_str(json.dumps(data))
    before, after = template_tokens(data)
    inner = reference.encode("a b", add_special_tokens=False).ids
    assert before + inner + after == reference.encode("a b").ids


@pytest.mark.parametrize("single", [("$A", "$A"), ("x",), ("$A", "x", "$B"), ("$B",)])
def test_a_template_that_writes_a_text_twice_is_refused(single: tuple[str, ...]) -> None:
    data = json.loads(TOKENIZER.read_text()) | {"post_processor": template(*single, x=1)}
    with pytest.raises(TokmillError, match="not once"):
        template_tokens(data)


def test_a_step_after_byte_level_sees_bytes() -> None:
    library = pytest.importorskip("tokenizers", reason="needs the extra text")
    data = json.loads(TOKENIZER.read_text())
    whole = {**data["pre_tokenizer"], "type": "ByteLevel", "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": " "}, "behavior": "Isolated", "invert": False}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [whole, split]}
    raw = json.dumps(data)
    right = library.Tokenizer.from_str(raw).encode("the of and", add_special_tokens=False).ids
    assert make_encoder(raw.encode())(["the of and"])[0].tolist() == right
    assert list(Tokenizer.from_json(raw).encode_iterable(["the o", "f and"])) == right


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"lstrip": True},
        {"rstrip": True},
        {"single_word": True},
        {"normalized": True},
        {"pre_tokenizer": METASPACE},
        {"normalizer": {"type": "Prepend", "prepend": "a"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
    ],
)
def test_parts_of_a_text_have_the_ids_of_the_whole(change: dict[str, Any]) -> None:
    library = pytest.importorskip("tokenizers", reason="needs the extra text")
    data = json.loads(TOKENIZER.read_text())
    flags = {key: change[key] for key in change if key not in data}
    data |= {key: change[key] for key in change if key in data}
    data["added_tokens"] = [{**token, **flags} for token in data["added_tokens"]]
    data["model"]["unk_token"], name = "a", data["added_tokens"][0]["content"]
    raw = json.dumps(data)
    reference, tokenizer = library.Tokenizer.from_str(raw), Tokenizer.from_json(raw)
    text = f" the cat  {name} and {name}{name} a\n{name}x{name}  the end  "
    ids = reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == ids
    for step in (1, 5, 30):
        parts = [text[start : start + step] for start in range(0, len(text), step)]
        assert list(tokenizer.encode_iterable(parts)) == ids


def test_the_tokenizer_beside_a_wrong_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokmillError, match="no such tokenizer") as error:
        Tokenizer.from_file(tmp_path / "tokenizer")
    assert str(tmp_path / "tokenizer.json") in error.value.hint


def test_a_character_that_is_padding_too_stays_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "!"}))
    read = Tokenizer.from_file(tmp_path)
    for specials in ("plain", "special"):
        assert read.encode("hello!", specials) == tokenizer.encode("hello!", specials)


def test_a_token_that_is_named_is_special(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = json.loads(tokenizer.to_json())
    number = len(data["model"]["vocab"]) + len(data["added_tokens"])
    data["added_tokens"].append(tokenizer_json.added_token(number, "<tool>", special=False))
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<tool>"}))
    read = Tokenizer.from_file(tmp_path)
    read.save(tmp_path / "again")
    again = json.loads((tmp_path / "again/tokenizer.json").read_text())
    assert [one["special"] for one in again["added_tokens"] if one["content"] == "<tool>"] == [True]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_an_end_of_documents_that_a_tokenizer_lacks_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_json())
    (tmp_path / name).write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(TokmillError, match="eos_token '</s>', which it lacks") as caught:
        Tokenizer.from_file(tmp_path)
    assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"pad_token": "[PAD]"}},
        {"special_tokens_map.json": {"additional_special_tokens": ["<|pad|>", "<s>"]}},
        {"added_tokens.json": {"<s>": 800, "<|pad|>": 5}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"800": {"content": "<s>"}}}},
    ],
)
def test_other_tokens_that_a_tokenizer_lacks_are_text(
    tokenizer: Tokenizer, tmp_path: Path, files: dict[str, Any]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_json())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = Tokenizer.from_file(tmp_path)
    assert found.specials == tokenizer.specials
    for text in ("<s>a[PAD]", "a<|pad|>"):
        assert found.encode(text) == tokenizer.encode(text)


def test_files_beside_a_tokenizer_of_another_name_add_no_tokens(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """They are those of a tokenizer.json in the same folder."""
    (tmp_path / "mine.json").write_bytes(tokenizer.to_json())
    config = {"eos_token": "</s>", "additional_special_tokens": ["a"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = Tokenizer.from_file(tmp_path / "mine.json")
    assert found.named == {} and found.specials == tokenizer.specials
    assert found.encode("a b") == tokenizer.encode("a b")
