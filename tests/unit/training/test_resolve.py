"""What a training is asked to be: where its recipe comes from, and paths that stay true."""

import shutil
from pathlib import Path

import pytest

import tokmill
from tokmill.base.errors import TokmillError, UsageError
from tokmill.training.recipe.resolve import notes, resolve
from toy import cycles, make_store, recipe


def test_places_are_absolute(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    near, far = "near", str(tmp_path / "near")
    (tmp_path / "near").symlink_to(store)
    (tmp_path / "first").mkdir()
    options = {"data": {"train": [near, near], "val": near}, "run": {"start": "first"}}
    config = resolve({}, tmp_path / "run", options)
    assert config.data.stores == (far, far) and config.data.val == far
    assert config.run.start == str(tmp_path / "first")
    # Also where the key stands without its table.
    config = resolve({"train": near}, tmp_path / "run", {"start": "first"})
    assert (config.data.train, config.run.start) == (far, str(tmp_path / "first"))


def test_a_resume_knows_where_the_stores_are(store: Path, tmp_path: Path) -> None:
    both = [str(store), str(make_store(tmp_path / "other", cycles(9, seed=2)))]
    plain = recipe(store, 2, data={"train": both, "val": str(store)})
    tokmill.train(plain, tmp_path / "run", quiet=True)
    again = resolve({"steps": 7}, tmp_path / "run", {})
    assert (again.data.stores, again.data.val) == (tuple(both), str(store))
    assert resolve(None, tmp_path / "run", {}).run.steps == 2
    # Moved stores are named; the order of several is part of what they are.
    moved = shutil.move(tmp_path / "other", tmp_path / "moved")
    options = {"data": {"train": [str(store), str(moved)]}}
    tokmill.train(None, tmp_path / "run", options=options, quiet=True)
    with pytest.raises(TokmillError, match="fingerprint"):
        options = {"data": {"train": [str(moved), str(store)]}}
        tokmill.train(None, tmp_path / "run", options=options, quiet=True)


def test_stores_are_named_in_one_way(tmp_path: Path) -> None:
    first = make_store(tmp_path / "first", cycles(3))
    second = make_store(tmp_path / "second", cycles(3, seed=1))
    options = {"data": {"train": [str(first), str(second)]}}
    assert resolve(None, tmp_path / "run", options).data.stores == (str(first), str(second))
    with pytest.raises(UsageError, match="named twice") as caught:
        resolve(first, tmp_path / "run", options)
    assert "--data A --data B" in caught.value.hint


def test_notes_on_what_is_seldom_meant(tmp_path: Path) -> None:
    store = str(make_store(tmp_path / "store", cycles(3)))
    options = {"data": {"train": [store, store], "val": store}, "run": {"steps": 20}}
    said = notes(resolve(None, tmp_path / "run", options))
    assert [word in " ".join(said) for word in ("also a training store", "named twice", "20")] == [
        True
    ] * 3
    fair = {"data": {"train": store}, "run": {"steps": 100}}
    assert notes(resolve(None, tmp_path / "run", fair)) == []
    idle = fair | {"engine": {"deepspeed": {"zero_optimization": {"stage": 3}}}}
    (said,) = notes(resolve(None, tmp_path / "run", idle))
    assert said.startswith("[engine.deepspeed] is not used, because run.engine is 'auto'")
