"""The engine that trains is chosen by what it costs, and Ctrl-C ends both."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tokmill.text.learning import train_tokenizer as train
from tokmill.text.learning.train_tokenizer import train_tokenizer

pytest.importorskip("gigatoken", reason="needs the extra text")
TEXTS = ["".join(chr(97 + (i * j) % 26) for j in range(2, 9)) + f" {i}" for i in range(600)]


def engines_of(monkeypatch: pytest.MonkeyPatch, vocab_size: int, **more: Any) -> list[str]:
    used: list[str] = []
    library = train._with_tokenizers

    def seen(*arguments: Any) -> Any:
        used.append("tokenizers")
        return library(*arguments)

    monkeypatch.setattr(train, "_with_tokenizers", seen)
    train_tokenizer(TEXTS, vocab_size, [], **more)
    return used


def test_gigatoken_trains_where_words_are_many_and_tokenizers_where_ids_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert engines_of(monkeypatch, 300) == []
    assert engines_of(monkeypatch, 900) == ["tokenizers"]


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
