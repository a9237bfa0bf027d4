"""`tokmill sample`, as a user meets it."""

import json
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import tokmill
from making import change_sealed
from tokmill.cli import main
from tokmill.report.describe.inspect import describe
from toy import cycles, make_store, text_store

ROOT = Path(__file__).parents[2]


class Talk(NamedTuple):
    stdout: str
    stderr: str


def sample(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Talk:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as left:
            main(["sample", *map(str, arguments)])
    finally:
        signal.signal(signal.SIGTERM, before)
    talk = Talk(*capsys.readouterr())
    assert left.value.code == code, talk.stderr
    assert not code or "hint:" in talk.stderr
    return talk


def train(store: Path, out: Path, steps: int) -> Path:
    torch.set_num_threads(1)
    recipe = {
        "data": {"train": str(store), "batch": 8},
        "model": {"dim": 32, "layers": 2, "heads": 2},
        "task": {"length": 16},
        "optim": {"lr": 0.01, "warmup": 5},
        "run": {"steps": steps, "device": "cpu"},
    }
    tokmill.train(recipe, out, quiet=True)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    words = ["one ", "two ", "three ", "four "]
    texts = ["".join(words[(i + j) % 4] for j in range(30)) for i in range(60)]
    return train(text_store(folder / "store", texts), folder / "run", 200)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on ids without a vocabulary."""
    folder = tmp_path_factory.mktemp("bare")
    store = make_store(folder / "store", cycles(20))
    changes = {"vocabularies": {}, "schema": {"token": {"dtype": "u1"}}, "source": "bin"}
    change_sealed(store / "manifest.json", **changes)
    return train(store, folder / "run", 2)


def test_several_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "one two th", "--tokens", "9", "--temperature", "3"]
    drawn = sample(capsys, run, *options, "--samples", "3", "--json").stdout.splitlines()
    lines = [json.loads(line) for line in drawn]
    assert [line["sample"] for line in lines] == [0, 1, 2]
    assert {line["prompt"] for line in lines} == {"one two th"}
    assert len({line["continuation"] for line in lines}) > 1
    # The first one is what a single sample gives; without --json they are the same.
    assert json.loads(sample(capsys, run, *options, "--json").stdout) == lines[0]
    shown = [line["continuation"] for line in lines]
    texts = [f"--- sample {n + 1}\n{options[1]}{text}\n" for n, text in enumerate(shown)]
    assert sample(capsys, run, *options, "--samples", "3").stdout == "\n".join(texts)


def test_what_outgrows_the_model_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = sample(capsys, run, "--prompt", "one two ", "--tokens", "70", "--seed", "3")
    assert (
        "note: 1 of 1 continuation became longer than" in long.stderr
        and "task.length" in long.stderr
    )
    assert (
        "became longer than" not in sample(capsys, run, "--prompt", "one", "--tokens", "3").stderr
    )


def test_a_run_without_a_tokenizer(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = sample(capsys, bare, "--ids", "1,2,3", "--tokens", "4", "--seed", "1").stdout
    ids = [*map(int, made.split(","))]
    assert ids[:3] == [1, 2, 3] and len(ids) == 7 and max(ids) < 23
    first = json.loads(sample(
        capsys, bare, "--ids", "1,2,3", "--tokens", "4", "--seed", "1", "--json"
    ).stdout)  # fmt: skip
    assert first["prompt"] == [1, 2, 3] and first["continuation"] == ids[3:]
    (same,) = tokmill.generate(bare, [[1, 2, 3]], 4, seed=1)
    assert same.ids == {"token": ids[3:]} and same.text == "" and same.end == "tokens"
    assert describe(bare)["next"] == f"tokmill sample {bare} --ids 1,2,3"
    assert "has no tokenizer" in sample(capsys, bare, "--prompt", "x", code=1).stderr
    assert "23 is not an id of 'token'" in sample(capsys, bare, "--ids", "23", code=2).stderr
    assert "give --ids 1,2,3" in sample(capsys, bare, code=2).stderr
    assert "are not ids" in sample(capsys, bare, "--ids", "no", code=2).stderr


def test_ids_of_a_run_with_a_tokenizer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made,) = tokmill.generate(run, ["one two "], 5, temperature=0)
    tokenizer = tokmill.Tokenizer.from_file(run / "vocab" / "tokenizer.json")
    given = ",".join(map(str, tokenizer.encode("one two ")))
    found = sample(capsys, run, "--ids", given, "--tokens", "5", "--temperature", "0").stdout
    assert found.strip() == given + "," + ",".join(map(str, made.ids["token"]))


@pytest.mark.parametrize(
    "wrong",
    [
        ["--temperature", "nan"],
        ["--temperature", "-1"],
        ["--temperature", "inf"],
        ["--top-p", "0"],
        ["--top-k", "-1"],
        ["--seed", "-1"],
        ["--tokens", "-1"],
        ["--samples", "0"],
        ["--ids", "1", "--prompt", "one"],
    ],
)
def test_options_out_of_range(
    run: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = sample(capsys, run, *wrong, code=2).stderr
    assert wrong[0] in said


def test_python_refuses_what_the_command_does(run: Path) -> None:
    with pytest.raises(tokmill.TokmillError, match="prompts are a list"):
        tokmill.generate(run, "one")
    with pytest.raises(tokmill.TokmillError, match="equally many"):
        list(tokmill.generate(run, [{"token": [1]}, {"other": [2]}]))
    assert list(tokmill.generate(run, [])) == []
    (made,) = tokmill.generate(run, ["one"], 0)
    assert made.text == "" and made.ids == {"token": []}
