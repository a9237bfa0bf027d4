"""Overlays: further columns of a finished store, which itself stays as it is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import tokmill
from making import change_sealed, files_of, here, rec, token_store, write_store
from phrase_records import PHRASES, expand, shards
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.feed.feed import Feed
from tokmill.feed.rows import Windows
from tokmill.store.checks.stats import statistics
from tokmill.store.checks.validate import validate
from tokmill.store.overlay import ListedOverlay, find_overlays, overlay_path
from tokmill.store.store import Store

RECORDS = [[[1, 2, 3], [], [4]], [], [[5, 6], [7, 8, 9, 10]]]
"""Three shards, one of them without a record."""


def lay(store: Store, name: str, values: Any, **options: Any) -> Store:
    """Make an overlay from an array."""
    file = store.path.parent / f"{name}.npy"
    np.save(file, np.asarray(values))
    how = How(quiet=True, amount=here(), yes=True)
    return tokmill.build("overlay", store.path, values=str(file), how=how, **options)


def base_files(path: Path) -> dict[str, bytes]:
    """The files of a store without those of its overlays."""
    return {n: data for n, data in files_of(path).items() if not n.startswith("overlays/")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return token_store(tmp_path / "s", RECORDS)


def test_columns_of_overlays_are_columns_of_the_store(store: Store) -> None:
    before = base_files(store.path)
    lay(store, "mask", np.arange(10) % 2, column="loss")
    lay(store, "vectors", np.arange(10, dtype=np.float32).reshape(5, 2), column="v")
    plain = Store(store.path)
    assert list(plain.schema) == ["token"] and base_files(store.path) == before
    opened = Store(store.path, ["mask", "vectors"])
    assert list(opened.schema) == ["token", "loss", "v"]
    assert opened.token_columns == ["token", "loss"]
    assert opened.manifest.ranges["loss"] == (0, 1)
    assert (opened.fingerprint, len(opened)) == (plain.fingerprint, 5)
    found = opened.record(4)
    assert found["token"].tolist() == [7, 8, 9, 10] and found["loss"].tolist() == [0, 1, 0, 1]
    assert found["v"].tolist() == [8, 9] and opened.record(1)["loss"].tolist() == []
    assert opened.column("v").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    flat = [batch.columns["loss"].tolist() for _, _, batch in opened.batches(2)]
    assert sum(flat, []) == [0, 1] * 5
    feed = Feed(Windows(opened, 4), 3, shuffle=False)
    batch = feed.batch(0)
    assert batch.columns["token"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert batch.columns["loss"].tolist() == [[0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 0]]
    assert statistics(opened).columns["loss"].unique == 2


def test_what_is_read_has_a_digest_of_its_own(store: Store) -> None:
    """The fingerprint is that of the store alone; what a run learns from is more."""
    lay(store, "mask", np.arange(10) % 2, column="loss")
    plain, opened = Store(store.path), Store(store.path, ["mask"])
    assert plain.content == plain.fingerprint == opened.fingerprint != opened.content
    lay(store, "mask", np.arange(10) % 3 == 0, column="loss")
    assert Store(store.path, ["mask"]).content != opened.content


@given(shards())
@settings(max_examples=20, deadline=None)
def test_over_phrases(tmp_path_factory: pytest.TempPathFactory, made: Any) -> None:
    """Tokens of an overlay are those of the phrases, wherever a span begins."""
    table, rows = made
    lengths = [len(row["side"]) for row in rows]
    if not sum(lengths) or sum(lengths) == len(rows):
        return
    base = write_store(tmp_path_factory.mktemp("p") / "s", PHRASES, [rows], table=table)
    lay(base, "mask", np.arange(sum(lengths)) % 5, column="mask", per="token")
    opened = Store(base.path, ["mask"])
    flat: dict[str, list[int]] = {"asm": [], "mask": []}
    for number, row in enumerate(rows):
        flat["asm"] += expand(table, row)["asm"]
        flat["mask"] += opened.record(number)["mask"].tolist()
    assert flat["mask"] == [i % 5 for i in range(sum(lengths))]
    feed = Feed(Windows(opened, 3), 1, shuffle=False, columns=["asm", "mask"])
    for row in range(len(feed)):
        batch = feed.batch(row)
        for name, values in flat.items():
            wanted = values[3 * row : 3 * row + 3]
            assert batch.columns[name][0, : len(wanted)].tolist() == wanted


def test_an_overlay_lies_beside_the_shards(store: Store) -> None:
    """It is a store of its own, whose manifest names the base's fingerprint."""
    made = lay(store, "mask", np.arange(10) % 2)
    assert made.path == store.path / "overlays/mask"
    assert [(e.records, e.tokens) for e in made.shards] == [(3, 4), (0, 0), (2, 6)]
    manifest = json.loads((made.path / "manifest.json").read_text())
    assert manifest["overlay"] == {"base": store.fingerprint}
    assert "overlay" not in json.loads((store.path / "manifest.json").read_text())
    with pytest.raises(UsageError, match="an overlay itself"):
        lay(Store(made.path), "more", np.arange(10))


