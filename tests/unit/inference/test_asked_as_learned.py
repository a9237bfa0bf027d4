"""A model is asked with the special tokens with which it has learned, and nothing is guessed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import tokmill
import toy
from making import quick_build
from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch
from tokmill.inference.coders import load_coder, prompt_ids
from tokmill.store.store import Store
from tokmill.tasks.next_token import nothing_to_learn
from tokmill.training.evaluate import evaluate
from tokmill.training.runs.exchange import export_model
from tokmill.training.runs.run import read_run

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of lines with the template `<s> text`, without it, and without an end of records."""
    root = tmp_path_factory.mktemp("asked")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    one: Any = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    one.decoder = decoders.ByteLevel()
    one.add_special_tokens(["<s>", "</s>"])
    one.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", one.token_to_id("<s>"))]
    )
    (root / "tok").mkdir()
    one.save(str(root / "tok/tokenizer.json"))
    beside = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (root / "tok/tokenizer_config.json").write_text(json.dumps({**beside, "eos_token": "</s>"}))
    random = np.random.default_rng(0)
    lines = ["Q" + "".join(random.choice([*"abcdefgh"], 7)) for _ in range(60)]
    (root / "d.txt").write_text("\n".join(lines))
    for name, more in (
        ("add", {"template": "add"}),
        ("none", {"template": "none"}),
        ("open", {"template": "none", "end_of_record": "none"}),
    ):
        quick_build(
            "text", root / "d.txt", root / name, tokenizer=str(root / "tok"), record="line", **more
        )
        value = toy.recipe(root / name, 2, data={"batch": 4}, task={"length": 32})
        tokmill.train(value, root / f"run-{name}", quiet=True)
    return root


def ids_of(run: Path, prompt: str) -> list[int]:
    facts = read_run(run)[1]
    vocabularies, coder = load_coder(run, facts, ["token"])
    return prompt_ids(prompt, coder, vocabularies, {"token": 258}, facts, "")["token"]


def test_a_prompt_begins_as_the_records_that_were_learned(stores: Path) -> None:
    from transformers import AutoTokenizer

    export_model(stores / "run-add", stores / "out")
    peer: Any = AutoTokenizer.from_pretrained(stores / "out")
    for text in ("Q", "Qab", "x"):
        assert ids_of(stores / "run-add", text) == peer(text)["input_ids"]
        assert (
            ids_of(stores / "run-none", text) == peer(text, add_special_tokens=False)["input_ids"]
        )
    assert ids_of(stores / "run-add", "") == [peer.bos_token_id]
    # Records without `<s>` begin after the end of another one; where there is none, nobody knows.
    assert ids_of(stores / "run-none", "") == [peer.eos_token_id]
    with pytest.raises(UsageError, match="has not learned how a text begins"):
        ids_of(stores / "run-open", "")


@pytest.mark.parametrize("name", ["none", "open"])
def test_an_exported_tokenizer_puts_nothing_before_a_text_that_was_not_learned(
    stores: Path, tmp_path: Path, name: str
) -> None:
    from transformers import AutoTokenizer

    export_model(stores / f"run-{name}", tmp_path / "out")
    peer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("Q", "Qab", "x"):
        assert peer(text)["input_ids"] == ids_of(stores / f"run-{name}", text)


def test_the_template_of_a_run_that_does_not_say_what_it_has_learned_is_exported(
    stores: Path, tmp_path: Path
) -> None:
    """Facts of old runs have no `prefix`."""
    from transformers import AutoTokenizer

    shutil.copytree(stores / "run-add", tmp_path / "old")
    facts = json.loads((tmp_path / "old/schema.json").read_bytes())
    del facts["prefix"]
    (tmp_path / "old/schema.json").write_text(json.dumps(facts))
    export_model(tmp_path / "old", tmp_path / "out")
    peer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert peer("Qab")["input_ids"] == ids_of(stores / "run-add", "Qab")


def test_a_store_of_another_form_is_told(stores: Path) -> None:
    notes = evaluate(stores / "run-add", stores / "none", device="cpu", quiet=True)["notes"]
    assert any("the records of the store begin with the special tokens none" in n for n in notes)
    notes = evaluate(stores / "run-none", stores / "add", device="cpu", quiet=True)["notes"]
    assert any("has learned with none" in note for note in notes)
    assert evaluate(stores / "run-add", stores / "add", device="cpu", quiet=True)["notes"] == []


