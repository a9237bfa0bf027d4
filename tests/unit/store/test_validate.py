"""`validate` finds each kind of damage, and names the shard that mends it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import change_sealed, rec, write_store
from phrase_records import PHRASES
from tokmill.base.errors import TokmillError
from tokmill.store.checks.validate import validate
from tokmill.store.schema import Column, Schema
from tokmill.store.shards.shard import SUFFIX, TYPES, Shard, write_tensors
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary

SCHEMA: Schema = {
    "token": Column("u2", vocab="token"),
    "depth": Column("u1"),
    "name": Column("utf8", per="record"),
    "level": Column("u4", per="record"),
    "vector": Column("f4", per="record", width=2),
}
ROWS = [
    rec([1, 2], depth=[0, 0], name="é", level=1, vector=[1, 2]),
    rec([], depth=[], name="", level=2, vector=[3, 4]),
    rec([9], depth=[1], name="xyz", level=3, vector=[5, 6]),
]


def make(path: Path) -> Store:
    import hashlib

    digest = hashlib.sha256(b"{}").hexdigest()
    store = write_store(
        path,
        SCHEMA,
        [ROWS, ROWS[:1]],
        vocabularies={"token": Vocabulary("tokenizer.json", digest, 10)},
    )
    (path / "vocab/tokenizer.json").write_bytes(b"{}")
    return store


def rewrite(store: Store, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the arrays of the first shard, with receipt and manifest as if it had been so."""
    entry = store.shards[0]
    path = store.path / "shards" / f"{entry.name}{SUFFIX}"
    shard = Shard(path)
    arrays = {name: np.array(shard[name]) for name in shard._tensors}
    change(arrays)
    short = {name: dtype for dtype, name in TYPES.items()}
    kinds = {"uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "float32": "F32"}
    tensors = {
        name: (short[kinds[value.dtype.name]], list(value.shape), [value])
        for name, value in arrays.items()
    }
    size, digest = write_tensors(path, tensors)
    changed = {"bytes": size, "sha256": digest}
    change_sealed(path.with_suffix(".json"), **changed)
    manifest = json.loads((store.path / "manifest.json").read_bytes())
    manifest["bytes"] += size - manifest["shards"][0][3]
    manifest["shards"][0][3:] = [size, digest]
    change_sealed(store.path / "manifest.json", **manifest)


def test_a_sound_store_has_no_problem(tmp_path: Path) -> None:
    report = validate(make(tmp_path))
    assert report.ok
    assert (report.records, report.tokens, report.empty_records, report.shards) == (4, 5, 1, 2)
    assert report.complete


def put(name: str, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name][place] = value

    return change


def cut(name: str) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name] = arrays[name][:-1]

    return change


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        del arrays[name]

    return change