def test_an_overlay_of_another_fingerprint_is_stale(store: Store) -> None:
    made = lay(store, "mask", np.arange(10) % 2)
    token_store(store.path, [*RECORDS[:2], [[5, 6], [7, 8, 9, 11]]])
    with pytest.raises(TokmillError, match="has changed since the overlay") as error:
        Store(store.path, ["mask"])
    for part in ("tokmill build overlay", str(store.path), "--name mask", "--yes"):
        assert part in error.value.hint
    assert find_overlays(Store(store.path)) == [ListedOverlay("mask", "mask", "stale")]
    problems = validate(Store(store.path)).problems
    assert [one.where for one in problems] == [str(made.path)]
    assert "has changed" in problems[0].what
    assert problems[0].hint.split("`")[1] == error.value.hint.split("`")[1]
    # Made again, it fits; of three shards two were as before.
    kept = {path.name for path in made.path.glob("shards/*")}
    lay(store, "mask", np.arange(10) % 2)
    assert Store(store.path, ["mask"]).record(4)["mask"].tolist() == [0, 1, 0, 1]
    assert len(kept & {path.name for path in made.path.glob("shards/*")}) == 4
    assert validate(Store(store.path)).ok


def test_an_overlay_that_is_not_complete(store: Store) -> None:
    made = lay(store, "mask", np.arange(10) % 2)
    (made.path / "manifest.json").unlink()
    next(made.path.glob("shards/*.json")).unlink()
    with pytest.raises(TokmillError, match="is not complete") as error:
        Store(store.path, ["mask"])
    assert "--name mask" in error.value.hint
    assert find_overlays(Store(store.path)) == [ListedOverlay("mask", "mask", "partial")]
    assert validate(Store(store.path)).ok


def test_names(store: Store) -> None:
    lay(store, "mask", np.arange(10) % 2)
    with pytest.raises(TokmillError, match="no overlay 'maks'") as error:
        Store(store.path, ["maks"])
    assert error.value.hint == "did you mean 'mask'?"
    lay(store, "again", np.arange(10) % 3, column="mask")
    with pytest.raises(TokmillError, match="a column 'mask', which the store has already"):
        Store(store.path, ["mask", "again"])
    with pytest.raises(UsageError, match="the store has a column 'token' already"):
        lay(store, "token", np.arange(10))
    for name in ("../mask", ".mask", "", "a b"):
        with pytest.raises(UsageError, match="cannot be called"):
            overlay_path(store.path, name)


def test_a_folder_that_is_no_overlay(store: Store) -> None:
    token_store(store.path / "overlays/odd", RECORDS)
    with pytest.raises(TokmillError, match="not an overlay"):
        Store(store.path, ["odd"])
    assert "not an overlay" in validate(store).problems[0].what


def test_damage_is_found_and_mended(store: Store) -> None:
    made = lay(store, "mask", np.arange(10) % 2)
    shard = made.path / f"shards/{made.shards[0].name}.safetensors"
    whole = files_of(made.path)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\7")
    # An opened overlay is checked no less than one that is not.
    for opened in (Store(store.path), Store(store.path, ["mask"])):
        problems = validate(opened).problems
        assert [one.where for one in problems] == [str(shard)]
        assert problems[0].remove == str(shard) and "build overlay" in problems[0].hint
    shard.unlink()
    lay(store, "mask", np.arange(10) % 2)
    assert files_of(made.path) == whole and validate(Store(store.path)).ok


def test_records_of_other_lengths_are_a_problem(store: Store, tmp_path: Path) -> None:
    """As many records and tokens in each shard, and another border between two of them."""
    lay(store, "mask", np.arange(10) % 2)
    other = token_store(tmp_path / "other", [[[1, 2], [3], [4]], [], RECORDS[2]])
    made = lay(other, "mask", np.arange(10) % 2)
    for name in ("manifest.json", "plan.json"):
        path = made.path / name
        if path.exists():
            text = path.read_text().replace(other.fingerprint, store.fingerprint)
            path.write_text(text)
            change_sealed(path)
    (store.path / "overlays/mask").rename(tmp_path / "away")
    made.path.rename(store.path / "overlays/mask")
    assert ["other lengths" in one.what for one in validate(store).problems] == [True]


def test_maps_are_let_go_with_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that holds few maps reads its overlays all the same."""
    from tokmill.store import store as stores

    monkeypatch.setattr(stores, "most_maps", lambda: 2)
    base = token_store(tmp_path / "s", [[[i, i]] for i in range(6)])
    lay(base, "mask", np.arange(12))
    opened = Store(base.path, ["mask"])
    for _ in range(2):
        assert [r["mask"].tolist() for r in opened] == [[2 * i, 2 * i + 1] for i in range(6)]
    assert len(opened._mapped) == len(opened.overlays["mask"]._mapped) == 2


def test_an_unfinished_store_gets_no_overlay(store: Store) -> None:
    (store.path / "manifest.json").unlink()
    next(store.path.glob("shards/*.json")).unlink()
    with pytest.raises(TokmillError, match="not complete"):
        lay(store, "mask", np.arange(10))
    assert not (store.path / "overlays").exists()


def test_records_of_strings_stay_as_they_are(tmp_path: Path) -> None:
    from tokmill.store.schema import Column

    schema = {"token": Column("u2"), "name": Column("utf8", per="record")}
    base = write_store(tmp_path / "s", schema, [[rec([1, 2], name="é"), rec([3], name="b")]])
    lay(base, "label", [3, -1])
    opened = Store(base.path, ["label"])
    assert [(r["name"], int(r["label"])) for r in opened] == [("é", 3), ("b", -1)]
    assert opened.schema["label"].dtype == "i8"
