"""A time limit holds within a shard, for every source; what goes on makes the same bytes."""

import gzip
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec import UNSET

import tokmill
from making import files_of, here, jsonl, quick_build, token_store
from pair_graphs import write_small
from source_cases import block_store, write_functions
from tokmill import plugins
from tokmill.bbv.traces import read as bbv_read
from tokmill.builds import build as run
from tokmill.builds import make_shard as make
from tokmill.builds import plan
from tokmill.builds.mining import name_columns
from tokmill.builds.plan import How
from tokmill.builds.selection import minhash as repeats
from tokmill.builds.selection import overlay_values as overlay
from tokmill.builds.source import Item
from tokmill.formats import arrow_files
from tokmill.formats.pickles import triplets
from tokmill.mlir import module_source as mlir_source
from tokmill.mlir.modules import generators
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store
from tokmill.text import parquet
from tokmill.text import record_blocks as blocks
from tokmill.x86 import records, walks
from tokmill.x86.tokens.rules import tokenize_bytes
from tokmill.x86.tokens.vocabularies.vocabulary import closed, write_vocabularies
from x86_programs import compiles

ROWS = [{"text": f"document {i} " * 5} for i in range(400)]
LIMIT = 3
"""Looks at the clock before the time is up."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches of small inputs, for every source."""
    monkeypatch.setattr(blocks, "MOST_RECORDS", 20)
    monkeypatch.setattr(parquet, "BATCH", 1500)
    monkeypatch.setattr(arrow_files, "MOST_ROWS", 20)
    monkeypatch.setattr(repeats, "BATCH_RECORDS", 20)
    monkeypatch.setattr(overlay, "BLOCK", 20)
    monkeypatch.setattr(name_columns, "BLOCK", 5)
    monkeypatch.setattr(triplets, "BLOCKS", 100)
    monkeypatch.setattr(records, "AT_ONCE", 1)
    monkeypatch.setattr(walks, "AT_ONCE", 10_000)
    monkeypatch.setattr(bbv_read, "CHUNK", 500)
    monkeypatch.setattr(bbv_read, "PIECE", 20)
    monkeypatch.setattr(mlir_source, "CHUNK", 1)
    monkeypatch.setitem(plan.BLOCK_BYTES, "balanced", 1000)


class Case(NamedTuple):
    """A build: its source, its input, options."""

    source: str
    path: Path
    options: dict[str, Any] = {}


def lines(folder: Path) -> Case:
    return Case("jsonl", jsonl(folder / "x.jsonl", ROWS))


def packed(folder: Path) -> Case:
    path = folder / "x.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(folder / "x.jsonl", ROWS).read_bytes()))
    return Case("jsonl", path)


def text(folder: Path) -> Case:
    path = folder / "x.txt"
    path.write_text("<|endoftext|>".join(row["text"] for row in ROWS))
    return Case("text", path)


def sentences(folder: Path) -> Case:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    (folder / "vocab.txt").write_text("\n".join([*words, *(f"##{word}" for word in words[4:])]))
    rows = [f"{i % 2}\t{' '.join(row['text'].split())}\tyes" for i, row in enumerate(ROWS)]
    path = folder / "x.tsv"
    path.write_text("\n".join(["Quality\t#1 String\t#2 String", *rows, ""]))
    return Case("tsv", path, {"tokenizer": folder / "vocab.txt"})


def columns(folder: Path) -> Case:
    pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    pq.write_table(pa.table({"text": [row["text"] for row in ROWS]}), folder / "x.parquet")
    return Case("parquet", folder / "x.parquet")


def ids(folder: Path) -> Store:
    return token_store(folder / "ids", [[[i % 200 + 1] * 30 + [0] for i in range(400)]])