def retype(name: str, dtype: str) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name] = arrays[name].astype(dtype)

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (put("offsets", 1, 3), "'offsets' descends"),
        (put("offsets", 0, 1), "'offsets' descends"),
        (put("offsets", 3, 4), "'offsets' descends"),
        (cut("offsets"), "has the shape [3], not [4]"),
        (put("token", 1, 10), "holds the id 10; ids are 0 to 9"),
        (cut("token"), "has the shape [2], not [3]"),
        (cut("depth"), "has the shape [2], not [3]"),
        (cut("level"), "has the shape [2], not [3]"),
        (cut("vector"), "has the shape [2, 2], not [3, 2]"),
        (cut("start"), "has the shape [2], not [3]"),
        (cut("item"), "has the shape [2], not [3]"),
        (retype("token", "<u4"), "holds uint32, not u2"),
        (retype("vector", "<u4"), "holds uint32, not f4"),
        (put("name.offsets", 1, 9), "'name.offsets' descends"),
        (put("name.offsets", 3, 4), "'name.offsets' descends"),
        (put("name.offsets", 0, 1), "'name.offsets' descends"),
        (cut("name.offsets"), "has the shape [3], not [4]"),
        (drop("depth"), "'depth' is missing"),
        (drop("name.offsets"), "'name.offsets' is missing"),
        (lambda arrays: arrays.update(vector=arrays["vector"][:, :1].copy()), "vector"),
        (put("item", 0, 7), "input is not in the receipt"),
    ],
)
def test_damage_in_the_arrays(tmp_path: Path, change: Any, what: str) -> None:
    store = make(tmp_path)
    rewrite(store, change)
    report = validate(Store(tmp_path))
    assert [Path(problem.remove).stem for problem in report.problems] == [store.shards[0].name]
    assert what in report.problems[0].what


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (put("name", 1, 2), "strings of 'name' that are not in its table"),
        (cut("name"), "has the shape [8], not [9]"),
        (put("name.values.offsets", 1, 99), "'name.values.offsets' descends"),
        (cut("name.values"), "'name.values.offsets' descends"),
        (drop("name.values"), "'name.offsets' is missing"),
        (drop("name.values.offsets"), "'name.values.offsets' is missing"),
    ],
)
def test_damage_in_a_table_of_strings(tmp_path: Path, change: Any, what: str) -> None:
    rows = [rec([1], name="a name that is long" * (1 + i % 2)) for i in range(9)]
    store = write_store(tmp_path, {"token": Column("u2"), "name": Column("utf8", "record")}, [rows])
    assert validate(store).ok
    assert "name.values" in store.shard(0)
    rewrite(store, change)
    report = validate(Store(tmp_path))
    assert [Path(problem.remove).stem for problem in report.problems] == [store.shards[0].name]
    assert what in report.problems[0].what
    with pytest.raises(TokmillError, match="the shard is damaged"):
        list(Store(tmp_path))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (put("phrase", 0, 7), "not in its table"),
        (put("phrase", 0, 1), "phrases and token counts disagree"),
        (put("phrase_offsets", 1, 3), "phrases"),
        (cut("phrase"), "'phrase_offsets' descends"),
        (put("table_offsets", 1, 5), "'table_offsets' descends"),
        (cut("table.asm"), "'table_offsets' descends"),
        (cut("side"), "has the shape [3], not [4]"),
    ],
)
def test_damage_in_the_phrases(tmp_path: Path, change: Any, what: str) -> None:
    table = {"asm": [[1, 2], [3]], "type": [[0, 1], [1]]}
    rows = [
        {"phrases": [(0, True), (1, False)], "side": [0, 1, 0], "address": 5},
        {"phrases": [(1, True)], "side": [1], "address": 7},
    ]
    store = write_store(tmp_path, PHRASES, [rows], table=table)
    assert validate(store).ok
    rewrite(store, change)
    problems = validate(Store(tmp_path)).problems
    assert len(problems) == 1
    assert what in problems[0].what


def test_damage_to_the_files(tmp_path: Path) -> None:
    def broken(name: str) -> tuple[Store, Path]:
        store = make(tmp_path / name)
        return store, store.path / "shards" / f"{store.shards[0].name}{SUFFIX}"

    def only_problem(store: Store) -> str:
        problems = validate(Store(store.path)).problems
        assert len(problems) == 1, problems
        return problems[0].what

    store, path = broken("missing")
    path.unlink()
    assert only_problem(store) == "the shard is missing"
    store, path = broken("short")
    path.write_bytes(path.read_bytes()[:-1])
    assert "bytes instead of" in only_problem(store)
    store, path = broken("flipped")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "sha256 differs" in only_problem(store)
    store, path = broken("receipt")
    path.with_suffix(".json").unlink()
    assert only_problem(store) == "the receipt is missing"
    store, path = broken("unreadable receipt")
    path.with_suffix(".json").write_text("{")
    assert "cannot be read" in only_problem(store)
    store, path = broken("receipt of another")
    other = store.path / "shards" / f"{store.shards[1].name}.json"
    path.with_suffix(".json").write_bytes(other.read_bytes())
    assert "contradict" in only_problem(store)
    store, path = broken("vocabulary")
    (store.path / "vocab/tokenizer.json").unlink()
    assert "vocabulary 'token' is missing" in only_problem(store)
    store, path = broken("other vocabulary")
    (store.path / "vocab/tokenizer.json").write_text("[]")
    assert "not the one of the plan" in only_problem(store)
    store, path = broken("stray")
    (path.parent / "notes.txt").write_text("mine")
    assert validate(store).ok
    (path.parent / f"{'0123' * 6}.safetensors").write_text("")
    assert "belongs to no shard" in only_problem(store)
    store, path = broken("leftover")
    (path.parent / ".tmp-x.safetensors-1-2").write_text("")
    assert validate(Store(store.path)).ok


@pytest.mark.parametrize("name", ["records", "tokens", "bytes"])
def test_totals_that_do_not_add_up(tmp_path: Path, name: str) -> None:
    store = make(tmp_path)
    change_sealed(tmp_path / "manifest.json", **{name: getattr(store.manifest, name) + 1})
    problems = validate(Store(tmp_path)).problems
    assert [problem.what.partition(":")[0] for problem in problems] == [name]
