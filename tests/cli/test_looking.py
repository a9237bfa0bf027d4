"""`inspect`, `plot`, `report`, `doctor` and `recipe`, as a user runs them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from report_stores import write_store

Tokmill = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    records = [[[2, 3, 0], [0]], [[4] * 9 + [0]]]
    return write_store(tmp_path / "store", records, kept=True, drops=[(0, 1, "empty", False)]).path


@pytest.fixture
def text_store(tmp_path: Path) -> Path:
    kind = pytest.importorskip("tokmill.text.tokenizers.tokenizer").Tokenizer
    vocab = {i: bytes([i]) for i in range(128)}
    raw = kind(vocab, [], {"<|endoftext|>": 128}).to_json()
    records = [[[*b"hello", 128], [*b"other", 128]]]
    return write_store(
        tmp_path / "text", records, size=129, vocabulary=raw, roles={"eot": 128}, kept=True
    ).path


def test_inspect_says_what_it_is(tokmill: Tokmill, store: Path) -> None:
    done = tokmill("inspect", store)
    assert "a token store" in done.stdout
    assert "\x1b" not in done.stdout
    found = json.loads(tokmill("inspect", store, "--json").stdout)
    assert (found["kind"], found["records"], found["tokens"]) == ("store", 3, 14)
    assert found["skipped"] == {"empty": 1}


def test_inspect_shows_records_and_figures(tokmill: Tokmill, store: Path, text_store: Path) -> None:
    shown = tokmill("inspect", text_store, "--head", "1")
    assert "hello<|endoftext|>" in shown.stdout
    assert "in-0.txt byte 0" in shown.stdout
    assert "other" not in shown.stdout
    found = json.loads(
        tokmill(
            "inspect", text_store, "--where", "name=doc-0-1", "--where", "level=1", "--json"
        ).stdout
    )
    assert [r["text"] for r in found["head"]] == ["other<|endoftext|>"]
    assert [r["at"] for r in found["head"]] == ["byte 10"]
    both = tokmill("inspect", store, "--stats", "--width", "4", "--head", "2")
    assert "rows of 4" in both.stdout
    assert "ids instead of text" in both.stderr
    assert "token: 2 3 0" in both.stdout
    stats = json.loads(tokmill("inspect", store, "--stats", "--width", "4", "--json").stdout)
    assert stats["statistics"]["rows"] == 5
    assert stats["statistics"]["empty"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing"], 1, "no such file"),
        (["damaged"], 1, "manifest.json"),
        (["note.txt", "--stats"], 2, "are for stores"),
        (["store", "--where", "nam=x"], 2, "did you mean"),
        (["store", "--stats", "--width", "0"], 2, "width"),
    ],
)
def test_inspect_refuses_with_a_hint(
    tokmill: Tokmill, tmp_path: Path, store: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/manifest.json").write_text("{")
    (tmp_path / "note.txt").write_text("text")
    done = tokmill("inspect", *arguments, code=code)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_plot(tokmill: Tokmill, tmp_path: Path, store: Path) -> None:
    done = tokmill("plot", "lengths", store, "-o", "f.svg")
    assert done.stdout.split() == ["f.svg"]
    assert (tmp_path / "f.svg").read_bytes().startswith(b"<?xml")
    tokmill("plot", "loss", store, "-o", "f.svg", code=1)


def test_report(tokmill: Tokmill, tmp_path: Path, store: Path) -> None:
    tokmill("report", store, "-o", "page.txt", code=2)
    tokmill("report", store, "-o", "p.html", code=1)


def test_doctor(tokmill: Tokmill, tmp_path: Path) -> None:
    done = tokmill("doctor", "--json")
    found = json.loads(done.stdout)
    assert found["ok"]
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert states["disk"] == states["extra text"] == "ok" and "GPU" in states
    assert list(tmp_path.iterdir()) == []


def test_recipe_schema(tokmill: Tokmill) -> None:
    done = tokmill("recipe", "schema", "text", "--json")
    keys = {key["key"]: key for key in json.loads(done.stdout)}
    assert keys["record"]["default"] == "separator"
    assert keys["record"]["type"] == '"separator" | "line"'
    assert keys["record"]["doc"]
    assert "source" in tokmill("recipe", "schema", "build").stdout
    wrong = tokmill("recipe", "schema", "txt", code=2)
    assert "did you mean 'text'?" in wrong.stderr


def test_recipe_schema_of_trainings(tokmill: Tokmill) -> None:
    shown = json.loads(tokmill("recipe", "schema", "train", "--json").stdout)
    keys = [(key["key"], key["kinds"]) for key in shown]
    assert ("data.train", []) in keys and ("run.steps", []) in keys
    assert ("model.layers", ["rwkv7"]) in keys  # with a default of its own
    assert ("task.mask_share", ["masked", "sentence_pair"]) in keys
    assert ("optim.eps", ["adamw", "muon"]) in keys
    only = ("--kind", "rwkv7", "--kind", "adamw")
    few = json.loads(tokmill("recipe", "schema", "train", *only, "--json").stdout)
    kinds = {kind for key in few for kind in key["kinds"]}
    assert {"rwkv7", "adamw", "masked"} <= kinds and not kinds & {"decoder", "muon"}
    wrong = tokmill("recipe", "schema", "train", "--kind", "rwkv", code=2)
    assert "did you mean 'rwkv7'?" in wrong.stderr
    tokmill("recipe", "schema", "text", "--kind", "rwkv7", code=2)


def test_inspect_says_how_many_records_match(tokmill: Tokmill, store: Path) -> None:
    shown = tokmill("inspect", store, "--where", "length > 0", "--head", "1")
    assert "1 of 3 shown; --head 3 shows all" in shown.stderr
    found = json.loads(tokmill("inspect", store, "--where", "length > 2", "--json").stdout)
    assert (len(found["head"]), found["matching"]) == (2, 2)
    assert "shown" not in tokmill("inspect", store, "--where", "length > 2").stderr
