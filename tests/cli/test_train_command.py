"""`tokmill train` and `tokmill sample`, as a user meets them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tokmill.cli import main
from toy import make_store, text_store

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/text/decoder-tiny.toml"
SMALL = ["--set", "model.dim=16", "--set", "model.layers=1", "--set", "task.length=16"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


COMMAND = [sys.executable, "-W", "error", "-m", "tokmill"]


class Talk(NamedTuple):
    stdout: str
    stderr: str


class Tokmill:
    """The command in this process, where torch is loaded already."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str | Path, code: int = 0) -> Talk:
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as left:
                main(list(map(str, arguments)))
        finally:
            signal.signal(signal.SIGTERM, before)
        talk = Talk(*self.capsys.readouterr())
        assert left.value.code == code, talk.stderr
        assert not code or "hint:" in talk.stderr
        return talk


@pytest.fixture
def tokmill(capsys: pytest.CaptureFixture[str]) -> Tokmill:
    torch.set_num_threads(1)
    return Tokmill(capsys)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["one ", "two ", "three ", "four "]
    texts = ["".join(words[(i + j) % 4] for j in range(30)) for i in range(60)]
    return text_store(tmp_path_factory.mktemp("cli") / "store", texts)


def test_train_stop_resume_sample(tokmill: Tokmill, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", RECIPE, "--data", store, "--val", store, "-o", out]
    arguments += ["--set", "model.layers=2", "--set", "model.dim=32", "--set", "optim.lr=0.01"]
    arguments += ["--set", "task.length=16"]
    command = [*COMMAND, *map(str, arguments)]
    # So many steps that only the signal ends it in time.
    slow = subprocess.Popen(
        [*command, "--steps", "300"], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    deadline = time.monotonic() + 60
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    slow.send_signal(signal.SIGTERM)
    _, talk = slow.communicate(timeout=60)
    assert slow.returncode == 3, talk
    assert f"interrupted: {out}: stopped by SIGTERM" in talk
    assert "error:" not in talk
    assert f"tokmill train -o {out}" in talk
    other = tokmill(*arguments, "--steps", "300", "--set", "clip=0.5", code=1).stderr
    assert "optim.clip: 1.0 → 0.5" in other
    early = tokmill("sample", out, "--tokens", "1").stderr
    assert re.search(r"not finished: samples from step \d+ of 300", early)
    done = tokmill("train", "-o", out, "--json")
    result = json.loads(done.stdout)
    assert result["step"] == 300
    assert result["val_loss"] < 1.5 and result["val_bits_per_byte"] > 0
    assert "resumes from its checkpoint" in done.stderr

    assert "the run is finished" in tokmill("train", "-o", out, "--resume").stderr
    greedy = tokmill("sample", out, "--prompt", "one two th", "--temperature", "0")
    assert greedy.stderr.startswith("note: 1 of 1 continuation became longer")
    assert greedy.stdout.startswith("one two three four one")
    drawn = [
        json.loads(tokmill("sample", out, "--tokens", "8", "--seed", str(seed), "--json").stdout)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]["continuation"]) <= 8


def test_a_run_without_a_folder_is_told_the_command(
    tokmill: Tokmill, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the command that was given, with a folder that is not there yet; it runs."""
    monkeypatch.chdir(tmp_path)
    sets = ["--steps", "1", "--set", "data.weights=[1.0]", *SMALL]
    for number, given in enumerate((["train", store], ["train", "--data", store])):
        hint = tokmill(*given, *sets, code=2).stderr.partition("hint: name it: ")[2].strip()
        words = shlex.split(hint)
        assert words[1:-2] == [*map(str, given), *sets]
        assert words[-1] == ("run", "run1")[number] and not Path(words[-1]).exists()
        tokmill(*words[1:], "-q")
        assert Path(words[-1], "model").exists()
    assert "`tokmill train -o run` continues" in tokmill("train", "run", code=2).stderr
    assert "tokmill train STORE -o RUN" in tokmill("train", code=2).stderr


def test_tokens_of_another_program_are_told_how_they_become_a_store(
    tokmill: Tokmill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (np.arange(600) % 50).astype("<u2").tofile("train.bin")
    hint = tokmill("train", "train.bin", "-o", "x", code=2).stderr.partition("hint: ")[2]
    build, train = re.findall(r"`tokmill (.*?)`", hint.replace("STORE", "s").replace("RUN", "r"))
    tokmill(*shlex.split(build))
    tokmill(*shlex.split(train), "--steps", "1", *SMALL)
    assert Path("r/model").exists()


def test_quiet(tokmill: Tokmill, store: Path, tmp_path: Path) -> None:
    arguments = ["train", store, "--val", store, "--steps", "1", *SMALL]
    loud = tokmill(*arguments, "-o", tmp_path / "loud").stderr
    assert "validation loss" in loud and "next: " in loud
    quiet = tokmill(*arguments, "-o", tmp_path / "run", "-q")
    assert not quiet.stdout
    # What is wrong with a recipe, and how the run ended, are no progress.
    kept = [line for line in quiet.stderr.splitlines() if not line.startswith("note: ")]
    assert len(kept) == 1 and kept[0].startswith(f"{tmp_path / 'run'}: 1 steps, loss ")


def test_notes_are_told_when_the_run_begins(tokmill: Tokmill, store: Path, tmp_path: Path) -> None:
    arguments = ["train", store, "--steps", "1", *SMALL]
    for flaw, code in (("data.overlays=['none']", 1), ("task.column=none", 2)):
        failed = tokmill(*arguments, "-o", tmp_path / "no", "--set", flaw, code=code).stderr
        assert "note: " not in failed, failed
    assert "note: optim.warmup = 50 is not below" in tokmill(*arguments, "--dry-run").stderr
    begun = tokmill(*arguments, "-o", tmp_path / "run", "-q").stderr
    assert begun.startswith("note: optim.warmup = 50 is not below")
    assert "note: " not in tokmill("train", "-o", tmp_path / "run").stderr


def test_train_for_longer_evaluate_and_start_from(
    tokmill: Tokmill, store: Path, tmp_path: Path
) -> None:
    flat = ["--set", "schedule=constant", "--set", "eval_every=2", *SMALL]
    out = tmp_path / "run"
    tokmill("train", store, "--val", store, "-o", out, "--steps", "3", *flat)
    tokmill("train", "-o", out, "--steps", "4")
    last = json.loads(tokmill("eval", out, store, "--json", "--device", "cpu").stdout)
    assert last["step"] == 4 and last["targets"] > 0 and last["bits_per_byte"] > 0
    assert last["columns"]["token"]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    by = ["--by", "bytes", "--rows", "2"]
    shown = tokmill("eval", out, store, "--at", "4", *by).stdout
    assert re.search(r"^step +4$", shown, re.MULTILINE)
    assert re.search(r"^perplexity +\d+\.\d{4}$", shown, re.MULTILINE)
    assert re.search(r"^token( +[\d.]+){2} +(yes|no) +[\d.,]+ +[\d.]+%$", shown, re.MULTILINE)
    assert re.search(r"^bytes +targets +loss +unigram +better$", shown, re.MULTILINE)
    assert "there are: 3, 4, best" in tokmill("eval", out, store, "--at", "1", code=1).stderr
    tokmill("sample", out, "--at", "best", "--tokens", "2")
    tokmill("train", store, "--from", out, "-o", tmp_path / "next", "--steps", "1", *SMALL)
    lines = (tmp_path / "next/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["loss"] == pytest.approx(last["loss"], rel=0.1)
    refused = tokmill("train", "-o", tmp_path / "next", "--set", "clip=0.5", code=1)
    assert "optim.clip: 1.0 → 0.5" in refused.stderr and "--from" in refused.stderr


def test_dry_run_does_nothing(tokmill: Tokmill, store: Path, tmp_path: Path) -> None:
    done = tokmill("train", RECIPE, "--data", store, "-o", tmp_path / "run", "--dry-run")
    assert "model.blocks.3.feed_forward.down.weight" in done.stdout
    assert not (tmp_path / "run").exists()
    plan = json.loads(tokmill("train", store, "--dry-run", "--json").stdout)
    assert plan["parameters"] == sum(int(np.prod(shape)) for shape in plan["tensors"].values())
    assert plan["tokens_per_step"] == 16 * 128
    assert plan["memory_bytes"] > 16 * plan["parameters"]


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["train", "TEXT", "-o", "RUN"], 2, "tokmill build text "),
        (["train", "TEXT"], 2, "tokmill build text "),
        (["rl", "train"], 2, "tokmill rl train RECIPE -o RUN"),
        (["rl", "train", "-o", "RUN"], 2, "tokmill rl train RECIPE -o RUN"),
        (["train", "STORE", "--val", "TEXT", "-o", "RUN"], 1, "`tokmill inspect FILE`"),
        (["train", "STORE", "-o", "RUN", "--set", "data=3"], 2, "expected `object`"),
        (["train", "-o", "RUN"], 2, "neither a recipe nor a store"),
        (["train", "missing", "-o", "RUN"], 1, "no such recipe or store"),
        (["train", "STORE", "--val", "missing", "-o", "RUN"], 1, "no such store"),
        (["train", RECIPE, "-o", "RUN"], 2, "--data STORE"),
        (["train", RECIPE, "--data", "none", "-o", "RUN"], 1, "no such store"),
        (["train", "STORE", "-o", "RUN", "--set", "modle.dim=1"], 2, "did you mean 'model'"),
        (["train", "STORE", "-o", "STORE"], 1, "no run"),
        (["train", "STORE", "-o", "RUN", "--set", "use_wandb=true"], 2, "'run.track=[\"wandb\"]'"),
        (["train", "STORE", "-o", "RUN", "--set", "track=['tb']"], 2, "wandb"),
        (
            ["train", "STORE", "-o", "RUN", "--set", "track=wandb"],
            2,
            """--set 'run.track=["wandb"]'""",
        ),
        (
            ["train", "STORE", "-o", "RUN", "--set", "data.weights=3,1"],
            2,
            "--set 'data.weights=[3, 1]'",
        ),
        (["train", "STORE", "-o", "RUN", "--set", "data.weights=2"], 2, "data.weights=[2]"),
        (["train", "STORE", "-o", "RUN", "--steps", "2", "--set", "run.steps=3"], 2, "3 and 2"),
        (["train", "STORE", "-o", "RUN", "--set", "lr=1", "--set", "lr=2"], 2, "1 and 2"),
        (["train", "--data", "STORE", "-o", "RUN", "--set", "data.train=s"], 2, "given twice"),
        (["train", "STORE", "-o", "RUN", "--from", "RUN", "--set", "run.start=s"], 2, "twice"),
        (["train", "STORE", "-o", "RUN", "--from", "none"], 1, "no run to start from"),
        (["train", "STORE", "-o", "RUN", "--from", "STORE"], 1, "no run with weights"),
        (["sample", "STORE"], 1, "holds no run"),
        (["sample", "nowhere"], 1, "there is no such folder"),
        (["eval", "STORE", "STORE"], 1, "holds no run"),
    ],
)
def test_mistakes_have_hints(
    arguments: list[str | Path],
    code: int,
    what: str,
    tokmill: Tokmill,
    store: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "some.txt").write_text("once upon a time")
    places = {"STORE": store, "RUN": tmp_path / "run", "TEXT": tmp_path / "some.txt"}
    given = [places.get(str(argument), argument) for argument in arguments]
    assert what in tokmill(*given, code=code).stderr


def test_sampling_needs_a_tokenizer_that_can_be_read(tokmill: Tokmill, tmp_path: Path) -> None:
    bare = make_store(tmp_path / "store", [np.arange(20)] * 9, vocabulary=b"no tokenizer")
    tokmill("train", bare, "-o", tmp_path / "run", "--steps", "1", *SMALL)
    assert "token.json" in tokmill("sample", tmp_path / "run", code=1).stderr


def test_plain_mistakes_do_not_wait_for_torch(store: Path, tmp_path: Path) -> None:
    ends = {
        "": 2,
        "STORE": 2,
        "none.toml -o RUN": 2,
        "none -o RUN": 1,
        "STORE -o RUN --set steps": 2,
        "STORE -o RUN --set run.stepz=3": 2,
        "STORE -o RUN --set modle.dim=3": 2,
        "STORE -o RUN --from none": 1,
        "STORE -o RUN --steps 0": 2,
        "STORE -o RUN --max-time soon": 2,
        f"{__file__} -o RUN": 2,
    }
    places = {"STORE": str(store), "RUN": str(tmp_path / "run")}
    check = (
        "import json, sys; from tokmill.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: print(99 if 'torch' in sys.modules else end.code)"
    )
    lines = [["train", *(places.get(word, word) for word in line.split())] for line in ends]
    command = [sys.executable, "-c", check, json.dumps(lines)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert dict(zip(ends, map(int, done.stdout.split()), strict=True)) == ends
