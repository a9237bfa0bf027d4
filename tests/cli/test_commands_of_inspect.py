"""`inspect` names the command that comes next: each of them is run here, as it is printed."""

import gzip
import json
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Tokmill = Callable[..., Any]
TEXT = "A first document about mills.<|endoftext|>And a second one, about tokens.\n" * 40
LINES = "".join(json.dumps({"body": f"line {i} of a corpus", "n": i}) + "\n" for i in range(300))
PUSH = {
    "asm": ["PUSH", "RBP"], "mne": "PUSH", "type": [("[PAD]", 1), ("R64_OPCODE", 1)],
    "reg": ["RSP", "RBP"], "rw": [("READ_WRITE", 1), ("READ", 1)], "eflag": "[PAD]",
}  # fmt: skip


def text(folder: Path) -> Path:
    (folder / "a text.txt").write_text(TEXT)
    return folder / "a text.txt"


def lines(folder: Path) -> Path:
    (folder / "lines.jsonl").write_text(LINES)
    return folder / "lines.jsonl"


def compressed_lines(folder: Path) -> Path:
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    return folder / "lines.jsonl.gz"


def compressed_text(folder: Path) -> Path:
    (folder / "text.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    return folder / "text.txt.gz"


def parquet(folder: Path) -> Path:
    rows = [json.loads(line) for line in LINES.splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def bare_tokens(folder: Path) -> Path:
    np.arange(1000, dtype=np.uint16).tofile(folder / "train.bin")
    return folder / "train.bin"


def windows(folder: Path) -> Path:
    ids = np.asarray([[5, 6, 0], [7, 8, 9]])
    np.savez(folder / "x.npz", input_ids=ids, attention_mask=(ids > 0).astype(np.int8))
    return folder / "x.npz"


def token_dicts(folder: Path) -> Path:
    (folder / "tokens.pkl").write_bytes(pickle.dumps({"main": [[PUSH, PUSH]], "f": [[PUSH]]}))
    return folder / "tokens.pkl"


def blame(folder: Path) -> Path:
    levels = [{"O0": [[PUSH, PUSH]], "O3": [[PUSH]]}]
    (folder / "main_blame.pkl").write_bytes(pickle.dumps(levels))
    return folder / "main_blame.pkl"


def program(folder: Path) -> Path:
    shutil.copy(shutil.which("true") or "/bin/true", folder / "a program")
    return folder / "a program"


def wide_tokens(folder: Path) -> Path:
    np.arange(90_000, dtype="<u4").tofile(folder / "wide.bin")
    return folder / "wide.bin"


def module(folder: Path) -> Path:
    (folder / "a module.mlir").write_text(
        """func.func @mm(%a: tensor<8x4xf32>, %b: tensor<4x2xf32>, %c: tensor<8x2xf32>) -> tensor<8x2xf32> {
  %0 = linalg.matmul ins(%a, %b : tensor<8x4xf32>, tensor<4x2xf32>)
    outs(%c : tensor<8x2xf32>) -> tensor<8x2xf32>
  return %0 : tensor<8x2xf32>
}
"""  # noqa: E501
    )
    return folder / "a module.mlir"


MADE = [
    text, lines, compressed_lines, compressed_text, parquet, bare_tokens,
    wide_tokens, windows, token_dicts, blame, program, module,
]  # fmt: skip


def next_of(tokmill: Tokmill, path: Path) -> str:
    found: str = json.loads(tokmill("inspect", path, "--json").stdout)["next"]
    return found


def run(tokmill: Tokmill, command: str, **places: Path | str) -> Any:
    """Run a printed command, with places in the place of its capital letters."""
    name, *words = shlex.split(command)
    assert name == "tokmill"
    return tokmill(*[places.get(word, word) for word in words])


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_of_a_file(make: Callable[[Path], Path], tmp_path: Path, tokmill: Tokmill) -> None:
    store = tmp_path / "store"
    run(tokmill, next_of(tokmill, make(tmp_path)), STORE=store)
    shown = json.loads(tokmill("inspect", store, "--json").stdout)
    assert shown["complete"] and shown["records"] and shown["tokens"]


def test_of_what_came_of_it(tmp_path: Path, tokmill: Tokmill) -> None:
    """A tokenizer, a graph, a vocabulary, a store, a recipe, a run, each in its turn."""
    source, store, again = text(tmp_path), tmp_path / "a store", tmp_path / "again"
    run(tokmill, next_of(tokmill, source), STORE=store)
    for tokenizer in (store / "vocab", store / "vocab" / "tokenizer.json"):
        shutil.rmtree(again, ignore_errors=True)
        run(tokmill, next_of(tokmill, tokenizer), INPUT=source, STORE=again)
    small = ["--set", "model.dim=16", "--set", "model.layers=1", "--steps", "2", "-q"]
    trained = f"{next_of(tokmill, store)} {shlex.join(small)}"
    run(tokmill, trained, RUN=tmp_path / "a run")
    sampled = run(tokmill, next_of(tokmill, tmp_path / "a run"), TEXT="A")
    assert sampled.stdout.startswith("A")

    graph, programs = tmp_path / "g.parquet", tmp_path / "programs"
    tokmill("cfg", program(tmp_path), "-o", graph)
    run(tokmill, next_of(tokmill, graph), STORE=programs)
    run(
        tokmill, next_of(tokmill, programs / "vocab"),
        INPUT=program(tmp_path), STORE=tmp_path / "with them",
    )  # fmt: skip