def test_the_first_token_of_a_record_is_learned_after_the_end_of_another() -> None:
    """By the definition, token by token."""
    random = np.random.default_rng(4)
    ids, end = random.integers(1, 6, (50, 12)), 5
    document = np.sort(random.integers(0, 4, ids.shape), axis=1)
    document = np.where(np.arange(12) < random.integers(1, 13, (50, 1)), document, -1)
    batch = Batch({"token": ids}, document.astype(np.int32), np.zeros(50, np.uint64))
    batch.shared = np.zeros(50, np.int64)
    for ends in ({"token": end}, {}):
        skipped = nothing_to_learn(batch, ends)
        for row in range(50):
            for place in range(11):
                here, ahead = document[row, place : place + 2]
                learned = ahead >= 0 and (here == ahead or (ids[row, place] == end and bool(ends)))
                assert skipped[row, place] == (not learned)


def test_bits_per_byte_are_of_all_bytes(stores: Path) -> None:
    """The loss of every token but the first one of all, over the bytes of the text."""
    found = evaluate(stores / "run-none", stores / "none", device="cpu", quiet=True)
    store = Store(stores / "none")
    assert found["targets"] == store.tokens - 1
    size = int(store.column("bytes").sum())
    assert size == sum(map(len, (stores / "d.txt").read_text().splitlines()))
    bits = found["loss"] / np.log(2) * store.tokens / size
    assert found["bits_per_byte"] == pytest.approx(bits)
    # Without an end of records nothing predicts their first tokens, so their bytes do not count.
    assert "bits_per_byte" not in evaluate(
        stores / "run-open", stores / "open", device="cpu", quiet=True
    )


@pytest.mark.parametrize(
    ("step", "split", "loses"),
    [
        (None, pre_tokenizers.Split(" ", "isolated"), False),
        (normalizers.NFC(), pre_tokenizers.Split(" ", "isolated"), False),
        (normalizers.Lowercase(), pre_tokenizers.Split(" ", "isolated"), True),
        (normalizers.Replace(" ", "\u2581"), pre_tokenizers.Split("\u2581", "isolated"), False),
        (normalizers.Replace("b", "a"), pre_tokenizers.Split(" ", "isolated"), True),
        (None, pre_tokenizers.Split(" ", "removed"), True),
        (None, pre_tokenizers.WhitespaceSplit(), True),
    ],
)
def test_bits_per_byte_are_not_of_text_that_a_tokenizer_loses(
    tmp_path: Path, step: Any, split: Any, loses: bool
) -> None:
    """Words that it lacks, also where no row that is evaluated has one, capitals and blanks."""
    words = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, " ": 4, "\u2581": 5}
    one: Any = Tokenizer(models.WordLevel(words, "<unk>"))
    one.normalizer, one.pre_tokenizer = step, split
    one.add_special_tokens(["<unk>", "</s>"])
    (tmp_path / "tok").mkdir()
    one.save(str(tmp_path / "tok/tokenizer.json"))
    beside = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (tmp_path / "tok/tokenizer_config.json").write_text(json.dumps({**beside, "eos_token": "</s>"}))
    lines = ["a b a b b a"] * 20
    for name, last in (("known", "a b"), ("unknown", "a strange b")):
        (tmp_path / "d.txt").write_text("\n".join([*lines, last]))
        quick_build(
            "text", tmp_path / "d.txt", tmp_path / name, tokenizer=str(tmp_path / "tok"),
            record="line",
        )  # fmt: skip
    value = toy.recipe(tmp_path / "known", 2, data={"batch": 4}, task={"length": 16})
    tokmill.train(value, tmp_path / "run", quiet=True)
    for rows in (0, 2):
        for name in ("known", "unknown"):
            found = evaluate(tmp_path / "run", tmp_path / name, rows=rows, device="cpu", quiet=True)
            keeps = name == "known" and not loses
            assert ("bits_per_byte" in found) == keeps
            assert any("no bits_per_byte" in note for note in found["notes"]) != keeps
