"""Names that come out of files lead to no other place, and only what is ours is removed."""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokmill
from making import jsonl, quick_build
from tokmill.base.errors import TokmillError
from tokmill.base.files import (
    inside,
    is_private,
    private_path,
    remove_leftovers,
    sha256_file,
    write_file,
)
from tokmill.base.locks import is_lock, locked
from tokmill.builds.plan import How
from tokmill.builds.remake import deep_check
from tokmill.store.checks.validate import validate
from tokmill.store.manifest import with_checksum
from tokmill.store.store import Store
from tokmill.store.vocab import Learned, Vocabulary
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import begin, facts_from

SOURCES = Path(tokmill.__file__).parent
OUTSIDE = ["../x", "/tmp/x", "..", ".", "", "a/b", "a\0b", "../../x", "x/../y"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="leads out of the folder"):
        inside(tmp_path, name)


@pytest.mark.parametrize("name", ["x" * 256, "é" * 128, "9" * 70_000])
def test_a_name_that_no_file_has_is_refused(name: str, tmp_path: Path) -> None:
    for deep in (False, True):
        with pytest.raises(TokmillError, match="longer than any"):
            inside(tmp_path, name, deep=deep)
    assert not inside(tmp_path, "x" * 255).exists()


def test_plain_and_deep_names_and_links(tmp_path: Path) -> None:
    assert inside(tmp_path, "a b\n.json") == tmp_path / "a b\n.json"
    assert inside(tmp_path, "a/b", deep=True) == tmp_path / "a/b"
    for name in ("../x", "/x", "a//b", "a/../../x", "a/./b", "a/"):
        with pytest.raises(TokmillError, match="leads out"):
            inside(tmp_path, name, deep=True)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path)
    with pytest.raises(TokmillError, match="through a link"):
        inside(tmp_path / "in", "link/x", deep=True)


NAMED = {"file", "name", "shard", "program"}
"""Attributes that hold what a file says."""
OWN = {
    "base/files.py: folder / entry.name": "what a listing of the folder gave",
    "report/comparison/comparison_table.py: "
    "paths[0].parent / ' + '.join((path.name for path in paths))": (
        "a title of paths that the user named"
    ),
    "training/runs/checkpoint.py: folder / f'{TEMPORARY}{target.name}'": "made of a number",
}


def joins(path: Path) -> Iterator[str]:
    """Yield the places of a source where a name that may be another's is joined to a folder."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = [node.right]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = node.args if node.func.attr == "joinpath" else []
        found = (inner for part in parts for inner in ast.walk(part))
        if any(isinstance(inner, ast.Attribute) and inner.attr in NAMED for inner in found):
            yield f"{path.relative_to(SOURCES).as_posix()}: {ast.unparse(node)}"


def test_every_name_out_of_a_file_goes_through_one_function() -> None:
    """A new place that joins one with `/` is either `files.inside`, or is argued for here."""
    found = {place for path in SOURCES.rglob("*.py") for place in joins(path)}
    assert found == set(OWN)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A small store, in a folder of its own so that what lies beside it is seen."""
    path = jsonl(tmp_path / "x.jsonl", [{"text": f"record {i}"} for i in range(50)])
    return quick_build("jsonl", path, tmp_path / "in/store").path


def change(path: Path, how: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    how(value)
    path.write_text(json.dumps(value))


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder that are not the store's."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "store" not in path.relative_to(folder).parts
    }


