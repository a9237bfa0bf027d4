"""Tokens that the files beside a tokenizer.json name are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tokmill.text.learning.train_tokenizer import train_tokenizer
from tokmill.text.tokenizers import tokenizer_json
from tokmill.text.tokenizers.tokenizer import Tokenizer

SIZE = 400


@pytest.fixture(scope="module")
def tokenizer(corpus: Any) -> Tokenizer:
    return train_tokenizer(corpus.texts[:60], SIZE, ["<|endoftext|>", "<|pad|>"])


def _with_tokens(data: dict[str, Any], *, added: bool) -> dict[str, Any]:
    """Return a tokenizer with the tokens <s> and </s>: in the vocabulary, or added too."""
    data = json.loads(json.dumps(data))
    for number, token in enumerate(("<s>", "</s>"), SIZE):
        data["model"]["vocab"][token] = number
        if added:
            data["added_tokens"].append(tokenizer_json.added_token(number, token))
    return data


_S = {"content": "<s>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False}
_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def _both(folder: Path, content: dict[str, Any], files: dict[str, Any]) -> tuple[Any, Tokenizer]:
    """Write a tokenizer and the files beside it; return it as transformers reads it, and as we."""
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for name, value in files.items():
        value = value | (_CLASS if name == "tokenizer_config.json" else {})
        (folder / name).write_text(json.dumps(value))
    return AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(folder)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}},
        {"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "</s>"}},
        {"tokenizer_config.json": {"additional_special_tokens": ["<s>"], "eos_token": "</s>"}},
        {
            "tokenizer_config.json": {
                "extra_special_tokens": {"image_token": "<s>"},
                "eos_token": "</s>",
            }
        },
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {str(SIZE): {**_S, "special": True}},
                "eos_token": "</s>",
            }
        },
        {
            "tokenizer_config.json": {"eos_token": "<s>"},
            "special_tokens_map.json": {"eos_token": "</s>"},
        },
        {
            "tokenizer_config.json": {
                "eos_token": "<s>",
                "added_tokens_decoder": {str(SIZE): {**_S, "special": True}},
            },
            "special_tokens_map.json": {"eos_token": "</s>"},
        },
        {"tokenizer_config.json": {"eos_token": "</s>"}, "added_tokens.json": {"<s>": SIZE}},
        # Tokens that the tokenizer lacks, and other ids.
        {"tokenizer_config.json": {"eos_token": "</s>", "pad_token": "[PAD]"}},
        {"tokenizer_config.json": {"eos_token": "</s>", "extra_special_tokens": ["[PAD]", "<s>"]}},
        {
            "tokenizer_config.json": {
                "eos_token": "</s>",
                "added_tokens_decoder": {
                    "7": {**_S, "special": True},
                    "900": {**_S, "content": "[PAD]", "special": True},
                },
            }
        },
        {
            "tokenizer_config.json": {"eos_token": "</s>"},
            "added_tokens.json": {"[PAD]": 900, "<|pad|>": 5, "<s>": 7},
        },
        # A map beside a list of added tokens, which may be empty.
        {
            "tokenizer_config.json": {
                "eos_token": "</s>",
                "added_tokens_decoder": {str(SIZE): {**_S, "special": True}},
            },
            "special_tokens_map.json": {"pad_token": "[PAD]"},
        },
        {
            "tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {}},
            "special_tokens_map.json": {"sep_token": "the", "eos_token": "<s>"},
            "added_tokens.json": {"of": 300},
        },
        # Flags of a token that is named.
        {
            "tokenizer_config.json": {
                "eos_token": "</s>",
                "mask_token": {**_S, "__type": "AddedToken"},
            }
        },
        {
            "tokenizer_config.json": {"eos_token": "</s>"},
            "special_tokens_map.json": {"mask_token": _S},
        },
    ],
)
def test_tokens_that_files_beside_a_tokenizer_name(
    tokenizer: Tokenizer, tmp_path: Path, files: dict[str, Any], added: bool
) -> None:
    """They are found in texts, and have their roles, as in transformers."""
    content = _with_tokens(tokenizer.data, added=added)
    wanted, found = _both(tmp_path, content, files)
    for text in ("a <s> b</s> c <|pad|>", "is the one of the"):
        assert found.encode(text) == wanted(text)["input_ids"]
    roles = found.vocabulary()[0].roles
    assert roles["eot"] == wanted.eos_token_id
    assert roles.get("sep") == wanted.sep_token_id and roles.get("mask") == wanted.mask_token_id


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": {"content": "</s>", "__type": "AddedToken"}}},
        {
            "tokenizer_config.json": {
                "eos_token": {"content": "</s>", "normalized": True, "__type": "AddedToken"}
            }
        },
        {
            "tokenizer_config.json": {"bos_token": "<s>"},
            "special_tokens_map.json": {"eos_token": {"content": "</s>", "normalized": True}},
        },
        # Two keys name one token.
        {
            "tokenizer_config.json": {
                "eos_token": {"content": "</s>", "normalized": True, "__type": "AddedToken"},
                "pad_token": "</s>",
            }
        },
        {
            "tokenizer_config.json": {"eos_token": "</s>"},
            "added_tokens.json": {"<s>": 11, "</s>": 12},
        },
    ],
)
def test_tokens_that_stand_in_normalized_text(tmp_path: Path, files: dict[str, Any]) -> None:
    """A normalizer like that of Llama puts a sign before a text, and in place of spaces."""
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    pieces = ["<unk>", *"\u2581abcs<>/ ", "!", "<s>", "</s>"]
    content = tokenizer_json.content(
        [],
        normalizer={"type": "Sequence", "normalizers": steps},
        model={
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": {piece: number for number, piece in enumerate(pieces)},
            "merges": [],
        },
    )
    wanted, found = _both(tmp_path, content, files)
    for text in ("a b</s>", "</s>a<s>", "a </s> <s>b"):
        assert found.encode(text) == wanted(text)["input_ids"]
