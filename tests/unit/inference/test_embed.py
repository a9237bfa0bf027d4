"""Vectors of records: the same whatever is read side by side; what a run's hidden states say."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tokmill
from embedded import vectors_of
from making import files_of, write_store
from tokmill.base.errors import Interrupted, TokmillError, UsageError
from tokmill.inference import embed as module
from tokmill.inference.embed import embed_store
from tokmill.inference.vectors import Vectors, groups
from tokmill.models.model import Recurrent, Tensors
from tokmill.store.checks.validate import validate
from tokmill.store.schema import Column, Schema
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.task import Task
from tokmill.training.runs.run import load_task

LENGTH = 8
"""Positions of the models: records are up to four times as long."""
SHARDS = [[5, 0, 31, 8, 1], [], [9, 16, 17, 2]]
"""Lengths of the records of three shards."""
SIZES = {"token": 17, "kind": 5}
SCHEMA: Schema = {name: Column("u1", vocab=name) for name in SIZES}


def make_store(path: Path, shards: list[list[int]], salt: str = "") -> Path:
    """Random records of these lengths, of two columns."""
    random = np.random.default_rng(len(shards))
    rows = [
        [{name: random.integers(0, n, length) for name, n in SIZES.items()} for length in shard]
        for shard in shards
    ]
    files = {name: f"{salt}{name}".encode() for name in SIZES}
    vocabularies = {
        name: Vocabulary(f"{name}.json", hashlib.sha256(files[name]).hexdigest(), SIZES[name])
        for name in SIZES
    }
    write_store(path, SCHEMA, rows, vocabularies=vocabularies)
    for name, data in files.items():
        (path / f"vocab/{name}.json").write_bytes(data)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores `s` and `learned`, and a run of each model."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("embed")
    make_store(root / "learned", [[40, 40, 40]])
    make_store(root / "s", SHARDS)
    for kind, model in {
        "decoder": {"dim": 8, "layers": 2, "heads": 2},
        "rwkv7": {"dim": 16, "layers": 2, "head_dim": 8},
    }.items():
        recipe = {
            "data": {"train": str(root / "learned"), "batch": 4},
            "model": {"kind": kind, **model},
            "task": {"length": LENGTH, "tied": False},
            "optim": {"lr": 0.03, "warmup": 1},
            "run": {"steps": 3, "device": "cpu", "checkpoint_every": 2, "peak_flops": 1e12},
        }
        tokmill.train(recipe, root / kind, quiet=True)
    return root


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> Path:
    """A store of its own, the same each time."""
    return make_store(tmp_path / "s", SHARDS)


def states(task: Task, record: dict[str, Any]) -> Tensor:
    """The hidden states (T, D) of one record, from the model's plain forward pass."""
    columns = {name: torch.from_numpy(record[name].astype(np.int64))[None] for name in SIZES}

    def read(part: dict[str, Tensor]) -> Tensor:
        zeros = torch.zeros_like(part["token"])
        place = torch.arange(zeros.shape[1])[None]
        with torch.no_grad():
            return task.model(Tensors(part, zeros, place, whole=True))[0]

    if isinstance(task.model, Recurrent):
        # One that has a state reads a record as if there were no segments.
        return read(columns)
    cuts = range(0, len(record["token"]), LENGTH)
    return torch.cat([read({n: c[:, i : i + LENGTH] for n, c in columns.items()}) for i in cuts])


def wanted(task: Task, store: Path, pool: str) -> np.ndarray:
    """The definition, one record after the other."""
    rows = []
    for record in Store(store):
        if not len(record["token"]):
            rows.append(torch.zeros(task.model.dim))
            continue
        hidden = states(task, record)
        rows.append(hidden.mean(0) if pool == "mean" else hidden[-1])
    return torch.stack(rows).detach().numpy()