@pytest.mark.parametrize("name", ["../../x", "/tmp/tokmill-x"])
@pytest.mark.parametrize("file", ["manifest.json", "plan.json"])
def test_a_vocabulary_cannot_be_written_elsewhere(
    name: str, file: str, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text("mine")
    name = str(tmp_path / "x") if name.startswith("/") else name

    def attack(value: Any) -> None:
        value["vocabularies"]["token"]["file"] = name

    change(store / file, attack)
    before = everything(tmp_path)
    for use in (
        lambda: deep_check(Store(store), 1),
        lambda: quick_build("select", store, tmp_path / "selected/store"),
        lambda: quick_build("jsonl", tmp_path / "x.jsonl", store, how=How(yes=True, quiet=True)),
        lambda: validate(Store(store)),
    ):
        try:
            use()
        except TokmillError as error:
            assert error.hint
    assert everything(tmp_path) == before


def test_a_note_of_a_learned_tokenizer_names_nothing_outside(store: Path, tmp_path: Path) -> None:
    """A note with a right digest, whose names lead out of the folder."""
    (tmp_path / "x").write_text("mine")
    digest = sha256_file(tmp_path / "x")
    for name in ("../../../x", str(tmp_path / "x")):
        write_file(
            store / "vocab/learned.json",
            with_checksum(Learned(vocab_size=300, sha256="0" * 64, files={name: digest})),
        )
        (problem,) = validate(Store(store)).problems
        assert problem.where.endswith("learned.json") and "leads out" in problem.what
        assert (tmp_path / "x").read_text() == "mine"


def test_a_link_in_place_of_an_overlay_is_refused(store: Path, tmp_path: Path) -> None:
    """`--fresh` would remove the files of a store that lies elsewhere."""
    other = quick_build("jsonl", tmp_path / "x.jsonl", tmp_path / "other")
    (store / "overlays").mkdir()
    (store / "overlays/mine").symlink_to(other.path)
    before = everything(tmp_path)
    for use in (
        lambda: quick_build("jsonl", tmp_path / "x.jsonl", store, how=How(fresh=True, quiet=True)),
        lambda: deep_check(Store(store), 1),
    ):
        with pytest.raises(TokmillError, match="is a link"):
            use()
    assert everything(tmp_path) == before


def test_a_run_keeps_vocabularies_in_its_folder(store: Path, tmp_path: Path) -> None:
    """Though the type of the manifest refuses such a name, the writer does too."""
    opened = Store(store)
    evil = Vocabulary("../../x", opened.vocabularies["token"].sha256, 300)
    opened.vocabularies["token"] = evil
    config = from_dict({})
    with pytest.raises(TokmillError, match="leads out"):
        begin(tmp_path / "run", config, [opened], facts_from(config, [opened]))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("where", ["inputs.jsonl", "manifest.json", "receipt"])
def test_a_shard_cannot_be_written_elsewhere(where: str, store: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    for suffix in (".safetensors", ".json"):
        victim.with_suffix(suffix).write_text("mine")
    before = everything(tmp_path)
    if where == "inputs.jsonl":
        lines = [json.loads(line) for line in (store / where).read_text().splitlines()]
        for line in lines:
            line[5] = str(victim)
        (store / where).write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif where == "manifest.json":
        change(store / where, lambda value: value["shards"][0].__setitem__(0, str(victim)))
    else:
        receipt = next((store / "shards").glob("*.json"))
        change(receipt, lambda value: value.update(shard="../../victim"))
    for use in (
        lambda: deep_check(Store(store), 1),
        lambda: list(Store(store)),
    ):
        try:
            use()
        except TokmillError as error:
            assert error.hint
    assert everything(tmp_path) == before


def test_shards_of_a_checkpoint_are_read_from_its_folder(tmp_path: Path) -> None:
    from tokmill.training.runs.exchange import INDEX, read_weights

    index = {"weight_map": {"a": "../other.safetensors"}, "metadata": {}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(TokmillError, match="leads out"):
        read_weights(tmp_path)


MINE = ["thesis.tmp-1.doc", ".tmp-notes", ".tmp-a-1", "a.tmp-b-1-0123abcd", ".tmp-a-1-0123ABCD"]


@pytest.mark.parametrize("name", MINE)
def test_files_of_the_user_are_no_leftovers(name: str, store: Path, tmp_path: Path) -> None:
    assert not is_private(name)
    (store / name).write_text("mine")
    (store / "shards" / name).write_text("mine")
    quick_build("jsonl", tmp_path / "x.jsonl", store)
    assert (store / name).read_text() == (store / "shards" / name).read_text() == "mine"


def test_leftovers_are_private_files_and_no_folders_or_links(tmp_path: Path) -> None:
    private = private_path(tmp_path / "a b\n.json")
    assert is_private(private.name)
    private.write_text("half")
    folder, link = private_path(tmp_path / "folder"), private_path(tmp_path / "link")
    folder.mkdir()
    link.symlink_to(tmp_path / "nowhere")
    assert remove_leftovers(tmp_path) == 1
    assert sorted(tmp_path.iterdir()) == sorted([folder, link])


def test_a_name_as_long_as_can_be_is_written(tmp_path: Path) -> None:
    for name in ("a" * 255, "ä" * 127):
        assert write_file(tmp_path / name, b"data").read_bytes() == b"data"
        assert is_private(private_path(tmp_path / name).name)


def test_a_lock_carries_a_mark_and_takes_nobodys_file(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock", "taken", ""):
        assert is_lock(tmp_path / ".lock")
    (tmp_path / "poetry.lock").write_text("[[package]]")
    with pytest.raises(TokmillError, match="not one of"), locked(tmp_path / "poetry.lock", "", ""):
        pass
    assert (tmp_path / "poetry.lock").read_text() == "[[package]]"
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TokmillError, match="not a plain file"), locked(tmp_path / "link", "", ""):
        pass
    assert not (tmp_path / "elsewhere").exists()
