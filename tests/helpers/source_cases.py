"""Every kind of build with small inputs: what the conformance tests of `plugins.SOURCES` run.

A new line in that table needs one in `CASES`.
"""

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from making import TOKENIZER, rec, write_store
from pair_graphs import write_small
from tokmill import plugins
from tokmill.base import recipe
from tokmill.store.schema import Column
from tokmill.store.store import Store

Write = Callable[[Path, int], Path]


@dataclass(frozen=True)
class SourceCase:
    """A kind of build: how its inputs are written, and what its command says besides them."""

    write: Write
    """Write input number 0, 1, … into a folder and return its path."""
    options: Callable[[Path], Sequence[object]] = lambda folder: ()
    """Further arguments; they may write files into a folder."""
    over: bool = False
    """Whether the build adds columns to a store, in place of making another."""
    grows: bool = True
    """Whether the same command may be given more inputs."""
    most: int = 3
    """Inputs of a build at most."""


def tokenizer(folder: Path) -> Sequence[object]:
    """Name the tokenizer."""
    return ("--tokenizer", TOKENIZER)


def texts(number: int) -> list[str]:
    """Return texts that no other input has."""
    return [f"text {i} of input {number}: the quick brown fox\n\tjumps é 日本" for i in range(20)]


def write_text(folder: Path, number: int) -> Path:
    """Write documents with `<|endoftext|>` between them."""
    path = folder / f"{number}.txt"
    path.write_text("\n<|endoftext|>\n".join(texts(number)))
    return path


def lines(folder: Path, number: int, rows: Sequence[Any]) -> Path:
    """Write JSON Lines."""
    path = folder / f"{number}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_jsonl(folder: Path, number: int) -> Path:
    """Write records with a text."""
    return lines(folder, number, [{"text": text} for text in texts(number)])


def write_parquet(folder: Path, number: int) -> Path:
    """Write a table with a text column, in several row groups."""
    import pyarrow as arrow
    import pyarrow.parquet

    path = folder / f"{number}.parquet"
    arrow.parquet.write_table(arrow.table({"text": texts(number)}), path, row_group_size=7)
    return path


def write_tsv(folder: Path, number: int) -> Path:
    """Write pairs of sentences with a class."""
    path = folder / f"{number}.tsv"
    rows = [f"{i % 2}\t{text.replace(chr(10), ' ').replace(chr(9), ' ')}\tand \"{i}" for i, text in
            enumerate(texts(number))]  # fmt: skip
    path.write_text("\n".join(["Quality\t#1 String\t#2 String", *rows, ""]))
    return path


def write_corpus(folder: Path, number: int) -> Path:
    """Write walks of three pairs."""
    path = folder / f"{number}.txt"
    walks = [f"mov eax word{number} {i % 7}\npush rbp" for i in range(9)]
    path.write_text("\n\n".join("\n".join(walks[i : i + 3]) for i in (0, 3, 6)))
    return path


def words(folder: Path) -> Sequence[object]:
    """Write a list of words and name it."""
    (folder / "vocab.txt").write_text("[UNK]\nmov\neax\npush\nrbp\nmov\nword0\nword1\n")
    return ("--words", folder / "vocab.txt")


def wordpiece(folder: Path) -> Sequence[object]:
    """Write a vocab.txt of characters and name it."""
    characters = sorted(set("".join(texts(0)).lower()) - set(" \n\t"))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *characters, *(f"##{c}" for c in characters)]
    (folder / "vocab.txt").write_text("\n".join(tokens))
    return ("--tokenizer", folder / "vocab.txt")


def write_graph(folder: Path, number: int) -> Path:
    """Write the graph of a program of two functions."""
    from tokmill.x86.graph import Edge
    from tokmill.x86.graphs.graph_files import write_graph as write
    from x86_graphs import Block, graph_of

    at = 0x1000 * (number + 1)
    nop, add, ret = b"\x90", bytes([0x83, 0xC0, number + 1]), b"\xc3"
    path = folder / f"{number}.cfg.parquet"
    functions = {
        at: [Block(at, [nop, add], [(Edge(1), at + 4)]), Block(at + 4, [ret])],
        at + 0x100: [Block(at + 0x100, [b"\x55", ret])],
    }
    write(graph_of(functions, ["main", ""]), path)
    return path


def write_ids(folder: Path, number: int) -> Path:
    """Write a store of ids in two shards."""
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    vocabulary, data = Tokenizer.from_file(TOKENIZER).vocabulary()
    schema = {
        "token": Column("u2", vocab="token"),
        "name": Column("utf8", per="record"),
    }
    draw = np.random.default_rng(number)
    rows = [
        rec([*draw.integers(5, 250, draw.integers(1, 30)).tolist(), 0], name=f"{number} n{i}é")
        for i in range(20)
    ]
    path = folder / f"ids-{number}"
    write_store(path, schema, [rows[:12], rows[12:]], vocabularies={"token": vocabulary})
    (path / "vocab" / vocabulary.file).write_bytes(data)
    return path


def exported(kind: str, name: str, **options: Any) -> Write:
    """Return what writes the ids of `write_ids` in the format of an export."""

    def write(folder: Path, number: int) -> Path:
        source = folder / "stores"
        source.mkdir(exist_ok=True)
        export = plugins.load(plugins.EXPORTS, kind)
        target = folder / name.format(number)
        made = export(recipe.convert(export.Config, options))
        made.write(Store(write_ids(source, number)), target)
        return target

    return write


