"""`build overlay`: which values become which columns; that it goes on like any build."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokmill
from making import files_of, here, token_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.builds.selection import overlay_values as module
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store

RECORDS = [[[1, 2, 3], [4]], [[5, 6], [7, 8, 9, 10], [11]]]
"""5 records, 11 tokens."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return token_store(tmp_path / "s", RECORDS).path


def made(store: Path, file: Path, **options: Any) -> Store:
    how = options.pop("how", None) or How(quiet=True, amount=here())
    return tokmill.build("overlay", store, values=str(file), how=how, **options)


def saved(store: Path, values: Any, name: str = "x.npy") -> Path:
    file = store.parent / name
    np.save(file, values)
    return file


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([0, 255, 1, 2, 3]), "u1"),
        (np.array([0, 256, 1, 2, 3], "<i8"), "u2"),
        (np.array([0, 65_536, 1, 2, 3], ">u4"), "u4"),
        (np.array([0, 1 << 32, 1, 2, 3]), "u8"),
        (np.array([0, (1 << 64) - 1, 1, 2, 3], "u8"), "u8"),
        (np.array([0, -1, 1, 2, 3], "i1"), "i8"),
        (np.array([True, False] * 2 + [True]), "u1"),
        (np.array([0.5, -1, np.nan, np.inf, 3]), "f4"),
        (np.array([0.5, -1, 2, 4, 3], "f2"), "f4"),
    ],
)
def test_the_smallest_type_that_holds_it(store: Path, values: Any, dtype: str) -> None:
    overlay = made(store, saved(store, values))
    column = overlay.schema["x"]
    assert (column.dtype, column.per, column.width) == (dtype, "record", 0)
    np.testing.assert_array_equal(Store(store, ["x"]).column("x"), values.astype(column.numpy()))
    assert validate(Store(store)).ok


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", "i4"])
def test_vectors(store: Path, order: Any, dtype: str) -> None:
    values = np.arange(15).reshape(5, 3).astype(dtype, order=order)
    overlay = made(store, saved(store, values))
    assert overlay.schema["x"].width == 3
    assert Store(store, ["x"]).column("x").tolist() == values.tolist()


def test_the_length_says_what_has_a_value(store: Path) -> None:
    assert made(store, saved(store, np.arange(11))).schema["x"].per == "token"
    assert made(store, saved(store, np.arange(5), "y.npy")).schema["y"].per == "record"
    with pytest.raises(UsageError, match="7 rows; the store has 5 records and 11 tokens"):
        made(store, saved(store, np.arange(7), "z.npy"))
    with pytest.raises(UsageError, match="--per record does not fit"):
        made(store, saved(store, np.arange(11), "z.npy"), per="record")
    assert not (store / "overlays/z").exists()


def test_where_both_fit_one_must_say_which(tmp_path: Path) -> None:
    store = token_store(tmp_path / "s", [[[1], [2], [3]]]).path
    file = saved(store, np.arange(3))
    with pytest.raises(
        UsageError, match="one per record or one per token: .* 3 records and 3"
    ) as error:
        made(store, file)
    assert "--per" in error.value.hint
    assert made(store, file, per="token").schema["x"].per == "token"


def test_several_arrays_of_a_file(store: Path) -> None:
    file = store.parent / "both.npz"
    np.savez(file, score=np.arange(5) / 2, loss=np.arange(11) % 2)
    made(store, file)
    opened = Store(store, ["both"])
    assert opened.column("score").tolist() == [0, 0.5, 1, 1.5, 2]
    assert [r["loss"].tolist() for r in opened][:2] == [[0, 1, 0], [1]]
    alone = made(store, file, name="alone", column="loss")
    assert list(alone.schema) == ["loss"]
    with pytest.raises(UsageError, match="no array 'los'") as error:
        made(store, file, name="wrong", column="los")
    assert error.value.hint == "did you mean 'loss'?"


def test_arrays_are_mapped_in_place(store: Path) -> None:
    """Also those in an archive: nothing is read that is not asked for."""
    file = store.parent / "both.npz"
    np.savez(file, a=np.arange(5), b=np.arange(22, dtype="f4").reshape(11, 2))
    for name, array in module.open_arrays(file, "x").items():
        assert isinstance(array, np.memmap)
        assert array.tolist() == np.load(file)[name].tolist()


