"""`build select --near-unique` against the exact similarity of all pairs, on small stores."""

import random
from pathlib import Path
from typing import Any

import pytest

from making import files_of, here, quick_build, rec, write_store
from phrase_records import PHRASES
from tokmill.base.locks import locked
from tokmill.builds import plan
from tokmill.builds.plan import How
from tokmill.store.checks.validate import validate
from tokmill.store.schema import Column
from tokmill.store.store import Store


def shingles(row: Any, size: int) -> set[tuple[int, ...]]:
    row = tuple(row)
    return {row[i : i + size] for i in range(max(1, len(row) - size + 1))} if row else set()


def first_of_the_near(rows: list[list[int]], threshold: float, size: int) -> list[int]:
    """Keep a record unless an earlier kept one is as near, by exact similarity."""
    kept: list[int] = []
    for i, row in enumerate(rows):
        mine = shingles(row, size)
        for j in kept:
            theirs = shingles(rows[j], size)
            either = mine | theirs
            if not either or len(mine & theirs) / len(either) >= threshold:
                break
        else:
            kept.append(i)
    return kept


def families(size: int = 120) -> list[list[int]]:
    """Records, some equal to an earlier one or to one with its last token changed."""
    rng = random.Random(0)
    rows: list[list[int]] = []
    for _ in range(60):
        row = [rng.randrange(10) for _ in range(size)]
        if rows and rng.random() < 0.5:
            row = [*rng.choice(rows)[:-1], rng.randrange(10)]
        rows.append(row)
    return [*rows, [], [1], [], [1], [1, 2]]


def numbered(rows: list[list[int]]) -> list[dict[str, Any]]:
    return [rec(tokens, number=i) for i, tokens in enumerate(rows)]


def make(path: Path, *shards: list[dict[str, Any]]) -> None:
    write_store(path, {"token": Column("u2"), "number": Column("i8", per="record")}, shards)


def numbers(store: Store) -> list[int]:
    return store.column("number").tolist()


def test_near_duplicates_are_those_of_exact_similarity(tmp_path: Path) -> None:
    """One token of 120 is changed, so pairs are far from the threshold on either side."""
    rows = families()
    make(tmp_path / "p", numbered(rows)[:25], [], numbered(rows)[25:])
    store = quick_build("select", tmp_path / "p", tmp_path / "s", near_unique=0.9)
    wanted = first_of_the_near(rows, 0.9, 5)
    assert 20 < len(wanted) < 45
    assert numbers(store) == wanted
    assert store.manifest.skipped == {"near duplicate": len(rows) - len(wanted)}
    assert validate(store).ok


def test_near_duplicates_of_records_that_are_left_out_stay(tmp_path: Path) -> None:
    row = families()[0]
    make(tmp_path / "p", numbered([row, [*row[1:], 3], [*row[1:], 4]]))
    options = {"near_unique": 0.9, "where": ["number > 0"]}
    store = quick_build("select", tmp_path / "p", tmp_path / "s", **options)
    assert numbers(store) == [1]
    assert store.manifest.skipped == {"near duplicate": 1, "not number > 0": 1}


def test_the_length_of_shingles_decides(tmp_path: Path) -> None:
    rows = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 5, 6, 7, 8]]
    make(tmp_path / "p", numbered(rows))
    for size, wanted in ((1, [0]), (5, [0, 1])):
        options = {"near_unique": 0.6, "shingle": size}
        store = quick_build("select", tmp_path / "p", tmp_path / f"{size}", **options)
        assert numbers(store) == wanted == first_of_the_near(rows, 0.6, size)


def test_near_duplicates_are_equal_bytes_for_any_workers_parts_and_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SHARD_BYTES", 1)
    monkeypatch.setattr("tokmill.builds.selection.minhash.BATCH_TOKENS", 500)
    rows = numbered(families())
    make(tmp_path / "a", rows[:20], rows[20:40])
    make(tmp_path / "b", rows[40:])
    both, options = [tmp_path / "a", tmp_path / "b"], {"near_unique": 0.9, "unique": True}
    whole = quick_build("select", both, tmp_path / "whole", **options)
    assert len(whole.shards) == 3
    for part in (2, 1):
        how = How(quiet=True, amount=here(), part=(part, 2))
        quick_build("select", both, tmp_path / "parts", how=how, **options)
    assert files_of(tmp_path / "parts") == files_of(whole.path)
    # What a kill leaves: shards without receipts.
    again = quick_build("select", both, tmp_path / "again", **options)
    for entry in again.shards[:2]:
        (again.path / "shards" / f"{entry.name}.json").unlink()
    (again.path / "manifest.json").unlink()
    quick_build("select", both, tmp_path / "again", **options)
    assert files_of(tmp_path / "again") == files_of(whole.path)
    # Spawned workers know nothing of the batches that are set here.
    how = How(quiet=True, amount=here(workers=2))
    quick_build("select", both, tmp_path / "pool", how=how, **options)
    assert files_of(tmp_path / "pool") == files_of(whole.path)
    monkeypatch.setattr("tokmill.builds.selection.minhash.BATCH_RECORDS", 3)
    quick_build("select", both, tmp_path / "small", **options)
    assert files_of(tmp_path / "small") == files_of(whole.path)


