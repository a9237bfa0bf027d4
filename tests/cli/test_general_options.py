"""What the command itself offers: version, completion, help where a key is taken for an option."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokmill.store.store import Store


def test_version_stands_in_the_help(tokmill: Callable[..., Any]) -> None:
    assert "--version" in tokmill("--help").stdout
    assert tokmill("--version").stdout.startswith("tokmill ")


@pytest.mark.parametrize("words, wanted", [("tokmill tr", "train"), ("tokmill build js", "jsonl")])
def test_completion(words: str, wanted: str) -> None:
    asked = {
        "_TOKMILL_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from tokmill.cli import entry; entry()"],
        env={**os.environ, **asked}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert wanted in done.stdout.split(), done.stderr


def test_an_option_of_one_value_that_is_given_twice(
    here: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one two")
    twice = ("--vocab-size", 300, "--vocab-size=258", "--special", "<a>", "--special", "<|end|>")
    out, err = here("tokenizer", "train", "a.txt", *twice, "-o", "t", "--json", "--json")
    assert json.loads(out)["size"] == 258
    assert [line for line in err.splitlines() if line.startswith("note: ")] == [
        "note: --vocab-size is given 2 times, and its last value counts"
    ]


@pytest.mark.parametrize(
    "option, key",
    [("--lr", "optim.lr"), ("--batch-size", "data.batch"), ("--learning_rate", "optim.lr")],
)
@pytest.mark.parametrize("command", ["train", "rl train"])
def test_a_key_that_is_taken_for_an_option(
    here: Callable[..., tuple[str, str]], command: str, option: str, key: str
) -> None:
    _, err = here(*command.split(), "store", option, "1", code=2)
    assert f"hint: it is a key of the recipe: --set {key}=VALUE" in err


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["validate", "s"], "did you mean `tokmill store validate`?"),
        (["export", "s"], "`tokmill store export` or `tokmill model export`"),
        (["store", "export", "here.txt"], "known: bin, corpus, "),
        (["trian", "s"], "did you mean 'train'?"),
        (["generate", "run"], "here it is `tokmill sample`"),
        (["tune", "model.onnx"], "did you mean `tokmill rl tune`?"),
    ],
)
def test_an_unknown_command_names_the_one_that_was_meant(
    here: Any, tmp_path: Path, typed: list[str], hint: str
) -> None:
    (tmp_path / "here.txt").write_text("text")
    _, err = here(*typed, code=2)
    assert "has no command" in err and hint in err


def test_a_path_that_is_not_there_is_no_unknown_command(here: Any, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("gone")
    for path in ("gone/corpus", "corpus.txt", "dangling"):
        for words in ([path], ["build", path, "-o", "store"]):
            assert f"{path}: there is no such file or folder" in here(*words, code=1)[1]


def test_a_path_in_place_of_a_kind(here: Any, tmp_path: Path) -> None:
    """`inspect` knows what it is, and the build says what it takes it for."""
    for name, text, kind in (
        ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n', "jsonl"),
        ("a.txt", "one text of some words\n", "text"),
    ):
        (tmp_path / name).write_text(text)
        out, _ = here(str(tmp_path / name))
        assert out.splitlines()[0].split() == ["kind", kind]
        words = ["--vocab-size", "300", "-q", "-o", str(tmp_path / kind)]
        _, err = here("build", str(tmp_path / name), *words)
        assert f"`tokmill build {kind}`" in err
        assert Store(tmp_path / kind).manifest.source == kind
    (tmp_path / "a.csv").write_text("name,text\nx,some words\n")
    _, err = here("build", str(tmp_path / "a.csv"), "-o", str(tmp_path / "no"), code=2)
    subprocess.run(err.partition("with it: ")[2], shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "TABLE.tsv").read_text() == "name\ttext\nx\tsome words\n"
    (tmp_path / "empty").mkdir()
    _, err = here("build", str(tmp_path / "empty"), "-o", str(tmp_path / "no"), code=2)
    assert "no kind of build is known for it: an empty folder" in err


@pytest.mark.parametrize(
    ("command", "typed", "hint"),
    [
        ("build text", "--train_file", "here it is --train FILE"),
        ("build text", "--val_file", "here it is --val FILE"),
        ("build text", "--output_dir", "here it is -o PATH"),
        ("build text", "--tokenizer_path", "here it is --tokenizer PATH"),
        ("build text", "--vocab_size", "here it is --vocab-size"),
        ("build jsonl", "--input", "it needs no option: tokmill build jsonl INPUTS"),
        ("build jsonl", "--output", "here it is -o PATH"),
        ("build jsonl", "--max-minutes", "here it is --max-time 10m"),
        ("build jsonl", "--batch-size", "here it is --preset memory|balanced|speed"),
        ("build jsonl", "--max-length", "`tokmill store export npz STORE --max-length 1024"),
        ("build jsonl", "--stride", "`tokmill store export npz STORE --max-length 1024 --stride"),
        ("build x86", "--max-length", "here it is --max-tokens N"),
        ("build select", "--sample-ratio", "here it is --ratio 0.2"),
        ("build token-dicts", "--sample-ratio", "`tokmill build select STORE"),
        ("build jsonl", "--save-frequency", "`tokmill store export npz STORE --max-length 1024"),
        ("build token-dicts", "--merge-type", "`tokmill store export token-dicts STORE --key"),
        ("build bbv", "--semi-hard", "`tokmill build mine STORE --what bbv --negatives semi-hard"),
        ("build bbv", "--margin", "`tokmill build mine STORE --what bbv --negatives semi-hard"),
        ("build mine", "--semi-hard", "here it is --negatives semi-hard"),
        ("store export token-dicts", "--merge-type", "here it is --key function,level"),
        ("store export token-dicts", "--sample-ratio", "`tokmill build select STORE"),
        ("store export npz", "--save_frequency", "here it is --windows-per-file N"),
        ("tokenizer train", "--special-tokens", "here it is --special TOKEN"),
        ("train", "--use_params", "here it is --config FILE"),
        ("train", "--train_cfg", "here it is --config FILE"),
        ("train", "--deepspeed", "here it is --engine deepspeed"),
        ("train", "--save_dir", "here it is -o PATH"),
        ("tokenizer train", "--output-dir", "here it is -o PATH"),
        ("vocab build x86", "--binary-dir", "it needs no option: tokmill vocab build x86 "),
    ],
)
def test_an_option_of_another_command_or_script(
    here: Callable[..., tuple[str, str]], command: str, typed: str, hint: str
) -> None:
    _, said = here(*command.split(), "x", typed, "1", code=2)
    assert said.startswith(f"error: there is no option {typed}\nhint: {hint}"), said