def test_what_is_refused(store: Path, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "packed.npz", a=np.arange(5))
    np.save(tmp_path / "pickled.npy", np.asarray([{}] * 5, object), allow_pickle=True)
    np.save(tmp_path / "words.npy", np.asarray(["a"] * 5))
    np.save(tmp_path / "deep.npy", np.zeros((5, 2, 2)))
    np.save(tmp_path / "one.npy", np.asarray(5))
    np.save(tmp_path / "none.npy", np.zeros((5, 0)))
    np.save(tmp_path / "empty.npy", np.zeros(0))
    np.save(tmp_path / "large.npy", np.asarray([1e300, 0, 0, 0, 0]))
    (tmp_path / "text.npy").write_text("no array at all")
    whole = (tmp_path / "deep.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-1])
    (tmp_path / "head.npy").write_bytes(whole[:20])
    for name, why in {
        "packed.npz": "compressed",
        "pickled.npy": "nothing is unpickled",
        "words.npy": "columns are numbers",
        "deep.npy": "columns are numbers",
        "one.npy": "columns are numbers",
        "none.npy": "columns are numbers",
        "empty.npy": "is empty",
        "large.npy": "which no float32 holds",
        "text.npy": "neither .npy nor .npz",
        "cut.npy": "damaged",
        "head.npy": "damaged",
    }.items():
        with pytest.raises(TokmillError, match=why) as error:
            made(store, tmp_path / name)
        assert error.value.hint and name in error.value.where, name
    with pytest.raises(TokmillError, match="no such file"):
        made(store, tmp_path / "missing.npy")
    assert not (store / "overlays").exists()


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (np.arange(11), "holds 10"),
        (np.arange(11) % 2 - 1, "holds -1"),
        (np.full(11, 255, "u1"), "holds 255"),
        (np.ones(11), "floating-point"),
        (np.arange(5) % 2, "one value per record"),
        (np.zeros((11, 2), int), "a vector per token"),
    ],
)
def test_a_loss_is_a_mask(store: Path, values: Any, what: str) -> None:
    file = saved(store, values)
    with pytest.raises(TokmillError, match=what) as error:
        made(store, file, column="loss")
    assert error.value.hint and str(file) in error.value.where
    assert not (store / "overlays").exists()
    # Under any other name they are values like others.
    assert made(store, file).schema["x"].dtype


def test_a_name_that_is_taken(store: Path) -> None:
    made(store, saved(store, np.arange(11)))
    with pytest.raises(TokmillError, match="the overlay was made with another recipe") as error:
        made(store, saved(store, np.arange(11), "y.npy"), name="x", column="y")
    assert "another --name" in error.value.hint and "--fresh" in error.value.hint


def test_a_build_goes_on_to_the_same_bytes(store: Path) -> None:
    file = saved(store, np.arange(11))
    overlay = made(store, file)
    whole = files_of(overlay.path)
    assert files_of(made(store, file).path) == whole
    for name in (f"shards/{overlay.shards[1].name}.json", "manifest.json"):
        (overlay.path / name).unlink()
    assert files_of(made(store, file).path) == whole
    workers = How(quiet=True, amount=here(workers=2), fresh=True)
    assert files_of(made(store, file, how=workers).path) == whole


def test_other_values_are_another_content(store: Path) -> None:
    first = made(store, saved(store, np.arange(11)))
    with pytest.raises(TokmillError, match="inputs have changed"):
        made(store, saved(store, np.arange(11) + 1))
    agreed = How(quiet=True, amount=here(), yes=True)
    second = made(store, saved(store, np.arange(11) + 1), how=agreed)
    assert second.fingerprint != first.fingerprint
    assert Store(store, ["x"]).record(0)["x"].tolist() == [1, 2, 3]
    # Where the file lies, and what the overlay is called, is not a part of it.
    moved = made(store, saved(store, np.arange(11) + 1, "y.npy"), column="x")
    assert moved.fingerprint == second.fingerprint


def test_a_store_that_has_grown(store: Path) -> None:
    """What lies beside a shard that stayed stays as well."""
    first = made(store, saved(store, np.arange(11)))
    token_store(store, [*RECORDS, [[12, 13]]])
    with pytest.raises(UsageError, match="11 rows; the store has 6 records and 13 tokens"):
        made(store, saved(store, np.arange(11)))
    agreed = How(quiet=True, amount=here(), yes=True)
    grown = made(store, saved(store, np.arange(13)), how=agreed)
    assert [e.records for e in grown.shards] == [2, 3, 1]
    assert grown.manifest.overlay.base == Store(store).fingerprint != first.manifest.overlay.base
    assert Store(store, ["x"]).record(5)["x"].tolist() == [11, 12]
    assert validate(Store(store)).ok


def test_select_takes_the_store_alone(store: Path, tmp_path: Path) -> None:
    made(store, saved(store, np.arange(11)))
    how = How(quiet=True, amount=here())
    chosen = tokmill.build("select", store, tmp_path / "new", min_length=2, how=how)
    assert list(chosen.schema) == ["token"] and not (chosen.path / "overlays").exists()