def exported(kind: str, name: str, **options: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        (folder / "out").mkdir()
        part, given = plugins.load(plugins.EXPORTS, kind), dict(options)
        part(part.Config(**given.pop("export", {}))).write(ids(folder), folder / name)
        return Case(kind, folder / name, given)

    return make


def dicts(folder: Path) -> Case:
    code = [bytes.fromhex(part) for part in ("55", "4889e5", "0fa2", "c3")]
    sequences = [tokenize_bytes(b"".join(code * (1 + i % 3)), 0) for i in range(400)]
    (folder / "in.pkl").write_bytes(pickle.dumps(sequences))
    write_vocabularies(folder / "closed", closed())
    return Case("token-dicts", folder / "in.pkl", {"vocab": str(folder / "closed")})


def triples(folder: Path) -> Case:
    # As lists, so that each is complete before the next: tuples are, a thousand at a time.
    entries = [[[i, i + 1, 7], [1, 2, 3], [i], [4], [i, 3], [5, 6]] for i in range(400)]
    (folder / "in.pkl").write_bytes(pickle.dumps(entries))
    return Case("triplets", folder / "in.pkl")


def program(folder: Path) -> Case:
    functions = "".join(f"int f{i}(int x) {{ return x * {i + 3} ^ x; }}" for i in range(60))
    return Case(
        "x86", compiles(folder, "limits", functions + "int main() { return f1(2); }", "-O1")
    )


def intervals(folder: Path) -> Case:
    options = block_store(folder)
    trace = folder / "x.bb"
    trace.write_text("".join(f"T:1:{i + 1}   :2:40   :3:{i % 7 + 1}\n" for i in range(400)))
    places = (0x1000, 0x1004, 0x1100)
    lines = (f"F:{i}:{0x108000 + place:x}:\n" for i, place in enumerate(places, 1))
    trace.with_suffix(".pc").write_text("".join(lines))
    rates = "i1_misses,d1_misses,ll_misses,branch_misses,page_faults"
    rows = "".join(f"{i},1.5,1,2,3,4,5\n" for i in range(400))
    trace.with_suffix(".intervals.csv").write_text(f"interval,cpi_modelled,{rates}\n{rows}")
    return Case("bbv", trace, {"blocks": [str(options[1])], "min_joined": 0.0})


def pair(folder: Path) -> Case:
    (folder / "graphs").mkdir()
    for number in range(2):
        write_small(folder / "graphs", number)
    return Case("pairs", folder / "graphs", {"all_pairs": True, "walks": 200})


def schedules(folder: Path) -> Case:
    path = folder / "x.mlir"
    path.write_text(generators.chain("conv_2d_nhwc 1 8 18 16 3"))
    return Case("mlir", path, {"schedules": 40})


def walks_as_text(folder: Path) -> Case:
    path = folder / "x.txt"
    path.write_text("\n\n".join(row["text"] for row in ROWS))
    return Case("corpus", path)


def selected(folder: Path) -> Case:
    quick_build("jsonl", lines(folder).path, folder / "base")
    return Case("select", folder / "base", {"min_length": 1})


def functions(folder: Path) -> Case:
    return Case("mine", write_functions(folder, 0, together=True))


def values(folder: Path) -> Case:
    base = quick_build("jsonl", lines(folder).path, folder / "base")
    np.save(folder / "x.npy", np.arange(len(base), dtype=np.float32))
    return Case("overlay", folder / "base", {"values": str(folder / "x.npy"), "name": "x"})


def vectors(folder: Path) -> Case:
    torch = pytest.importorskip("torch", reason="needs the extra train")
    torch.set_num_threads(1)
    quick_build("jsonl", lines(folder).path, folder / "base")
    recipe = {
        "data": {"train": str(folder / "base"), "batch": 4},
        "model": {"kind": "decoder", "dim": 8, "layers": 1, "heads": 2},
        "task": {"length": 8},
        "run": {"steps": 1, "device": "cpu", "peak_flops": 1e12},
    }
    tokmill.train(recipe, folder / "run", quiet=True)
    options = {"run": str(folder / "run"), "name": "x", "batch_tokens": 400}
    return Case("embed", folder / "base", options)


CASES: dict[str, Callable[[Path], Case]] = {
    "jsonl": lines,
    "jsonl, packed": packed,
    "text": text,
    "parquet": columns,
    "tsv": sentences,
    "bin": exported("bin", "out/x.bin", record_tokens=31, dtype="u2"),
    "npz": exported("npz", "out", export={"max_length": 31, "stride": 31, "pad_id": 7}),
    "token-dicts": dicts,
    "triplets": triples,
    "x86": program,
    "bbv": intervals,
    "pairs": pair,
    "mlir": schedules,
    "corpus": walks_as_text,
    "select": selected,
    "mine": functions,
    "overlay": values,
    "embed": vectors,
}


def test_every_source_has_a_case() -> None:
    assert {name.split(",")[0] for name in CASES} == {*plugins.SOURCES}


def build(case: Case, out: Path, how: How | None = None) -> Store:
    """Build; an overlay is in its store, of which each build gets a copy."""
    path, place = case.path, out
    if case.source in ("overlay", "embed"):
        path = out / "base"
        if not path.exists():
            shutil.copytree(case.path, path)
        place = Path()
    return quick_build(case.source, path, place if place != Path() else "", how=how, **case.options)


# Pickles come in the batches in which they were written, of 1,000 entries.
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("token-dicts", "triplets")])
def test_work_stops_within_a_batch_and_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "in").mkdir()
    case = CASES[name](tmp_path / "in")
    loaded = plugins.load(plugins.SOURCES, case.source)
    read = loaded.read
    seen = 0
    ends: list[float | None] = []

    def counted(self: Any, item: Item, digest: Any) -> Iterator[Any]:
        nonlocal seen
        for batch in read(self, item, digest):
            seen += 1
            ends.append(batch.done)
            yield batch

    monkeypatch.setattr(loaded, "read", counted)
    whole = build(case, tmp_path / "whole")
    batches, seen = seen, 0
    assert batches > 5 * LIMIT, "too few batches to tell"
    if name != "x86":
        said = [end for end in ends if end is not None]
        assert len(said) == len(ends) and said == sorted(said) and said[-1] == pytest.approx(1.0)
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return 0.0 if looks <= LIMIT + 2 else 100.0

    monkeypatch.setattr(make, "clock", clock)
    how = How(amount=here(), limit_seconds=10)
    partial = build(case, tmp_path / "s", how)
    assert LIMIT <= seen <= LIMIT + 3, f"{seen} of {batches} batches"
    assert partial.partial and len(partial) < len(whole)
    assert partial.receipt(0).cut is not UNSET
    if name == "bbv":
        # What was joined is told of the intervals that are there.
        assert partial.manifest.notes["intervals"] == len(partial)
        instructions = int(partial.column("instructions").sum())
        assert partial.manifest.notes["instructions"] == instructions
    assert validate(partial).ok
    for mine, theirs in zip(partial, whole, strict=False):
        assert all(np.array_equal(mine[column], theirs[column]) for column in whole.schema)
    said = capsys.readouterr().err
    if name == "embed":
        # Records are read by length, so none is whole yet.
        assert not len(partial) and "before one record was whole" in said
    else:
        share = float(re.search(r": ([\d.]+)% of the input at .* records/s\.\n", said)[1]) / 100
        # Equal sequences of operations are one record, so later schedules bring fewer.
        if name not in ("x86", "mlir"):
            assert share == pytest.approx(len(partial) / len(whole), abs=0.05)
    monkeypatch.setattr(make, "clock", lambda: 0.0)
    again = build(case, tmp_path / "s")
    assert not again.partial
    assert files_of(again.path) == files_of(whole.path)