@pytest.mark.parametrize("kind", ["decoder", "rwkv7"])
@pytest.mark.parametrize("pool", ["mean", "last"])
def test_vectors_are_those_of_the_definition(
    kind: str, pool: Any, folder: Path, store: Path
) -> None:
    vectors = wanted(load_task(folder / kind), store, pool)
    assert np.abs(vectors).max() > 0.1
    # One at a time, some, and all at once.
    for tokens in (1, 40, 16_384):
        found = vectors_of(folder / kind, store, pool=pool, batch_tokens=tokens)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, vectors, rtol=1e-4, atol=1e-5)
    assert not (store / "overlays").exists()


def test_an_overlay_of_vectors(folder: Path, store: Path) -> None:
    before = files_of(store)
    found = embed_store(folder / "decoder", store)
    assert (found.records, found.width, found.empty, found.step) == (9, 8, 1, 3)
    assert found.overlay == f"mean-{found.model[:12]}" and found.pool == "mean"
    opened = Store(store, [found.overlay])
    overlay = opened.overlays[found.overlay].manifest.overlay
    assert overlay.about == {"model": found.model, "step": 3, "pool": "mean", "width": 8}
    exact = wanted(load_task(folder / "decoder"), store, "mean")
    np.testing.assert_allclose(tokmill.embed(folder / "decoder", store), exact, atol=1e-5)
    np.testing.assert_allclose(opened.column("embedding"), exact, rtol=1e-4, atol=1e-5)
    assert not opened.record(1)["embedding"].any()
    after = {n: data for n, data in files_of(store).items() if not n.startswith("overlays/")}
    assert after == before and validate(Store(store)).ok
    # Another pooling, and another point of the training, are overlays of their own.
    assert embed_store(folder / "decoder", store, pool="last").model == found.model
    earlier = embed_store(folder / "decoder", store, at="2", name="earlier")
    assert earlier.model != found.model and earlier.step == 2
    names = sorted(path.name for path in (store / "overlays").iterdir())
    assert names == ["earlier", f"last-{found.model[:12]}", f"mean-{found.model[:12]}"]