def write_token_dicts(folder: Path, number: int) -> Path:
    """Write a pickle of instructions as dicts of tokens."""
    one = {
        "asm": ["MOV", "EAX", "RBP", "-", "IMM"], "mne": "MOV",
        "type": [("[PAD]", 1), ("R32_REG", 1), ("R32_OR_MEM", 3)],
        "reg": ["[PAD]", "RAX", "RBP", "[PAD]", "[PAD]"],
        "rw": [("[PAD]", 1), ("WRITE", 1), ("READ", 3)], "eflag": "[PAD]",
    }  # fmt: skip
    path = folder / f"{number}_tokens.pkl"
    path.write_bytes(pickle.dumps({"main": [[one] * (number + 2), [one]], "f": [[one]]}, 4))
    return path


def write_triplets(folder: Path, number: int) -> Path:
    """Write a pickle of triplets of intervals, whose blocks are vectors."""
    draw = np.random.default_rng(number)

    def member() -> list[Any]:
        count = int(draw.integers(1, 5))
        return [[*draw.normal(size=(count, 4)).astype(np.float32)], draw.integers(1, 99, count)]

    entries = [(*member(), *member(), *member(), *draw.random(3).tolist()) for _ in range(9)]
    path = folder / f"{number}_triplets.pkl"
    path.write_bytes(pickle.dumps(entries, 4))
    return path


def write_functions(folder: Path, number: int, together: bool = False) -> Path:
    """Write a store of functions under four builds, a shard each, or all in one shard."""
    draw = np.random.default_rng(number)
    strings = ("project", "program", "compiler", "level", "function")
    schema = {"token": Column("u2"), **{name: Column("utf8", per="record") for name in strings}}
    names = [(f"p{i % 3}", "a", f"f{i}") for i in range(30)]
    shards = [
        [
            rec(draw.integers(1, 60, 8).tolist(), project=project, program=program,
                compiler="gcc", level=level, function=function)
            for project, program, function in names
        ]
        for level in ("O0", "O1", "O2", "O3")
    ]  # fmt: skip
    path = folder / f"functions-{number}"
    write_store(path, schema, [sum(shards, [])] if together else shards)
    return path


def write_trace(folder: Path, number: int) -> Path:
    """Write an execution of the program of `write_graph`, with the files beside it."""
    at = [0x1000, 0x1004, 0x1100, 0x999999]
    text = "".join(
        f"T:1:{i + 1} :2:{number + 1}   :3:{i % 3}\n" + "T:4:9\n" * (i == 3) for i in range(9)
    )
    path = folder / f"{number}.bb"
    path.write_text(text)
    lines = (f"F:{i + 1}:{0x108000 + where:x}:\n" for i, where in enumerate(at))
    path.with_suffix(".pc").write_text("".join(lines))
    path.with_suffix(".map").write_text("108000 0\n109000 no.so\n")
    rows = "".join(f"{i},1.{i},{number}\n" for i in range(10))
    path.with_suffix(".intervals.csv").write_text(f"interval,cpi_modelled,d1_misses\n{rows}")
    return path


def write_module(folder: Path, number: int) -> Path:
    """Write a module of three operations."""
    from tokmill.mlir.modules import generators

    path = folder / f"{number}.mlir"
    path.write_text(generators.chain(f"matmul 8 {8 << number} 16, relu, softmax"))
    return path


def block_store(folder: Path) -> Sequence[object]:
    """Build a store of the blocks of a graph, and name it."""
    from making import quick_build

    path = folder / "blocks"
    if not path.exists():
        quick_build("x86", write_graph(folder, 0), path, unit="block")
    return ("--blocks", path, "--min-joined", 0)


def record_values(folder: Path) -> Sequence[object]:
    """Write a number per record."""
    np.save(folder / "level.npy", np.arange(20, dtype=np.int32))
    return ("--values", folder / "level.npy")


def small_run(folder: Path) -> Sequence[object]:
    """Train a model on a store of ids for a step."""
    from tokmill import train
    from toy import recipe as small

    source = folder / "learned"
    source.mkdir(exist_ok=True)
    run = folder / "run"
    if not run.exists():
        train(small(write_ids(source, 9), 1, task={"rows": "whole", "length": 32}), run, quiet=True)
    return ("--run", run)


CASES: dict[str, SourceCase] = {
    "text": SourceCase(write_text, tokenizer),
    "jsonl": SourceCase(write_jsonl, tokenizer),
    "parquet": SourceCase(write_parquet, tokenizer),
    "tsv": SourceCase(write_tsv, wordpiece),
    "corpus": SourceCase(write_corpus, words),
    "x86": SourceCase(write_graph),
    "bbv": SourceCase(write_trace, block_store),
    "mlir": SourceCase(write_module, lambda folder: ("--schedules", 3)),
    "pairs": SourceCase(write_small, lambda folder: ("--all-pairs",)),
    "select": SourceCase(write_ids, lambda folder: ("--min-length", 3)),
    "mine": SourceCase(write_functions, grows=False, most=1),
    "overlay": SourceCase(write_ids, record_values, over=True, grows=False),
    "embed": SourceCase(write_ids, small_run, over=True, grows=False),
    "npz": SourceCase(exported("npz", "npz-{}", max_length=64, stride=64, pad_id=1)),
    "bin": SourceCase(exported("bin", "{}.bin"), lambda folder: ("--separator-id", 0)),
    # Their vocabularies hold what their inputs hold: with more inputs it is another recipe.
    "token-dicts": SourceCase(write_token_dicts, grows=False),
    "triplets": SourceCase(write_triplets),
}
