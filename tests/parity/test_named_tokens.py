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
    ],
)
def test_tokens_that_files_beside_a_tokenizer_name(
    tokenizer: Tokenizer, tmp_path: Path, files: dict[str, Any], added: bool
) -> None:
    """They are found in texts, and have their roles, as in transformers."""
    content = _with_tokens(tokenizer.data, added=added)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for name, value in files.items():
        value = value | (_CLASS if name == "tokenizer_config.json" else {})
        (tmp_path / name).write_text(json.dumps(value))
    wanted = AutoTokenizer.from_pretrained(tmp_path)
    found = Tokenizer.from_file(tmp_path)
    text = "a <s> b</s> c <|pad|>"
    assert found.encode(text) == wanted(text)["input_ids"]
    assert found.vocabulary()[0].roles["eot"] == wanted.eos_token_id