def test_a_stopped_one_goes_on_to_the_same_bytes(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = embed_store(folder / "rwkv7", store)
    path = store / "overlays" / found.overlay
    whole = files_of(path)
    embed_store(folder / "rwkv7", store, fresh=True)
    assert files_of(path) == whole
    fill, numbers = Vectors.fill, []

    def stopped(self: Vectors, base: Store, number: int, *more: Any) -> Iterator[int]:
        if number == 2 and not numbers.count(2):
            numbers.append(number)
            raise KeyboardInterrupt
        numbers.append(number)
        yield from fill(self, base, number, *more)

    monkeypatch.setattr(Vectors, "fill", stopped)
    with pytest.raises(Interrupted):
        embed_store(folder / "rwkv7", store, fresh=True)
    with pytest.raises(TokmillError, match="not complete"):
        Store(store, [found.overlay])
    assert embed_store(folder / "rwkv7", store) == found
    # Nothing was made twice, and what has no name is gone.
    assert numbers == [0, 1, 2, 2] and files_of(path) == whole
    assert not list((path / "cache").iterdir())
    embed_store(folder / "rwkv7", store)
    assert numbers == [0, 1, 2, 2]


def test_a_store_that_has_grown_costs_its_new_shards(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = embed_store(folder / "decoder", store)
    rows = [[dict(record) for record in Store(store)][:5], [], [dict(r) for r in Store(store)][5:]]
    vocabularies = Store(store).vocabularies
    more = [{"token": [3, 1], "kind": [1, 1]}]
    write_store(store, SCHEMA, [*rows, more], vocabularies=vocabularies)
    with pytest.raises(TokmillError, match="has changed since") as error:
        Store(store, [found.overlay])
    assert f"tokmill embed {folder / 'decoder'} {store}" in error.value.hint
    made: list[int] = []
    fill = Vectors.fill

    def noted(self: Vectors, base: Store, number: int, *rest: Any) -> Iterator[int]:
        made.append(number)
        yield from fill(self, base, number, *rest)

    monkeypatch.setattr(Vectors, "fill", noted)
    assert embed_store(folder / "decoder", store).records == 10
    assert made == [3] and len(Store(store, [found.overlay]).column("embedding")) == 10


def test_a_damaged_shard_has_no_vectors(folder: Path, store: Path, tmp_path: Path) -> None:
    """One id has become another that is in range too: only the shard's digest knows."""
    path, whole = Store(store).shard_file(2), Store(store).shard_file(2).read_bytes()
    data = bytearray(whole)
    ids = Store(store).shard(2)["token"]
    place = data.index(ids.tobytes()) + 3 * ids.itemsize
    data[place] = (data[place] + 1) % SIZES["token"]
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(TokmillError, match="sha256 differs") as error:
            embed_store(folder / "decoder", store, name="x")
        assert error.value.where == str(path.absolute())
        assert "`tokmill build` makes it again" in error.value.hint
        # What was right before it stays, and nothing was committed of it.
        assert len(list((store / "overlays/x/shards").glob("*.json"))) == 2
    path.write_bytes(whole)
    embed_store(folder / "decoder", store, name="x")
    found = np.stack([record["embedding"] for record in Store(store, ["x"])])
    right = vectors_of(folder / "decoder", make_store(tmp_path / "r", SHARDS))
    assert np.array_equal(found, right)


def test_groups_waste_little() -> None:
    lengths = np.asarray([3, 0, 9, 4, 30, 4, 1, 0])
    found = [group.tolist() for group in groups(lengths, 12)]
    assert found == [[4], [2], [3, 5, 0], [6]]
    assert list(groups(np.zeros(3, np.int64), 12)) == []


def test_what_is_refused(folder: Path, store: Path, tmp_path: Path) -> None:
    run = folder / "decoder"
    other = make_store(tmp_path / "other", SHARDS, salt="other")
    with pytest.raises(TokmillError, match="the vocabulary 'token' differs"):
        embed_store(run, other)
    with pytest.raises(UsageError, match="pooled by 'max'"):
        embed_store(run, store, pool="max")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="batch_tokens: 0 is below 1"):
        embed_store(run, store, batch_tokens=0)
    with pytest.raises(TokmillError, match="no weights of step 77"):
        embed_store(run, store, at="77")
    with pytest.raises(TokmillError, match="holds no run"):
        embed_store(store, store)
    assert not (store / "overlays").exists()
    # Under one name there is one model.
    embed_store(run, store, name="v")
    with pytest.raises(TokmillError, match="another recipe") as error:
        embed_store(run, store, name="v", pool="last")
    assert "--fresh" in error.value.hint
    assert embed_store(run, store, name="v", pool="last", fresh=True).pool == "last"


def test_a_device_that_is_not_there_is_told_first(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    embed_store(folder / "decoder", store, device="cpu")
    # Though nothing is left to do.
    with pytest.raises(UsageError, match="no CUDA device"):
        embed_store(folder / "decoder", store, device="cuda")


def test_what_is_done_is_said(
    folder: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embed_store(folder / "decoder", store, quiet=False)
    assert "nothing was left" not in capsys.readouterr().err
    embed_store(folder / "decoder", store, quiet=False)
    assert "there was nothing to do" in capsys.readouterr().err
    embed_store(folder / "decoder", store)
    embed_store(folder / "decoder", store, fresh=True, quiet=False)
    assert "nothing was left" not in capsys.readouterr().err


def test_python_shows_progress_in_a_notebook(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokmill.embed(folder / "decoder", store)
    assert not capsys.readouterr().err
    monkeypatch.setattr(module, "live", lambda: True)
    tokmill.embed(folder / "decoder", store)
    assert "all vectors exist already" in capsys.readouterr().err


def test_progress_counts_tokens(
    folder: Path, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokmill.base.progress.EVERY", 0)
    embed_store(folder / "decoder", store, quiet=False)
    said = capsys.readouterr().err
    assert "embed: 89 of 89 tokens (100%)" in said and "tokens/s" in said
    assert "build:" not in said


def test_a_full_disk_is_told_before_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A map of a file with holes would end the process with a signal."""
    import errno
    import os

    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert module.scratch_array(tmp_path, (3, 2)).sum() == 0 and not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TokmillError, match="No space left") as error:
        module.scratch_array(tmp_path, (3, 2))
    assert error.value.exit_code == 5