FILES = ("jsonl", "npz", "x86")


@pytest.mark.parametrize("name", FILES)
def test_whole_items_of_a_shard_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Three small files in one shard; the time is up within the third, and again within it."""
    (tmp_path / "in").mkdir()
    (tmp_path / "many").mkdir()
    case = CASES[name](tmp_path / "in")
    made = next(case.path.glob("*.npz")) if case.path.is_dir() else case.path
    for number in range(3):
        shutil.copy(made, tmp_path / "many" / f"{number}{made.suffix}")
    case = case._replace(path=tmp_path / "many")
    loaded = plugins.load(plugins.SOURCES, case.source)
    read, begun, up = loaded.read, [], False

    def noted(self: Any, item: Item, digest: Any) -> Iterator[Any]:
        nonlocal up
        begun.append(item.name[0])
        for number, batch in enumerate(read(self, item, digest)):
            up = item.name[0] == "2" and number == 1
            yield batch

    monkeypatch.setattr(loaded, "read", noted)
    whole = build(case, tmp_path / "whole")
    assert len(whole.shards) == 1 and begun == ["0", "1", "2"]
    monkeypatch.setattr(make, "clock", lambda: 100.0 if up else 0.0)
    for expected in ("012", "2"):
        begun.clear()
        up = False
        partial = build(case, tmp_path / "s", How(amount=here(), limit_seconds=10, quiet=True))
        assert "".join(begun) == expected
        assert partial.partial and len(partial) > len(whole) // 2 and validate(partial).ok
    begun.clear()
    monkeypatch.setattr(make, "clock", lambda: 0.0)
    again = build(case, tmp_path / "s")
    assert begun == ["2"] and files_of(again.path) == files_of(whole.path)


@pytest.mark.parametrize("limit", [0.5, 4.0, 60.0])
def test_the_time_to_commit_is_a_fifth_of_the_limit(limit: float) -> None:
    assert run.grace_of(limit) == max(1.0, limit / 5)
    assert run.grace_of(None) < 30, "clusters kill then"
