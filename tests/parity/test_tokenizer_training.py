"""Training gives the merges and ids of Hugging Face's `train_from_iterator`, with every engine."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tokenizers_peer import merges_and_ids
from tokmill.text.learning.train_tokenizer import train_tokenizer
from tokmill.text.tokenizers.patterns import PATTERNS

pytest.importorskip("gigatoken", reason="needs the extra text")

NEWER = "\u088f\u088fa b\U000323b0\U000323b0 "


def trained(texts: Any, size: int, specials: list[str], **options: str) -> tuple[Any, Any]:
    model = train_tokenizer(texts, size, specials, **options).data["model"]
    return model["merges"], model["vocab"]


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers", "python"])
@pytest.mark.parametrize(("size", "specials"), [(600, []), (2000, ["<|endoftext|>", "<|pad|>"])])
def test_gpt2_pattern(corpus: Any, engine: str, size: int, specials: list[str]) -> None:
    texts = corpus.texts[:80]
    assert trained(texts, size, specials, engine=engine) == merges_and_ids(texts, size, specials)


@pytest.mark.parametrize("engine", ["tokenizers", "python"])
@pytest.mark.parametrize("pattern", ["cl100k", "o200k", r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"])
def test_other_patterns(corpus: Any, engine: str, pattern: str) -> None:
    texts = corpus.texts[:40]
    expected = merges_and_ids(texts, 800, ["<a>"], PATTERNS.get(pattern, pattern))
    assert trained(texts, 800, ["<a>"], engine=engine, pattern=pattern) == expected


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers", "python"])
def test_more_ids_than_words(engine: str) -> None:
    # gigatoken alone goes on with pairs that do not occur.
    texts = ["abc abc abc", "abd xyz"]
    assert trained(texts, 5000, [], engine=engine) == merges_and_ids(texts, 5000, [])


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers", "python"])
def test_letters_newer_than_unicode_16(corpus: Any, engine: str) -> None:
    texts = [*corpus.texts[:3], NEWER * 50]
    assert trained(texts, 500, [], engine=engine) == merges_and_ids(texts, 500, [])


def test_many_small_texts_with_ties() -> None:
    choose = random.Random(0)
    for _ in range(300):
        texts = ["".join(choose.choices("aab bc \u00e9", k=choose.randrange(40))) for _ in range(4)]
        size = choose.randrange(256, 300)
        if any(texts):
            assert trained(texts, size, [], engine="python") == merges_and_ids(texts, size, [])


def test_transformers_loads_the_folder(tmp_path: Path, corpus: Any) -> None:
    import subprocess
    import sys

    pytest.importorskip("transformers", reason="needs transformers")
    tokenizer = train_tokenizer(corpus.texts[:40], 500, ["<|endoftext|>", "<|pad|>"])
    tokenizer.save(tmp_path)
    text = "def f(x): <|endoftext|> caf\u00e9"
    # In a child process: its warnings are not ours.
    code = (
        "import sys, json\n"
        "from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = t(sys.argv[2])['input_ids']\n"
        "print(json.dumps([ids, t.eos_token_id, t.pad_token_id, t.decode(ids), len(t)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), text],
        capture_output=True,
        text=True,
        check=True,
    )
    ids = tokenizer.encode(text)
    assert json.loads(done.stdout.splitlines()[-1]) == [ids, 0, 1, text, 500]
