"""What is not ours is neither taken for a store, nor replaced, nor removed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from making import jsonl, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.store.checks.validate import validate
from tokmill.store.marks import is_run, is_store, kind_of
from tokmill.store.store import Store

FRESH = How(quiet=True, fresh=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small input."""
    return jsonl(tmp_path / "x.jsonl", [{"text": f"record {i}"} for i in range(20)])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


PAGES = {
    "manifest.json": '{"name": "my web app", "icons": [], "format": 1}',
    "plan.json": '{"plan": ["milk", "eggs"]}',
    "cache/photo.jpg": "photo",
    "vocab/words.txt": "a\nb\n",
    "vocab/tokenizer.json": "{}",
    "shards/0.txt": "mine",
    "overlays/a/thesis.tex": "mine",
    "events.jsonl": "{}\n",
    "inputs.jsonl": "[]\n",
    ".lock": "",
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", [name for name in PAGES if name[0] != "."])
def test_a_folder_of_others_is_no_store(
    name: str, fresh: bool, source: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    (mine / name).parent.mkdir(parents=True)
    (mine / name).write_text(PAGES[name])
    (mine / ".lock").write_text(PAGES[".lock"])
    before = contents(mine)
    with pytest.raises(UsageError, match="holds no store"):
        quick_build("jsonl", source, mine, how=FRESH if fresh else None)
    assert contents(mine) == before


def put_in(store: Path) -> dict[Path, bytes]:
    """Put files of the user into all folders of a store, and return them."""
    names = ["notes.txt", "shards/notes.txt", "vocab/words.txt", "cache/thesis.doc"]
    names += ["overlays/mine/a.npy", "cache/again/x", "shards/deep/y", "thesis.tmp-1.doc"]
    for name in names:
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text("mine")
    return {store / name: b"mine" for name in names}


def test_files_of_the_user_in_a_store_stay(source: Path, tmp_path: Path) -> None:
    """Through builds that begin anew, grow, and are made by another recipe."""
    store = quick_build("jsonl", source, tmp_path / "s").path
    mine = put_in(store)
    quick_build("jsonl", source, store)
    jsonl(source, [{"text": "all is new"}])
    quick_build("jsonl", source, store, how=How(yes=True, quiet=True))
    quick_build("jsonl", source, store, how=FRESH, keep=["text"])
    assert {path: path.read_bytes() for path in mine} == mine
    assert len(Store(store)) == 1
    shards = [path.name for path in (store / "shards").glob("*.safetensors")]
    assert len(shards) == 1


@pytest.mark.parametrize("name", ["shards", "vocab", "cache", "overlays"])
def test_a_folder_of_a_store_that_is_a_link_is_refused_before_anything_is_done(
    name: str, source: Path, tmp_path: Path
) -> None:
    store = quick_build("jsonl", source, tmp_path / "s").path
    elsewhere = tmp_path / "elsewhere"
    if (store / name).exists():
        shutil.move(store / name, elsewhere)
    else:
        elsewhere.mkdir()
        (elsewhere / "mine").write_text("mine")
    (store / name).symlink_to(elsewhere)
    before = contents(tmp_path)
    for how in (None, FRESH):
        with pytest.raises(UsageError, match="is a link"):
            quick_build("jsonl", source, store, how=how)
    assert contents(tmp_path) == before


def test_a_store_that_was_stopped_before_its_plan_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock says whose it is."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr("tokmill.builds.folder.write_plan", killed)
        with pytest.raises(KeyboardInterrupt):
            quick_build("jsonl", source, tmp_path / "s")
    assert (tmp_path / "s/vocab/tokenizer.json").exists()
    assert validate(quick_build("jsonl", source, tmp_path / "s")).ok


def test_a_store_without_its_plan_or_with_an_old_lock_is_ours(source: Path, tmp_path: Path) -> None:
    store = quick_build("jsonl", source, tmp_path / "s").path
    (store / ".lock").write_text("")
    assert is_store(store)
    (store / "plan.json").unlink()
    assert is_store(store)
    with pytest.raises(TokmillError, match="no plan.json"):
        quick_build("jsonl", source, store, strip=True)
    assert len(quick_build("jsonl", source, store)) == 20
    (store / "plan.json").unlink()
    assert len(quick_build("jsonl", source, store, how=FRESH)) == 20


def test_marks_are_content(source: Path, tmp_path: Path) -> None:
    store = quick_build("jsonl", source, tmp_path / "s").path
    assert kind_of(store, ["manifest.json"]) == "store"
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("plan.json", "manifest.json", "recipe.json", "schema.json", "metrics.jsonl"):
        (mine / name).write_text('{"format": 1}\n')
        assert not is_store(mine) and not is_run(mine)
    (mine / ".lock").write_text("somebody's")
    assert kind_of(mine, [path.name for path in mine.iterdir()]) == ""
    for name in ("recipe.json", "schema.json"):
        (mine / name).write_text("[" * 100_000)
    assert not is_run(mine)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:600], lambda data: data.replace(b'"source"', b'"sour\xff"')]
)
def test_a_damaged_store_is_still_ours(
    damage: Callable[[bytes], bytes], source: Path, tmp_path: Path
) -> None:
    store = quick_build("jsonl", source, tmp_path / "s").path
    for name in ("plan.json", "manifest.json"):
        (store / name).write_bytes(damage((store / name).read_bytes()))
    assert len(quick_build("jsonl", source, store, how=FRESH)) == 20


def test_a_file_of_the_user_in_shards_does_not_block_starting_over(
    source: Path, tmp_path: Path
) -> None:
    """--fresh removed the store, kept the file, and then asked for --fresh."""
    store = quick_build("jsonl", source, tmp_path / "s")
    mine = store.path / "shards/thesis.safetensors"
    mine.write_text("mine")
    assert quick_build("jsonl", source, tmp_path / "s", how=FRESH).records == 20
    assert mine.read_text() == "mine"
