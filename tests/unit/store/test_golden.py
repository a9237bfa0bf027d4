"""A store that was made once: every later program reads it and makes the same bytes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import golden_store
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store
from tokmill.text.tokenizers.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def store() -> Store:
    return Store(GOLDEN / "store-v2")


def test_its_numbers(store: Store) -> None:
    manifest = store.manifest
    assert (manifest.complete, manifest.source) == (True, "jsonl")
    assert (manifest.records, manifest.tokens, len(manifest.shards)) == (26, 912, 3)
    assert manifest.fingerprint == (
        "030efd41c4f6e12d21b409b7db7d27330f4a961fe8174f270460133941d599f1"
    )
    assert manifest.skipped == {"blank line": 1, "placeholder": 1}
    assert manifest.rejected == {"json": 1, "type": 1}
    assert validate(store).problems == []


def test_its_records(store: Store) -> None:
    tokenizer = Tokenizer.from_file(store.vocabulary_file("token"))
    eot = store.vocabularies["token"].role("eot")
    lines = [
        json.loads(line)
        for name in FILES
        for line in (GOLDEN / name).read_text("utf-8-sig").splitlines()
        if line.startswith("{") and len(line) > 1
    ]
    wanted = [line for line in lines if line["text"] not in ("[removed]", 5)]
    assert len(store) == len(wanted)
    for record, line in zip(store, wanted, strict=True):
        *ids, last = record["token"].tolist()
        text = "\n".join(line[name] for name in ("title", "text") if name in line)
        assert tokenizer.decode(ids) == text
        assert last == eot
        assert record["url"] == line.get("url", "")
        assert record.get("kind", "") == line.get("kind", "")
        assert record["id"] == ("" if line["id"] is None else str(line["id"]))


def test_it_is_read_with_numpy_alone(store: Store) -> None:
    """As docs/store-format.md says it: the header's length, the header, the arrays."""
    lengths = []
    for entry in json.loads((store.path / "manifest.json").read_bytes())["shards"]:
        data = (store.path / "shards" / f"{entry[0]}.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        first, last = header["offsets"]["data_offsets"]
        assert header["offsets"]["dtype"] == "U64"
        offsets = np.frombuffer(data[8 + size + first : 8 + size + last], "<u8")
        lengths += np.diff(offsets).tolist()
    assert lengths == np.diff(store.ends(), prepend=0).tolist()


def test_a_build_of_its_input_gives_the_same_bytes(tmp_path: Path) -> None:
    store = golden_store.build(tmp_path / "s")
    assert golden_store.anywhere(store.path) == golden_store.anywhere(GOLDEN / "store-v2")


def test_strings_lie_in_both_ways(store: Store) -> None:
    coded = {f"{name}.values" in store.shard(i) for name in ("id", "kind") for i in range(3)}
    assert coded == {True, False}


def test_references() -> None:
    store = Store(GOLDEN / "store-v2", ["pairs"])
    assert store.column("anchor").tolist() == [*range(25, -1, -1)]
    assert store.column("positive").tolist() == [(i + 5) % 26 for i in range(26)]
    assert store.reference("anchor").fingerprint == store.fingerprint


def test_a_copy_elsewhere_is_the_same_store(tmp_path: Path, store: Store) -> None:
    shutil.copytree(store.path, tmp_path / "moved")
    assert validate(Store(tmp_path / "moved")).ok


FILES = ("input/a.jsonl", "input/b.jsonl", "input/deep/c.jsonl", "more.jsonl")
