"""`tokmill build KIND -`: what comes through a pipe is an input like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from making import TOKENIZER, files_of

ROWS = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(40))
PIPE = ("build", "jsonl", "-", "-o", "s", "--tokenizer", TOKENIZER, "-q")


def kept(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "cache").glob("stdin*"))


def test_equal_input_is_the_same_build(tmp_path: Path, tokmill: Any) -> None:
    tokmill(*PIPE, input=ROWS)
    before = files_of(tmp_path / "s")
    assert len(kept(tmp_path / "s")) == 1
    (tmp_path / "x.jsonl").write_text(ROWS)
    tokmill("build", "jsonl", "x.jsonl", "-o", "t", "--tokenizer", TOKENIZER, "-q")
    assert (tmp_path / "s/manifest.json").exists()
    # The same again: nothing is left to do.
    tokmill(*PIPE, input=ROWS)
    assert files_of(tmp_path / "s") == before
    done = tokmill("store", "validate", "s", "--deep", "1")
    assert "1 made again" in done.stdout
    shard = next((tmp_path / "s/shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    tokmill("store", "repair", "s")
    assert files_of(tmp_path / "s") == before


def test_other_input_is_a_changed_one(tmp_path: Path, tokmill: Any) -> None:
    tokmill(*PIPE, input=ROWS)
    first = kept(tmp_path / "s")
    done = tokmill(*PIPE, input=ROWS + ROWS, code=1)
    assert "--yes" in done.stderr
    assert kept(tmp_path / "s") == first
    tokmill(*PIPE, "--yes", input=ROWS + ROWS)
    assert len(kept(tmp_path / "s")) == 1
    assert kept(tmp_path / "s") != first
    tokmill(*PIPE, "--fresh", input=ROWS)
    assert kept(tmp_path / "s") == first


def test_a_tokenizer_is_learned_from_it_too(tmp_path: Path, tokmill: Any) -> None:
    for kind, text in (("text", "some words\n" * 50), ("jsonl", ROWS)):
        done = tokmill("build", kind, "-", "-o", kind, "--vocab-size", "270", "-q", input=text)
        assert f"{kind}: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text", "said"),
    [
        (PIPE, "", "nothing came through the pipe"),
        (PIPE, "{\n", "not one record was found"),
        (("build", "jsonl", "-", "-", "-o", "s"), ROWS, "stdin was named twice"),
        (("build", "jsonl", "-"), ROWS, "no folder for the store"),
        (("build", "megatron", "-", "-o", "s"), ROWS, "cannot read from a pipe"),
    ],
)
def test_a_build_that_fails_leaves_nothing(
    tmp_path: Path, tokmill: Any, arguments: tuple[str, ...], text: str, said: str
) -> None:
    done = tokmill(*arguments, input=text, code=None)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "hint:" in done.stderr
    assert list(tmp_path.iterdir()) == []
