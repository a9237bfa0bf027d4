"""Columns that hold record numbers of another store: they are made, followed, moved, refused."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tokmill
from making import change_sealed, files_of, here, jsonl, quick_build, token_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.store.checks.validate import validate
from tokmill.store.manifest import with_checksum
from tokmill.store.store import Store

PAIRS = {"anchor": [0, 3, 2, 6], "positive": [1, 4, 0, 5]}


def texts(path: Path, first: int, count: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    return jsonl(
        path, [{"text": f"function {i}" * (1 + i % 3)} for i in range(first, first + count)]
    )


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    """A store of 7 records, what others refer to."""
    return quick_build("jsonl", texts(tmp_path / "in/b.jsonl", 0, 7), tmp_path / "functions").path


@pytest.fixture
def pairs(tmp_path: Path, functions: Path) -> Path:
    """A store of 4 records whose overlay `pairs` refers to `functions`."""
    base = token_store(tmp_path / "pairs", [[[1, 2], [3]], [[4], [5]]]).path
    overlay(base, functions, PAIRS)
    return base


def overlay(base: Path, functions: Path, values: dict[str, Any], **options: Any) -> Store:
    file = base.parent / "pairs.npz"
    np.savez(file, **{name: np.asarray(value) for name, value in values.items()})
    told = tuple(f"{name}={functions}" for name in values)
    options = {"refer": told, "how": How(quiet=True, amount=here()), **options}
    return tokmill.build("overlay", base, values=str(file), name="pairs", **options)


def test_a_column_leads_to_the_store_that_it_numbers(pairs: Path, functions: Path) -> None:
    store = Store(pairs, ["pairs"])
    found = store.reference("anchor")
    assert found.fingerprint == Store(functions).fingerprint
    assert found is store.reference("positive"), "one store is opened once"
    numbers = store.column("anchor")
    assert [found.record(int(i))["bytes"] for i in numbers] == [
        Store(functions).record(i)["bytes"] for i in PAIRS["anchor"]
    ]
    assert validate(Store(pairs)).ok


def test_a_vector_of_numbers_and_numbers_of_tokens_refer_too(pairs: Path, functions: Path) -> None:
    shutil.rmtree(pairs / "overlays")
    overlay(pairs, functions, {"triplet": [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4]]})
    assert Store(pairs, ["pairs"]).schema["triplet"].width == 3
    shutil.rmtree(pairs / "overlays")
    overlay(pairs, functions, {"block": [0, 6, 1, 2, 3]})
    store = Store(pairs, ["pairs"])
    assert store.schema["block"].per == "token"
    assert len(store.reference("block")) == 7


def test_columns_without_a_reference_say_so(pairs: Path) -> None:
    store = Store(pairs, ["pairs"])
    with pytest.raises(UsageError, match="no column 'token' that refers"):
        store.reference("token")
    with pytest.raises(UsageError, match=r"no column 'anchr'[\s\S]*anchor"):
        store.reference("anchr")


@pytest.mark.parametrize(
    ("values", "options", "what"),
    [
        ({"anchor": [0, 1, 2, 7]}, {}, "anchor holds 7, and the store .* the records 0 to 6"),
        ({"anchor": [0, 1, 2, -1]}, {}, "type i8, so it holds no record numbers"),
        ({"anchor": [0.5, 1, 2, 3]}, {}, "type f4, so it holds no record numbers"),
        ({"anchor": [0, 1, 2, 3]}, {"refer": ("anchor",)}, "is not COLUMN=STORE"),
        ({"anchor": [0, 1, 2, 3]}, {"refer": ("anchr=x",)}, "gives no column 'anchr'"),
        ({"anchor": [0, 1, 2, 3]}, {"refer": ("anchor=gone",)}, "there is no such store"),
    ],
)
def test_what_cannot_refer_is_refused(
    tmp_path: Path, functions: Path, values: Any, options: Any, what: str
) -> None:
    base = token_store(tmp_path / "s", [[[1, 2], [3]], [[4], [5]]]).path
    with pytest.raises(TokmillError, match=what):
        overlay(base, functions, values, **options)
    assert not (base / "overlays/pairs").exists()


def test_both_may_be_moved_together(pairs: Path, functions: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for path in (pairs, functions):
        path.rename(tmp_path / "elsewhere" / path.name)
    moved = Store(tmp_path / "elsewhere/pairs", ["pairs"])
    assert len(moved.reference("anchor")) == 7
    assert validate(Store(moved.path)).ok


def test_a_store_that_has_moved_is_found_by_a_link(
    pairs: Path, functions: Path, tmp_path: Path
) -> None:
    (tmp_path / "far").mkdir()
    new = functions.rename(tmp_path / "far/f")
    with pytest.raises(TokmillError, match="no such store") as error:
        Store(pairs, ["pairs"]).reference("anchor")
    assert error.value.where == str(functions) and "ln -s" in error.value.hint
    problems = validate(Store(pairs)).problems
    assert [problem.hint for problem in problems] == [error.value.hint] * 2
    functions.symlink_to(new)
    assert validate(Store(pairs)).ok
    assert len(Store(pairs, ["pairs"]).reference("positive")) == 7


def test_a_store_that_has_grown_is_refused(pairs: Path, functions: Path, tmp_path: Path) -> None:
    texts(tmp_path / "in/c.jsonl", 7, 3)
    quick_build("jsonl", tmp_path / "in", tmp_path / "again")
    shutil.rmtree(functions)
    (tmp_path / "in/c.jsonl").unlink()
    quick_build("jsonl", tmp_path / "in", functions)
    # The same recipe, so that it is known what happened to it.
    texts(tmp_path / "in/a.jsonl", 7, 3)
    quick_build("jsonl", tmp_path / "in", functions)
    with pytest.raises(TokmillError, match=r"has grown: .* 7 records then, .* 10 now") as error:
        Store(pairs, ["pairs"]).reference("anchor")
    assert "tokmill build overlay" in error.value.hint
    assert not validate(Store(pairs)).ok


def test_a_selection_is_refused(pairs: Path, functions: Path) -> None:
    shutil.rmtree(functions)
    quick_build("select", pairs, functions)
    with pytest.raises(TokmillError, match="is a selection"):
        Store(pairs, ["pairs"]).reference("anchor")


def test_an_unfinished_store_is_refused(tmp_path: Path, functions: Path) -> None:
    manifest = Store(functions).manifest
    (functions / "manifest.json").unlink()
    for file in (functions / "shards").glob("*.json"):
        file.unlink()
    base = token_store(tmp_path / "s", [[[1, 2], [3]]]).path
    with pytest.raises(TokmillError, match="not complete"):
        overlay(base, functions, {"anchor": [0, 1]})
    assert manifest.complete


def test_a_selection_carries_references(pairs: Path, functions: Path, tmp_path: Path) -> None:
    chosen = quick_build("select", pairs / "overlays/pairs", tmp_path / "deep/chosen", seed=1)
    assert len(chosen.reference("anchor")) == 7
    assert chosen.column("anchor").tolist() == PAIRS["anchor"]
    assert validate(chosen).ok
    both = quick_build("select", [chosen.path, chosen.path], tmp_path / "both")
    assert both.column("positive").tolist() == PAIRS["positive"] * 2
    assert len(both.reference("positive")) == 7


def test_a_merge_of_stores_that_refer_to_different_ones_is_refused(
    pairs: Path, tmp_path: Path
) -> None:
    base = token_store(tmp_path / "more", [[[1, 2], [3]], [[4], [5]]]).path
    other = quick_build("jsonl", texts(tmp_path / "z.jsonl", 50, 9), tmp_path / "other").path
    overlay(base, other, PAIRS)
    with pytest.raises(TokmillError, match=r"cannot be merged[\s\S]*references\.anchor") as error:
        quick_build("select", [pairs / "overlays/pairs", base / "overlays/pairs"], tmp_path / "m")
    assert "refer to the same stores" in error.value.hint


def lie(store: Path, **changes: Any) -> None:
    """Write a manifest that says other things of the store that `anchor` refers to."""
    references = msgspec.to_builtins(Store(store).manifest.references)
    references["anchor"].update(changes)
    change_sealed(store / "manifest.json", references=references)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"path": "a\0b"}, "is impossible"),
        ({"path": ""}, "is impossible"),
        ({"path": "x" * 5000}, "is impossible"),
        ({"path": "/etc/passwd"}, "cannot be opened: is a file"),
        ({"path": "/dev/null"}, "cannot be opened"),
        ({"records": 3}, "holds 6; the store that it refers to has the records 0 to 2"),
        ({"records": 1 << 40}, "has 7 records, not"),
        ({"fingerprint": "0" * 64}, "was built again"),
    ],
)
def test_a_manifest_that_lies_is_refused(pairs: Path, changes: Any, what: str) -> None:
    inner = pairs / "overlays/pairs"
    before = files_of(pairs.parent / "functions")
    lie(inner, **changes)
    with pytest.raises(TokmillError, match=what):
        Store(inner).reference("anchor")
    assert not validate(Store(inner)).ok
    assert files_of(pairs.parent / "functions") == before


def test_a_store_that_names_no_place_is_refused(pairs: Path) -> None:
    inner = pairs / "overlays/pairs"
    manifest = msgspec.structs.replace(Store(inner).manifest, references=msgspec.UNSET)
    (inner / "manifest.json").write_bytes(with_checksum(manifest))
    with pytest.raises(TokmillError, match="does not"):
        Store(inner).reference("anchor")
