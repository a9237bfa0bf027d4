"""`tokmill sample --chat`: a model that learned chats is asked as it was taught."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import UNSET

import tokmill
from making import jsonl
from tokmill.base.errors import UsageError
from tokmill.plugins import CHATS, load
from tokmill.store.manifest import read_plan
from tokmill.store.store import Store
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.training.runs.input_format import options_of
from toy import text_store

RECIPE = {
    "model": {"dim": 64, "layers": 2, "heads": 2},
    "task": {"rows": "packed", "length": 64},
    "optim": {"lr": 0.01, "warmup": 5},
    "run": {"steps": 150, "device": "cpu"},
}


def chat(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"say {number}"},
        {"role": "assistant", "content": f"it is {number}"},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of chats, a run on it, and a run on plain text."""
    from tokmill.text.learning.train_tokenizer import train_tokenizer

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("chats")
    jsonl(folder / "chats.jsonl", [{"messages": chat(i % 10)} for i in range(400)])
    texts = [turn["content"] for i in range(10) for turn in chat(i)]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = train_tokenizer(texts, 290, specials).save(folder / "tokenizer")
    tokmill.build(
        "chat", folder / "chats.jsonl", folder / "store", tokenizer=tokenizer,
        chat_template="chatml",
    )  # fmt: skip
    tokmill.train(RECIPE | {"data": {"train": str(folder / "store"), "batch": 16}},
                  folder / "run", quiet=True)  # fmt: skip
    plain = text_store(folder / "text", ["one two three four"] * 20)
    few = RECIPE | {"run": {"steps": 2, "device": "cpu"}}
    tokmill.train(few | {"data": {"train": str(plain), "batch": 4}}, folder / "plain", quiet=True)
    return folder


def test_a_message_is_answered_up_to_the_end_of_the_turn(folder: Path, here: Any) -> None:
    sample = ("sample", folder / "run", "--temperature", "0", "--device", "cpu")
    out, _ = here(*sample, "--chat", "say 7")
    assert re.fullmatch(r"it is \d\n", out)
    line = json.loads(here(*sample, "--chat", "say 7", "--json")[0])
    assert (line["continuation"], line["end"]) == (out.strip(), "eot")
    assert line["prompt"] == [{"role": "user", "content": "say 7"}]


def test_messages_come_from_a_file(folder: Path, tmp_path: Path, here: Any) -> None:
    sample = ("sample", folder / "run", "--temperature", "0", "--device", "cpu", "--messages")
    turns = [*chat(1), {"role": "user", "content": "say 4"}]
    for value in (turns, {"messages": turns}):
        (tmp_path / "m.json").write_text(json.dumps(value))
        assert re.fullmatch(r"it is \d\n", here(*sample, "m.json")[0])


@pytest.mark.parametrize(
    ("content", "code"), [('[{"role": "king"}]', 2), ('[{"', 2), ("{}", 2), ("[]", 2), (None, 5)]
)
def test_messages_that_are_none(
    folder: Path, tmp_path: Path, here: Any, content: str | None, code: int
) -> None:
    if content is not None:
        (tmp_path / "m.json").write_text(content)
    _, err = here("sample", folder / "run", "--messages", "m.json", code=code)
    assert "m.json" in err and "hint: " in err


def test_the_ids_are_those_of_the_store_before_the_answer(folder: Path) -> None:
    store = Store(folder / "store")
    vocabulary = store.vocabularies["token"]
    data = (folder / "store/vocab" / vocabulary.file).read_bytes()
    kept = options_of(folder / "run")
    writer = load(CHATS, "chat")(data, vocabulary, [kept], "", "run")
    ids, learned = (store.record(7)[name].tolist() for name in ("token", "loss"))
    assert writer.ids(chat(7)[:1]) == ids[: learned.index(1)]
    end = Tokenizer.from_json(data).specials["<|im_end|>"]
    assert writer.ends() == [end]
    # A message forges no turn.
    with pytest.raises(UsageError, match="special token"):
        writer.ids([{"role": "user", "content": "<|im_end|>"}])


def test_a_selection_keeps_the_template_of_its_chats(folder: Path, tmp_path: Path) -> None:
    half = tokmill.build("select", folder / "store", tmp_path / "half", ratio=0.5, seed=1)
    # A selection of selections too, if all have one template.
    again = tokmill.build("select", [half.path, folder / "store"], tmp_path / "again")
    few = RECIPE | {"data": {"train": str(again.path), "batch": 4}}
    tokmill.train(few | {"run": {"steps": 1, "device": "cpu"}}, tmp_path / "run", quiet=True)
    kept = options_of(tmp_path / "run")
    assert kept and kept.items() <= options_of(folder / "run").items()
    vocabulary = again.vocabularies["token"]
    data = again.vocabulary_file("token").read_bytes()
    writers = [
        load(CHATS, "chat")(data, vocabulary, [options], "", "run")
        for options in (kept, options_of(folder / "run"))
    ]
    assert writers[0].ids(chat(7)[:1]) == writers[1].ids(chat(7)[:1])


def test_a_selection_of_chats_with_two_templates_has_none(folder: Path, tmp_path: Path) -> None:
    other = tokmill.build(
        "chat", folder / "chats.jsonl", tmp_path / "plain", chat_template="plain",
        tokenizer=folder / "tokenizer/tokenizer.json",
    )  # fmt: skip
    both = tokmill.build("select", [folder / "store", other.path], tmp_path / "both")
    assert read_plan(both.path).chats is UNSET
    one = tokmill.build("select", [other.path], tmp_path / "one")
    assert read_plan(one.path).chats != UNSET


def test_runs_without_a_template_say_so(folder: Path, here: Any) -> None:
    _, err = here("sample", folder / "plain", "--chat", "hi", code=1)
    assert "--chat-template" in err
    here("sample", folder / "plain", "--chat", "hi", "--chat-template", "plain", "--tokens", "2")
    _, err = here("sample", folder / "plain", "--chat", "hi", "--chat-template", "nope", code=2)
    assert "chatml" in err
    _, err = here("sample", folder / "plain", "--chat-template", "plain", code=2)
    assert "--messages" in err
    _, err = here("sample", folder / "plain", "--chat", "hi", "--prompt", "a", code=2)
    assert "exclude each other" in err


def test_an_end_that_comes_at_once_is_said(folder: Path, here: Any) -> None:
    sample = ("sample", folder / "run", "--temperature", "0", "--device", "cpu", "--ids")
    # Behind a whole chat nothing follows.
    chat_of = ",".join(map(str, Store(folder / "store").record(2)["token"].tolist()))
    ended = (*sample, chat_of, "--chat-template", "chatml")
    assert "--chat-template needs" in here(*ended, code=2)[1]
    out, err = here(*sample, "1", "--tokens", "0")
    assert out == "1\n" and "empty" not in err


def test_a_text_that_ends_at_once_is_no_blank_line(
    folder: Path, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokmill.inference import sample

    made = sample.Continuation(
        number=0, sample=0, text="", ids={"token": []}, end="eot", out_of_sight=0
    )
    monkeypatch.setattr(sample, "generate", lambda *_, **__: iter([made]))
    out, err = here("sample", folder / "plain")
    assert out == "" and "1 of 1 continuation came out empty" in err
    assert here("sample", folder / "plain", "--prompt", "one")[0] == "one\n"
    assert json.loads(here("sample", folder / "plain", "--json")[0])["continuation"] == ""
