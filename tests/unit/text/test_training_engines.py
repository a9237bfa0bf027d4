"""The engine that trains is chosen by what it costs, and Ctrl-C ends both."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tokmill.base.children.child_calls import ChildDied
from tokmill.text.learning import train_child
from tokmill.text.learning import train_tokenizer as train
from tokmill.text.learning.train_tokenizer import train_tokenizer

pytest.importorskip("gigatoken", reason="needs the extra text")
TEXTS = ["".join(chr(97 + (i * j) % 26) for j in range(2, 9)) + f" {i}" for i in range(2000)]


UNFRIENDLY = {
    "bytes": [bytes((i * j * j) % 256 for j in range(500)).decode("latin1") for i in range(40)],
    "runs": [letter * n for letter in "a \n-=0\u00e9\u4e2d" for n in range(1, 200, 9)],
    "one token": ["a" * 5000, "ab" * 700, "the " * 900],
    "no spaces": ["".join(chr(97 + (i * j * j) % 23) for j in range(900)) for i in range(9)],
    "Chinese": ["".join(chr(0x4E00 + (i * j) % 400) for j in range(1, 99)) for i in range(40)],
    "few": ["a"],
    "nothing but special tokens": ["<|endoftext|>"] * 3 + ["ab"],
}


def engines_of(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> list[str]:
    used: list[str] = []
    call = train._in_child

    def seen(target: str, *arguments: Any, **more: Any) -> Any:
        used.append(target)
        return call(target, *arguments, **more)

    monkeypatch.setattr(train, "_in_child", seen)
    train_tokenizer(TEXTS, vocab_size, [])
    return used


def test_gigatoken_learns_all_merges_where_words_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines_of(monkeypatch, 300) == ["gigatoken"]
    assert engines_of(monkeypatch, 900) == ["gigatoken", "mixed"]


def test_tokenizers_trains_where_python_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "FIRST_A_WORD", 0)
    monkeypatch.setattr(train_child, "MOST_PLACES", 10)
    monkeypatch.setattr(train, "call", in_this_process)
    assert engines_of(monkeypatch, 900) == ["gigatoken", "mixed", "tokenizers"]


def in_this_process(target: str, *arguments: Any, limits: Any, line: Any) -> Any:
    if target.endswith(":gigatoken"):
        line("600 unique words")
        raise ChildDied("stopped", hint="")
    return getattr(train_child, target.rpartition(":")[2])(*arguments)


@pytest.mark.parametrize("first", [0.125, 0.3])
@pytest.mark.parametrize("texts", [TEXTS, *UNFRIENDLY.values()], ids=["words", *UNFRIENDLY])
def test_merges_of_two_trainers_are_those_of_one(
    monkeypatch: pytest.MonkeyPatch, texts: list[str], first: float
) -> None:
    monkeypatch.setattr(train, "FIRST_A_WORD", first)
    monkeypatch.setattr(train, "MERGES_A_WORD", 0)
    mixed = train_tokenizer(texts, 900)
    wanted = train_tokenizer(texts, 900, engine="tokenizers")
    assert mixed.merges == wanted.merges and mixed.to_json() == wanted.to_json()


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_an_error_of_the_texts_is_an_error_of_the_training(engine: str) -> None:
    def fails() -> Any:
        yield "some text"
        raise ValueError("from the texts")

    with pytest.raises(ValueError, match="from the texts"):
        train_tokenizer(fails(), 300, [], engine=engine)


COMMAND = (
    "from tokmill.base import progress; progress.EVERY = 0.2; "
    "from tokmill.cli import entry; entry()"
)


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_progress_is_told_without_a_terminal_and_ctrl_c_ends_it(
    tmp_path: Path, engine: str
) -> None:
    """The input takes an engine minutes, and the test waits for half of one."""
    letters = np.random.default_rng(0).integers(97, 123, 16_000_000, dtype=np.uint8)
    letters[::8] = 32
    (tmp_path / "x.txt").write_bytes(letters.tobytes())
    words = ["tokenizer", "train", str(tmp_path / "x.txt"), "--vocab-size", "200000"]
    words += ["--engine", engine, "-o", str(tmp_path / "t.json")]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if line.startswith("training with"))
            assert said.startswith(f"training with {engine}: ")
            children = psutil.Process(process.pid).children(recursive=True)
            assert children
            process.send_signal(signal.SIGINT)
            _, rest = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 3 and "Traceback" not in rest, rest
    assert not any(child.is_running() for child in children)
    assert not (tmp_path / "t.json").exists()