def test_near_duplicates_of_phrases_are_counted_in_phrases(tmp_path: Path) -> None:
    """Instructions of 3 and 4 tokens; with other tables in the shards equal ones stay equal."""
    table = {
        "asm": [[i, i % 7, 3, *([4] * (i % 2))] for i in range(100)],
        "type": [[0, 1, 1, *([0] * (i % 2))] for i in range(100)],
    }
    rng = random.Random(1)
    rows: list[list[int]] = []
    for _ in range(40):
        row = [rng.randrange(100) for _ in range(100)]
        if rows and rng.random() < 0.5:
            row = [rng.randrange(100), *rng.choice(rows)[1:]]
        rows.append(row)
    lengths = [3 + i % 2 for i in range(100)]

    def record(number: int) -> dict[str, Any]:
        tokens = sum(lengths[i] for i in rows[number])
        # The blocks and what is not a part of the phrase differ in every record.
        side = [number % 2] * tokens
        return {"phrases": [(i, i % 3 == number % 3) for i in rows[number]], "side": side}

    shards = [
        [record(i) | {"address": i} for i in part] for part in (range(10), range(10, len(rows)))
    ]
    write_store(tmp_path / "p", PHRASES, shards, table=table)
    store = quick_build("select", tmp_path / "p", tmp_path / "s", near_unique=0.9)
    wanted = first_of_the_near(rows, 0.9, 5)
    assert 10 < len(wanted) < 35
    assert store.column("address").tolist() == wanted
    assert validate(store).ok


def test_repeats_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is kept for the other workers and for a build that goes on."""
    monkeypatch.setattr(plan, "SHARD_BYTES", 1)
    rows = numbered(families())
    make(tmp_path / "p", rows[:30], rows[30:])
    options = {"near_unique": 0.9, "unique": True}
    whole = quick_build("select", tmp_path / "p", tmp_path / "s", **options)
    before = files_of(whole.path)
    (kept,) = (whole.path / "cache").glob("repeats-*")

    def undo() -> None:
        (whole.path / "manifest.json").unlink()
        (whole.path / f"shards/{whole.shards[1].name}.json").unlink()

    def looked(*_: Any) -> Any:
        raise RuntimeError("looked again")

    undo()
    with monkeypatch.context() as patch:
        patch.setattr("tokmill.builds.selection.select.find_repeats", looked)
        quick_build("select", tmp_path / "p", whole.path, **options)
        assert files_of(whole.path) == before
        # Damaged, it is not believed.
        kept.write_bytes(kept.read_bytes()[:-1] + b"\1")
        undo()
        with pytest.raises(RuntimeError, match="looked again"):
            quick_build("select", tmp_path / "p", whole.path, **options)
    quick_build("select", tmp_path / "p", whole.path, **options)
    assert files_of(whole.path) == before
    # Another store of the same shape has a file of its own, in place of the old one.
    make(tmp_path / "p", numbered(families()[::-1])[:30], numbered(families()[::-1])[30:])
    how = How(quiet=True, amount=here(), yes=True)
    quick_build("select", tmp_path / "p", whole.path, how=how, **options)
    (other,) = (whole.path / "cache").glob("repeats-*")
    assert other.name != kept.name
    new = quick_build("select", tmp_path / "p", tmp_path / "new", **options)
    assert files_of(whole.path) == files_of(new.path)


def test_repeats_are_found_where_nothing_can_be_kept(tmp_path: Path) -> None:
    rows = numbered(families())
    make(tmp_path / "p", rows)
    whole = quick_build("select", tmp_path / "p", tmp_path / "s", near_unique=0.9)
    (tmp_path / "full").mkdir()
    with locked(tmp_path / "full/.lock", "", ""):
        (tmp_path / "full/cache").write_text("a file stands where the folder is needed")
    built = quick_build("select", tmp_path / "p", tmp_path / "full", near_unique=0.9)
    assert files_of(built.path) == files_of(whole.path)
