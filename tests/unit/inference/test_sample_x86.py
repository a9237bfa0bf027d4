"""Sampling a model of x86 code: bytes in, instructions out."""

import pickle
from pathlib import Path

import pytest

import tokmill
from making import quick_build
from source_cases import write_small
from tokmill.base.errors import TokmillError, UsageError
from tokmill.report.describe.inspect import describe
from tokmill.training.evaluate import evaluate
from tokmill.training.runs.exchange import export_model
from tokmill.x86.tokens.rules import tokenize_bytes
from tokmill.x86.tokens.vocabularies.vocabulary import TokenList

CODE = bytes.fromhex("55 4889e5 5d c3".replace(" ", ""))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    tokens = tokenize_bytes(CODE, 0)
    (folder / "a.pkl").write_bytes(pickle.dumps([tokens * 8] * 4))
    return quick_build("token-dicts", folder / "a.pkl", folder / "s", rules="tokmill").path


def run_of(store: Path, out: Path, **task: object) -> Path:
    recipe = {
        "data": {"train": str(store), "batch": 4},
        "model": {"dim": 32, "layers": 1, "heads": 2},
        "task": {"length": 16, **task},
        "optim": {"lr": 0.03, "warmup": 2},
        "run": {"steps": 5, "device": "cpu"},
    }
    tokmill.train(recipe, out, quiet=True)
    return out


def test_instructions_follow_machine_code(store: Path, tmp_path: Path) -> None:
    run = run_of(store, tmp_path / "run")
    assert describe(run)["next"] == f'tokmill sample {run} --prompt "55 48 89 e5"'
    text = tokmill.sample(run, "55 4889e5", tokens=10, temperature=0)
    assert text.startswith("\n")
    vocabulary = TokenList.from_json((run / "vocab/asm.json").read_bytes())
    words = text.split()
    assert len(words) == 10 and set(words) <= set(vocabulary.tokens)
    # What was said, in the lines in which these tokens are read.
    said = tokmill.X86Tokenizer({"asm": vocabulary}, "tokmill").decode(
        [vocabulary.ids[word] for word in words]
    )
    assert text[1:].split("\n") == said
    assert tokmill.sample(run, "55", tokens=5, seed=1) == tokmill.sample(
        run, "55", tokens=5, seed=1
    )
    with pytest.raises(UsageError, match="not machine code"):
        tokmill.sample(run, "push rbp")
    with pytest.raises(UsageError, match="has not learned how a text begins"):
        tokmill.sample(run)


def test_a_model_of_one_column_reads_more_than_it_says(store: Path, tmp_path: Path) -> None:
    run = run_of(store, tmp_path / "run", column="asm")
    assert describe(run)["next"] is None
    with pytest.raises(TokmillError, match="can be exported") as error:
        export_model(run, tmp_path / "out")
    assert "-o F.pt" in (error.value.hint or "")
    (tmp_path / "graphs").mkdir()
    for number in range(2):
        write_small(tmp_path / "graphs", number)
    alone = quick_build(
        "pairs", tmp_path / "graphs", tmp_path / "one", all_pairs=True, streams=("asm",)
    ).path
    with pytest.raises(TokmillError, match="has no tokenizer for it") as error:
        export_model(run_of(alone, tmp_path / "alone"), tmp_path / "out")
    assert "tokmill build corpus" in (error.value.hint or "") and not (tmp_path / "out").exists()
    with pytest.raises(TokmillError, match="all its columns"):
        tokmill.sample(run, "55")


def test_a_store_of_other_vocabularies_is_to_be_built_again(store: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([tokenize_bytes(b"\x90", 0)] * 4))
    other = quick_build("token-dicts", tmp_path / "a.pkl", tmp_path / "s", rules="tokmill").path
    run = run_of(store, tmp_path / "run")
    with pytest.raises(TokmillError, match="the vocabulary 'asm' differs") as error:
        evaluate(run, other)
    assert "--vocab RUN/vocab" in (error.value.hint or "")
