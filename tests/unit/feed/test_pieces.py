"""The order of the pieces, and the file in the store's `cache/` that keeps it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from making import files_of, quick_build, token_store
from tokmill.feed.packed import Packed, pieces_of
from tokmill.report.describe.inspect import describe
from tokmill.store.checks.validate import validate
from tokmill.store.shards.shard import SUFFIX
from tokmill.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three shards; the third one holds most of the documents."""
    rng = np.random.default_rng(1)
    shards = [rng.integers(0, 30, count).tolist() for count in (20, 1, 60)]
    return token_store(tmp_path / "store", [[[5] * n for n in shard] for shard in shards])


def rows_of(store: Store) -> list[list[int]]:
    """All spans of an epoch, of rows in three groups."""
    rows = Packed(Store(store.path), 12, overlap=1, shards=1, seed=7)
    spans = rows.spans(np.arange(len(rows)), 1)
    return [spans.row.tolist(), spans.record.tolist(), spans.start.tolist(), spans.stop.tolist()]


def kept(store: Store) -> list[Path]:
    """The files in `cache/` that are the feed's."""
    return sorted(p for p in (store.path / "cache").iterdir() if p.name != "stamps.jsonl")


def test_the_file_gives_the_rows_that_were_made(store: Store) -> None:
    made = rows_of(store)
    (path,) = kept(store)
    assert path.name == f"pieces-{store.fingerprint[:16]}-12-1-1-7{SUFFIX}"
    before = path.stat()
    assert rows_of(store) == made
    assert path.stat() == before
    read = pieces_of(store, 12, 1, 1, 7)
    assert not read.documents.flags.writeable
    assert not read.documents.flags.owndata
    path.unlink()
    assert rows_of(store) == made


def test_other_rows_have_files_of_their_own(store: Store) -> None:
    Packed(store, 12)
    Packed(store, 12, seed=5)
    assert len(kept(store)) == 1
    for count, options in enumerate(({"overlap": 1}, {"shards": 2}, {"shards": 2, "seed": 5}), 2):
        Packed(store, 12, **options)
        assert len(kept(store)) == count
    Packed(store, 13)
    assert len(kept(store)) == 5


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "short": lambda data: data[:-1],
    "long": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "random": lambda data: np.random.default_rng(0).bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(store: Store, damage: str) -> None:
    made = rows_of(store)
    (path,) = kept(store)
    sound = path.read_bytes()
    path.write_bytes(DAMAGE[damage](sound))
    assert rows_of(store) == made
    assert path.read_bytes() == sound


def test_a_file_of_something_else_is_made_again(store: Store) -> None:
    made = rows_of(store)
    (path,) = kept(store)
    sound = path.read_bytes()
    shard = store.path / "shards" / f"{store.shards[0].name}{SUFFIX}"
    other = token_store(store.path.with_name("other"), [[[1, 2]]])
    Packed(other, 12, overlap=1, shards=1, seed=7)
    for wrong in (shard, kept(other)[0]):
        shutil.copy(wrong, path)
        assert rows_of(store) == made
        assert path.read_bytes() == sound


def test_where_nothing_can_be_written(store: Store) -> None:
    made = rows_of(store)
    (path,) = kept(store)
    # Nobody may write here, not even root: a folder has the name of the file.
    path.unlink()
    path.mkdir()
    (path / "full").touch()
    assert rows_of(store) == made
    assert kept(store) == [path]
    shutil.rmtree(path.parent)
    path.parent.touch()
    assert rows_of(store) == made
    assert path.parent.read_bytes() == b""


def test_a_store_that_was_built_anew_has_a_new_file(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for count in (3, 5):
        store = token_store(folder, [[[1] * n for n in range(count)]])
        for length in (4, 5):
            assert Packed(store, length).tokens == sum(range(count))
        assert [path.name.split("-")[1] for path in kept(store)] == [store.fingerprint[:16]] * 2


def test_builds_and_checks_let_the_file_be(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("one<|endoftext|>two and three<|endoftext|>four")
    store = quick_build("text", source, tmp_path / "store")
    before, facts = files_of(store.path), describe(store.path)
    Packed(store, 5)
    (path,) = kept(store)
    leftover = path.with_name(f".tmp-{path.name}-1-01234567")
    leftover.touch()
    assert validate(store).ok
    assert describe(store.path) == facts
    again = quick_build("text", source, tmp_path / "store")
    assert again.fingerprint == store.fingerprint
    assert files_of(store.path) == before
    # What a killed writer left behind is swept away by the next build.
    assert kept(store) == [path]
    merged = quick_build("select", tmp_path / "store", tmp_path / "merged")
    assert merged.records == store.records
