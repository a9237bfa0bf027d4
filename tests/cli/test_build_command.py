"""`tokmill build` as a person types it, in child processes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import TOKENIZER, ids_of, jsonl
from tokmill.store.store import Store


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"id": i, "title": f"title {i}", "text": f"the text number {i}"} for i in range(30)]
    jsonl(folder / "a.jsonl", [*rows, "{"])
    (folder / "a.txt").write_text("<|endoftext|>".join(row["text"] for row in rows))
    return folder


def test_jsonl_with_options_and_json_report(tmp_path: Path, tokmill: Any, inputs: Path) -> None:
    done = tokmill(
        *("build", "jsonl", inputs / "a.jsonl", "-o", "s", "--tokenizer", TOKENIZER, "--json"),
        *("--field", "text", "--keep", "id", "--strip", "--workers", "2", "-q"),
        *("--end-of-record", "none"),
    )
    facts = json.loads(done.stdout)
    assert (facts["records"], facts["complete"], facts["rejected"]) == (30, True, {"json": 1})
    assert "white space around each field is removed" in done.stderr
    plan = json.loads((tmp_path / "s/plan.json").read_text())
    assert plan["options"]["fields"] == ["text"]
    assert plan["options"]["strip"] is True
    assert Store(tmp_path / "s").record(7)["id"] == "7"


def test_kept_fields_that_no_record_has_are_told(inputs: Path, here: Any, tmp_path: Path) -> None:
    command = ("build", "jsonl", inputs / "a.jsonl", "--tokenizer", TOKENIZER)
    err = here(*command, "--keep", "id,title", "--keep", "id", "-o", tmp_path / "slip")[1]
    assert "warning: no record has a value of id_title\n" in err
    assert (
        "warning" not in here(*command, "--keep", "id", "--keep", "title", "-o", tmp_path / "s")[1]
    )


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--join", "x", "--set", "join=y"], "options.join"),
        (["--set", "join=x", "--set", "options.join=y"], "options.join"),
        (["--set", "options=3", "--set", "join=y"], "options"),
        (["--tokenizer", "t", "--set", "tokenizer=u"], "tokenizer"),
        (["-o", "t", "--set", "out=u"], "out"),
        (["--role", "pad=t", "--role", "pad=u"], "roles.pad"),
        (["--role", "pad=t", "--set", "roles.pad=u"], "roles.pad"),
        (["--set", "source=text"], "source"),
        (["--set", "inputs=[]"], "inputs"),
    ],
)
def test_one_key_with_two_values_is_refused(
    inputs: Path, here: Any, words: list[str], key: str
) -> None:
    err = here("build", "jsonl", inputs / "a.jsonl", *words, "--dry-run", code=2)[1]
    assert f"{key} is given twice: " in err


def test_special_tokens_of_no_new_tokenizer_are_refused(inputs: Path, here: Any) -> None:
    words = ("--tokenizer", TOKENIZER, "--special", "<|pad|>", "-o", "s")
    err = here("build", "jsonl", inputs / "a.jsonl", *words, code=2)[1]
    assert "--tokenizer and --special exclude each other" in err


def test_recipe_files_with_flags_and_set(tmp_path: Path, tokmill: Any, inputs: Path) -> None:
    (tmp_path / "base.toml").write_text(
        f'source = "jsonl"\ninputs = ["{inputs}/a.jsonl"]\ntokenizer = "{TOKENIZER}"\n'
        'out = "from-recipe"\n[options]\nfields = ["title"]\n'
    )
    (tmp_path / "r.toml").write_text('extends = "base.toml"\n[options]\nkeep = ["id"]\n')
    tokmill("build", "r.toml", "--set", "options.join=x", "--set", "strip=true", "--set", "join=x")
    plan = json.loads((tmp_path / "from-recipe/plan.json").read_text())
    options = plan["options"]
    assert (options["fields"], options["keep"]) == (["title"], ["id"])
    assert (options["join"], options["strip"]) == ("x", True)
    tokmill("build", "r.toml", "-o", "other")
    assert Store(tmp_path / "other").manifest.recipe_id != plan["recipe_id"]


def test_train_and_val_with_a_tokenizer_of_their_own(
    tmp_path: Path, tokmill: Any, inputs: Path
) -> None:
    arguments = ("--train", inputs / "a.jsonl", "--val", inputs / "b.jsonl", "-o", "d", "--bin")
    jsonl(inputs / "b.jsonl", [{"text": "validation text"}])
    done = tokmill("build", "jsonl", *arguments, "--vocab-size", "280", "--json")
    facts = json.loads(done.stdout)
    assert (facts["train"]["records"], facts["val"]["records"]) == (30, 1)
    for part in ("train", "val"):
        store = Store(tmp_path / "d" / part)
        ids = np.fromfile(tmp_path / f"d/{part}.bin", "<u2")
        assert ids.tolist() == [i for record in store for i in record["token"].tolist()]
    first, second = (Store(tmp_path / f"d/{part}").vocabularies for part in ("train", "val"))
    assert first == second
    again = tokmill("build", "jsonl", *arguments, "--vocab-size", "280")
    assert "unchanged" in again.stderr
    refused = tokmill("build", "jsonl", *arguments, "--vocab-size", "290", code=1)
    assert "a tokenizer was trained here with 280 ids" in refused.stderr


def test_a_fresh_build_learns_anew_and_keeps_its_tokenizer(tmp_path: Path, here: Any) -> None:
    """Growth after it must not touch the vocabulary of the store."""
    rows = [{"text": f"some words number {i} and more words"} for i in range(9)]
    jsonl(tmp_path / "a.jsonl", rows)
    arguments = ("build", "jsonl", "a.jsonl", "-o", "s", "--vocab-size", "280", "-q")
    here(*arguments)
    assert "trained now" in here(*arguments, "--fresh")[1]
    jsonl(tmp_path / "a.jsonl", [*rows, {"text": "zebra zebra zebra"}])
    assert "unchanged" in here(*arguments, "--yes")[1]
    assert "s: ok, complete, 10 records" in here("store", "validate", "s")[0]


def test_a_dry_run_writes_nothing(tmp_path: Path, tokmill: Any, inputs: Path) -> None:
    arguments = ("build", "jsonl", inputs, "-o", "s", "--tokenizer", TOKENIZER, "--dry-run")
    done = tokmill(*arguments)
    assert "recipe_id" in done.stdout
    assert json.loads(tokmill(*arguments, "--json").stdout)["shards"] == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["jsonl", "a.jsonl", "-o", "s"], "no tokenizer was named"),
        (["jsonl", "a.jsonl", "--tokenizer", TOKENIZER], "no folder for the store"),
        (["jsonl", "-o", "s", "--tokenizer", TOKENIZER], "no input was named"),
        (["jsonl", "a.jsonl", "-o", "s", "--tokneizer", "x"], "--tokneizer"),
        (["jsnol", "a.jsonl", "-o", "s"], "jsnol"),
        (["jsonl", "a.jsonl", "-o", "s", "--set", "stirp=true", "--tokenizer", TOKENIZER], "stirp"),
        (["jsonl", "a.jsonl", "-o", "s", "--part", "3/2"], "is not i/n"),
        (["jsonl", "a.jsonl", "-o", "s", "--part", ""], "is not i/n"),
        (["jsonl", "a.jsonl", "-o", ""], "--out is empty"),
        (["jsonl", "a.jsonl", "-o", "s", "--tokenizer", ""], "--tokenizer is empty"),
        (["jsonl", "a.jsonl", "-o", "s", "--memory", ""], "not a number of bytes"),
        (["jsonl", "a.jsonl", "-o", "s", "--memory", "lots"], "not a number of bytes"),
        (["jsonl", "a.jsonl", "-o", "s", "--max-time", "soon"], "is not a time"),
        (["jsonl", "a.jsonl", "-o", "s", "--preset", "fast"], "preset"),
        (["jsonl", "a.jsonl", "-o", "s", "--workers", "-1"], "workers"),
        (["jsonl", "a.jsonl", "-o", "s", "--train", "a.jsonl"], "go together"),
        (["jsonl", "a.jsonl", "-o", "s", "--bin"], "--bin goes with"),
        (["jsonl", "a.jsonl", "-o", "s", "--field", "a", "--field", "a"], "a field is named twice"),
        (
            [
                "text",
                "a.jsonl",
                "-o",
                "s",
                "--record",
                "line",
                "--separator",
                "x",
                "--tokenizer",
                TOKENIZER,
            ],
            "no other separator",
        ),
        (["nothing.toml"], "no such recipe"),
        (["jsonl", "a.jsonl", "-o", "s", "--template", "x", "--tokenizer", TOKENIZER], "template"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_hint(
    tmp_path: Path, here: Any, arguments: list[Any], what: str
) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    out, err = here("build", *arguments, code=2)
    assert what in err
    assert err.startswith("error: ")
    assert "hint: " in err
    assert "Traceback" not in err
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_recipe_of_a_training_is_no_build(tmp_path: Path, here: Any) -> None:
    (tmp_path / "t.toml").write_text('[data]\ntrain = "s"\n[run]\nsteps = 3\n')
    _, err = here("build", "t.toml", "-o", "s", code=2)
    assert "t.toml: this is a recipe of a training, not of a build" in err
    assert "tokmill train t.toml" in err and "no such key" not in err


def test_refused_inputs_exit_with_1(tmp_path: Path, tokmill: Any) -> None:
    done = tokmill("build", "text", "nothing.txt", "-o", "s", "--tokenizer", TOKENIZER, code=1)
    assert "no such file" in done.stderr
    jsonl(tmp_path / "a.jsonl", ["{"] * 100 + ['{"text": "word"}'] * 900)
    arguments = ("build", "jsonl", "a.jsonl", "-o", "s", "--tokenizer", TOKENIZER)
    done = tokmill(*arguments, code=1)
    assert "100 of 1,000 records were rejected" in done.stderr
    assert "--max-rejects" in done.stderr
    jsonl(tmp_path / "a.jsonl", ["{"] * 1000)
    done = tokmill(*arguments, "--yes", code=1)
    assert "is it the right kind of input?" in done.stderr


def test_wrong_words_name_the_right_ones(here: Any) -> None:
    assert "did you mean 'jsonl'" in here("build", "jsonlines", code=2)[1]
    assert "did you mean 'store'" in here("stores", code=2)[1]
    _, err = here("build", "text", "x.txt", "-o", "s", "--record", "para", code=2)
    assert "one of separator, line" in err
    out, _ = here("build", "jsonl", "--help")
    assert "'[deleted]', '[removed]'" in out


def test_a_store_below_the_input_is_no_input(tmp_path: Path, here: Any) -> None:
    """Its own `inputs.jsonl` and `events.jsonl` would be read by the second build."""
    jsonl(tmp_path / "a.jsonl", [{"text": "word"}])
    arguments = ("build", "jsonl", ".", "-o", "out/s", "--tokenizer", TOKENIZER, "-q", "--json")
    first = json.loads(here(*arguments)[0])
    assert first["records"] == 1
    assert json.loads(here(*arguments)[0]) == first


def test_bin_files_of_ones_own_names(tmp_path: Path, here: Any) -> None:
    for part in ("a", "b"):
        (tmp_path / f"{part}.txt").write_text(f"some words of the text {part}\n" * 40)
    out = tmp_path / "lm"
    command = ["build", "text", "--train", tmp_path / "a.txt", "--val", tmp_path / "b.txt"]
    command += ["-o", out, "--vocab-size", "270", "--quiet", "--workers", "0"]
    names = ["--train-bin", "tiny_train_tokens.bin", "--val-bin", "tiny_val_tokens.bin"]
    _, said = here(*command, *names)
    assert {p.name for p in out.glob("*.bin")} == {names[1], names[3]}
    assert "of uint16, no header" in said
    ids = np.fromfile(out / names[1], "<u2")
    assert np.array_equal(ids, np.concatenate(ids_of(Store(out / "train"))))
    # Only one is named: the other has its usual name.
    here(*command, *names[:2])
    assert (out / "val.bin").exists()
    (out / "mine.bin").write_text("mine")
    for bad in ("mine.bin", "a/b.bin", "../b.bin", "b.txt", "val.bin", ".bin", ""):
        _, said = here(*command, "--bin", "--train-bin", bad, code=0 if bad == "" else 2)
        assert "hint: " in said or bad == ""
    assert (out / "mine.bin").read_text() == "mine"
    assert "exclude each other" in here(*command, "--no-bin", *names, code=2)[1]


def test_the_bin_file_of_a_build_that_was_killed_before_it_is_replaced(
    tmp_path: Path, here: Any
) -> None:
    """The store is of the new text then, its .bin of the old one."""
    for part in ("a", "b"):
        (tmp_path / f"{part}.txt").write_text(f"some words of the text {part}\n" * 40)
    out = tmp_path / "lm"
    command = ["build", "text", "--train", tmp_path / "a.txt", "--val", tmp_path / "b.txt"]
    command += ["-o", out, "--vocab-size", "270", "--quiet", "--workers", "0", "--yes"]
    here(*command, "--bin")
    (tmp_path / "a.txt").write_text("other words of the text a\n" * 50)
    here(*command)
    here(*command, "--bin")
    ids = np.fromfile(out / "train.bin", "<u2")
    assert np.array_equal(ids, np.concatenate(ids_of(Store(out / "train"))))


@pytest.mark.parametrize("name", ["tokenizer.json", "train.bin", "val.bin", "train", "val"])
def test_two_parts_replace_nothing_that_is_not_theirs(name: str, tmp_path: Path, here: Any) -> None:
    """Of a folder that holds something of the same name."""
    for part in ("a", "b"):
        (tmp_path / f"{part}.txt").write_text(f"some words of the text {part}\n" * 40)
    out = tmp_path / "lm"
    out.mkdir()
    mine = out / name if "." in name else out / name / "notes.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    command = ["build", "text", "--train", tmp_path / "a.txt", "--val", tmp_path / "b.txt"]
    command += ["-o", out, "--bin", "--vocab-size", "270", "--quiet", "--workers", "0"]
    for more in ([], ["--fresh"], ["--yes"]):
        _, err = here(*command, *more, code=2)
        assert "hint: " in err and str(mine if "." in name else mine.parent) in err
        assert mine.read_text() == "mine"
        assert [path for path in out.rglob("*") if path.is_file()] == [mine]
    mine.unlink()
    here(*command)
    here(*command)
    (tmp_path / "a.txt").write_text("other words of the text a\n" * 40)
    here(*command, "--yes")
    here(*command, "--fresh")


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("given", ["--tokenizer", "--vocab-size"])
def test_a_json_list_is_told_from_json_lines(
    tmp_path: Path, tokmill: Any, indent: int | None, given: str
) -> None:
    entries = [{"text": "caf\u00e9"}, {"text": "a\nb"}]
    value = {"--tokenizer": TOKENIZER, "--vocab-size": 300}[given]
    (tmp_path / "a b.json").write_text(json.dumps(entries, indent=indent))
    build = ["build", "jsonl", "-o", "s", given, value]
    done = tokmill(*build, "a b.json", code=1)
    command = done.stderr.partition("makes: ")[2]
    assert "one JSON list, not JSON Lines" in done.stderr and command
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    tokmill(*build, "a b.jsonl")
    assert Store(tmp_path / "s").records == len(entries)
    seen = tokmill("inspect", "a b.json", "--json").stdout
    assert "a b.jsonl" in json.loads(seen)["next"]


@pytest.mark.parametrize("given", [("--tokenizer", TOKENIZER), ("--vocab-size", 300)])
def test_why_nothing_was_found_is_the_reason_of_most(
    tmp_path: Path, tokmill: Any, given: tuple[str, Any]
) -> None:
    (tmp_path / "latin.txt").write_bytes("d\u00e9j\u00e0 vu".encode("latin1"))
    done = tokmill("build", "text", "latin.txt", "-o", "s", *given, code=1)
    assert "(1 utf8)" in done.stderr and "--invalid-utf8 replace" in done.stderr


def test_the_default_size_of_a_vocabulary(tmp_path: Path, here: Any) -> None:
    """That of CS336's script, if both parts are named; other builds ask for it."""
    for part in ("a", "b"):
        (tmp_path / f"{part}.txt").write_text(f"some words of the text {part}\n" * 40)
    out = tmp_path / "lm"
    command = ["build", "text", "--train", tmp_path / "a.txt", "--val", tmp_path / "b.txt"]
    command += ["-o", out, "--bin", "--quiet", "--workers", "0"]
    _, said = here(*command)
    assert "vocabulary size: 50,257, the default (--vocab-size N trains another)" in said
    assert json.loads((out / "learned.json").read_text())["vocab_size"] == 50257
    _, said = here(*command, "--vocab-size", "50257")
    assert "the default" not in said and "unchanged" in said
    _, said = here(*command[:-4], "-o", tmp_path / "t", "--tokenizer", TOKENIZER, "-q")
    assert "vocabulary size" not in said
    _, said = here("build", "text", tmp_path / "a.txt", "-o", tmp_path / "s", code=2)
    assert "--vocab-size 8192" in said and "the default" not in said
    _, said = here(*command, "--tokenizer", TOKENIZER, "--vocab-size", "270", code=2)
    assert "exclude each other" in said
