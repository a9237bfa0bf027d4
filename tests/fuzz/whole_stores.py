"""A small store, and all that reads one whole."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from reader import Make
from small_recipes import TEXTS

from making import jsonl, quick_build, rec, token_store, write_store
from phrase_records import PHRASES
from tokmill.base.errors import TokmillError
from tokmill.store.checks.stats import statistics
from tokmill.store.checks.validate import validate
from tokmill.store.schema import Column
from tokmill.store.store import Store


def make_store(folder: Path) -> None:
    jsonl(folder / "in.jsonl", [{"text": text, "id": str(i)} for i, text in enumerate(TEXTS)])
    quick_build("jsonl", folder / "in.jsonl", folder / "s", keep=["id"])


def store_files(*patterns: str) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        make_store(folder)
        return [path for pattern in patterns for path in sorted((folder / "s").glob(pattern))]

    return make


class Refused(TokmillError):
    """What a report of problems is here: an answer that tells of damage."""


def contents(store: Store) -> Any:
    return [{name: np.asarray(v).tolist() if not isinstance(v, str) else v
             for name, v in record.items()} for record in store]  # fmt: skip


def read_validated(folder: Path) -> Any:
    """`store validate`, and what the store then holds."""
    store = Store(folder / "s")
    report = validate(store)
    if not report.ok:
        raise Refused(report.problems[0].what, hint="mend it")
    return contents(store)


def read_store(folder: Path) -> Any:
    """All that reads a store without checking it first: records, figures, a feed's columns."""
    store = Store(folder / "s")
    found = contents(store)
    figures = statistics(store)
    batches = [len(batch) for _, _, batch in store.batches(5)]
    offsets = store.offsets().tolist()
    return found, msgspec.json.encode(figures), batches, offsets


def make_phrases(folder: Path) -> Iterable[Path]:
    table = {"asm": [[1], [2, 3], [4, 5, 6]], "type": [[0], [1, 1], [2, 0, 2]]}
    rows = []
    for number in range(12):
        phrases = [(i % 3, i % 2 == 0) for i in range(number % 5)]
        length = sum(len(table["asm"][i]) for i, _ in phrases)
        rows.append({"phrases": phrases, "side": [1] * length, "address": number})
    write_store(folder / "s", PHRASES, [rows], table=table)
    return sorted((folder / "s/shards").glob("*.safetensors"))


def make_strings(folder: Path) -> Iterable[Path]:
    """Shards with a table of strings, and with strings that lie end to end."""
    schema = {
        "token": Column("u2"),
        "name": Column("utf8", "record"),
        "id": Column("utf8", "record"),
    }
    rows = [rec([i], name=("main", "é", "")[i % 3], id=f"number {i}") for i in range(40)]
    store = write_store(folder / "s", schema, [rows])
    assert "name.values" in store.shard(0) and "id.values" not in store.shard(0)
    return [store.shard_file(0)]


def make_references(folder: Path) -> Iterable[Path]:
    """A store whose overlay refers to another."""
    token_store(folder / "other", [[[i] for i in range(9)]])
    token_store(folder / "s", [[[1, 2], [3]], [[4]]])
    np.save(folder / "pairs.npy", np.array([8, 0, 3]))
    quick_build(
        "overlay", folder / "s", "", values=str(folder / "pairs.npy"),
        refer=[f"pairs={folder / 'other'}"],
    )  # fmt: skip
    return sorted((folder / "s/overlays/pairs").glob("*.json"))


def read_references(folder: Path) -> Any:
    """What a column refers to."""
    store = Store(folder / "s", ["pairs"])
    return [
        store.reference("pairs").record(int(i))["token"].tolist() for i in store.column("pairs")
    ]


def whole_again(folder: Path, kept: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)


def read_built(folder: Path) -> Any:
    """The same build again over a damaged store."""
    return contents(quick_build("jsonl", folder / "in.jsonl", folder / "s", keep=["id"]))


def read_looked_up(folder: Path) -> Any:
    from tokmill.builds.remake import left_out

    return str(left_out(Store(folder / "s")))
