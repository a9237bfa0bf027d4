"""`tokmill build overlay`, `tokmill embed`, and what other commands make of overlays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import token_store
from tokmill.store.store import Store
from toy import cycles, make_store, recipe

Here = Callable[..., tuple[str, str]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """`s`, 5 records and 11 tokens in two shards, and `mask.npy`."""
    np.save(tmp_path / "mask.npy", np.arange(11) % 2)
    return token_store(tmp_path / "s", [[[1, 2, 3], [4]], [[5, 6], [7, 8, 9, 10], [11]]]).path


def test_a_mask_from_a_file(here: Here, store: Path) -> None:
    command = ("build", "overlay", "s", "--values", "mask.npy", "--column", "loss")
    out, err = here(*command)
    assert "nothing was left to do" not in err
    again, err = here(*command)
    assert "nothing was left to do" in err and again == out
    assert out.startswith("s/overlays/mask: 5 records, 11 tokens")
    assert Store(store, ["mask"]).record(0)["loss"].tolist() == [0, 1, 0]
    facts = json.loads(here("inspect", "s", "--json")[0])
    assert facts["overlays"] == [{"name": "mask", "columns": "loss", "state": "complete"}]
    assert "loss" not in {column["name"] for column in facts["columns"]}
    shown = here("inspect", "s", "--head", "1", "--overlay", "mask")[0]
    assert "token: 1 2 3\nloss: 0 1 0" in shown
    figures = json.loads(here("inspect", "s", "--stats", "--overlay", "mask", "--json")[0])
    assert figures["statistics"]["columns"]["loss"]["unique"] == 2
    assert "s: ok, complete, 5 records" in here("store", "validate", "s")[0]
    assert (
        here("inspect", "s/overlays/mask")[0]
        .splitlines()[2]
        .endswith("the store in whose folder it is")
    )


def test_mistakes(here: Here, store: Path) -> None:
    for arguments, code, what in (
        (("s",), 2, "no file of values was named"),
        (("s", "--values", "none.npy"), 1, "none.npy: there is no such file"),
        (("s", "--values", "mask.npy", "--column", "a b"), 1, "cannot be called 'a b'"),
        (("s", "--values", "mask.npy", "-o", "x"), 2, "is in its store"),
        (("s", "--values", "mask.npy", "--per", "record"), 2, "11 rows; the store has 5 records"),
        (("s", "--values", "mask.npy", "--tokenizer", "t"), 2, "these records have no tokenizer"),
        (("x", "--values", "mask.npy"), 1, "x: there is no such store"),
    ):
        err = here("build", "overlay", *arguments, code=code)[1]
        assert what in err and "hint: " in err, err
    for more in (("--head", "1"), ("--stats",), ()):
        err = here("inspect", "s", *more, "--overlay", "maks", code=1)[1]
        assert "no overlay 'maks'" in err and "build overlay" in err
    err = here("inspect", "mask.npy", "--overlay", "mask", code=2)[1]
    assert "are for stores" in err


def test_changed_values_are_asked_about(here: Here, store: Path, tmp_path: Path) -> None:
    command = ("build", "overlay", "s", "--values", "mask.npy", "-q")
    here(*command)
    np.save(tmp_path / "mask.npy", np.arange(11) % 3)
    assert "--yes" in here(*command, code=1)[1]
    here(*command, "--yes")
    assert Store(store, ["mask"]).record(0)["mask"].tolist() == [0, 1, 2]
    here("build", "overlay", "s", "--values", "mask.npy", "--fresh", "-q")
    # The plan says what there is to be, and does nothing.
    plan = here("build", "overlay", "s", "--values", "mask.npy", "--name", "n", "--dry-run")[0]
    assert "column      n: u1 per token" in plan and not (store / "overlays/n").exists()


@pytest.mark.parametrize("kind", ["overlay", "embed"])
def test_no_tokenizer_is_offered(here: Here, kind: str) -> None:
    shown = here("build", kind, "--help")[0]
    assert "--set" in shown and "--tokenizer" not in shown and "--role" not in shown


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run beside its store."""
    import tokmill

    folder = tmp_path_factory.mktemp("run")
    store = make_store(folder / "s", cycles(20))
    return tokmill.train(recipe(store, 2), folder / "r", quiet=True).path


def test_embed(here: Here, run: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [*cycles(20), np.zeros(0, np.int64)])
    found = json.loads(here("embed", run, "s", "--json", "-q")[0])
    assert (found["records"], found["width"], found["empty"], found["step"]) == (21, 16, 1, 2)
    assert [path.name for path in (store / "overlays").iterdir()] == [found["overlay"]]
    out, err = here("embed", run, "s", "--pool", "last", "--name", "last", "--device", "cpu")
    assert out == "s: overlay last: 21 vectors of 16, step 2\n"
    assert "records without tokens (zero vectors): 1" in err
    assert Store(store, ["last"]).column("embedding").shape == (21, 16)
    shown = here("inspect", "s", "--head", "1", "--overlay", "last")[0]
    assert "embedding: " in shown
    facts = json.loads(here("inspect", "s", "--json")[0])
    assert [one["name"] for one in facts["overlays"]] == ["last", found["overlay"]]


def test_embed_refuses(here: Here, run: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "s", cycles(3))
    for arguments, code, what in (
        ((run, "s", "--pool", "max"), 2, "cannot be pooled by 'max'"),
        ((run, "s", "--at", "best"), 1, "no weights called best"),
        (("s", "s"), 1, "the folder holds no run"),
        ((run, run), 1, "holds no store"),
        ((run, "s", "--batch-tokens", "0"), 2, "batch-tokens"),
    ):
        err = here("embed", *arguments, code=code)[1]
        assert what in err and "hint: " in err, err


def test_train_takes_an_overlay(here: Here, tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", cycles(20))
    np.save(tmp_path / "mask.npy", np.arange(Store(store).tokens) % 2)
    here("build", "overlay", "s", "--values", "mask.npy", "--column", "loss", "-q")
    common: tuple[Any, ...] = ("--steps", 1, "--set", "dim=16", "--set", "heads=2", "-q", "--json")
    tokens = []
    for name, more in (("plain", ()), ("masked", ("--set", "data.overlays=['mask']"))):
        out, _ = here("train", "s", "-o", name, *common, *more)
        tokens.append(json.loads(out)["targets"])
    assert tokens[1] < 0.6 * tokens[0]
    plan, _ = here("train", "s", "--dry-run", *common[:6], "--set", "data.overlays=['mask']")
    assert any(line.split() == ["overlays", "mask"] for line in plan.splitlines())
    assert "overlays" not in here("train", "s", "--dry-run", *common[:6])[0]
    note = (
        "read with the overlay mask: tokens whose 'loss' is 0 are left out, "
        "so there are no bits_per_byte: the bytes of the rest are not known"
    )
    assert f"note: {note}" in here("eval", "masked", "s", "--device", "cpu")[1]
    assert note in json.loads(here("eval", "masked", "s", "--json")[0])["notes"]
    assert "overlay" not in here("eval", "plain", "s")[1]
    err = here("train", "s", "-o", "r", *common, "--set", "data.overlays=['maks']", code=1)[1]
    assert "no overlay 'maks'" in err and "did you mean 'mask'?" in err
