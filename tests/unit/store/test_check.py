"""Shards whose bytes have changed are told while they are read, and each is hashed once."""

from pathlib import Path

import pytest

import tokmill
from tokmill.base.errors import TokmillError
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    paths = []
    for number in range(4):
        path = tmp_path / f"{number}.txt"
        path.write_text("".join(f"document {number} {i} of some words\n" for i in range(99)) * 60)
        paths.append(path)
    tokenizer = tokmill.train_tokenizer(["document of some words\n"], 260)
    tokenizer.save(tmp_path / "tokenizer.json")
    folder = tmp_path / "store"
    return tokmill.build("text", paths, folder, tokenizer=tmp_path / "tokenizer.json")


def shard(store: Store, number: int) -> Path:
    return store.path / "shards" / f"{store.shards[number].name}.safetensors"


def flip(path: Path) -> None:
    """Change a bit of what a shard holds, and leave its size and its header as they are."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_changed_shard_is_told(store: Store) -> None:
    path = shard(store, len(store.shards) - 1)
    flip(path)
    opened = Store(store.path)
    with pytest.raises(TokmillError, match="sha256 differs") as found, ShardCheck([opened]):
        opened.offsets()
    assert found.value.where == str(path.absolute())
    assert "same `tokmill build`" in found.value.hint


def test_damage_is_told_while_the_block_runs(store: Store) -> None:
    flip(shard(store, 0))
    opened = Store(store.path)
    opened.offsets()
    check = ShardCheck([opened])
    with pytest.raises(TokmillError, match="sha256 differs"), check:
        check._thread.join()
        check.tell()
        pytest.fail("it was told")


def test_an_error_in_the_block_is_not_hidden(store: Store) -> None:
    flip(shard(store, 0))
    with pytest.raises(ZeroDivisionError), ShardCheck([store]):
        store.offsets()
        raise ZeroDivisionError
