"""Damaged checkpoints: none is resumed, the one before is, and nothing of others is touched."""

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

import tokmill
from tokmill.base.errors import TokmillError
from tokmill.training.engines.devices.device import random_states
from tokmill.training.engines.tensors import read_tensors, write_tensors
from tokmill.training.evaluate import evaluate
from tokmill.training.runs.checkpoint import digest_of, find_whole
from tokmill.training.runs.run import load_task
from toy import recipe, weights

FILES = ("model.safetensors", "optimizer.safetensors", "rng-00000.json", "state.json")
NEWEST, BEFORE = "checkpoints/step-00000006", "checkpoints/step-00000004"


@pytest.fixture(scope="module")
def made(store: Path, val: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 4 and 6, the last."""
    plain = recipe(store, 6, run={"checkpoint_every": 2}, data={"val": str(val)})
    return tokmill.train(plain, tmp_path_factory.mktemp("runs") / "run", quiet=True).path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["of another step", "missing", "flipped"])
def test_a_resume_goes_on_from_the_one_before(
    name: str, how: str, run: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / NEWEST / name
    if how == "of another step":
        shutil.copy(run / BEFORE / name, path)
        if name.startswith("rng"):
            # Without dropout they are those of step 6 too.
            torch.rand(9)
            path.write_bytes(msgspec.json.encode(random_states()))
    elif how == "missing":
        path.unlink()
    else:
        flip(path, 8 * path.stat().st_size // 2)
    shutil.rmtree(run / "model")
    tokmill.train(None, run, quiet=True)
    said = capsys.readouterr().err
    if name == "state.json" and how == "missing":
        assert f"{run / NEWEST} is not a checkpoint" in said
        aside = run / "checkpoints/foreign-1-step-00000006"
    else:
        assert str(path) in said and "continues from step 4" in said
        aside = run / "checkpoints/damaged-1-step-00000006"
    # What was damaged is still there, and the steps were done again to the same bits.
    assert aside.is_dir()
    for one in (*FILES[:3],):
        assert (run / NEWEST / one).read_bytes() == (made / NEWEST / one).read_bytes(), one
    assert all(torch.equal(value, weights(made)[key]) for key, value in weights(run).items())


def test_none_is_whole(run: Path) -> None:
    for folder in (NEWEST, BEFORE):
        flip(run / folder / "optimizer.safetensors", 80_000)
    before = sorted(os.listdir(run / "checkpoints"))
    with pytest.raises(TokmillError, match=r"no checkpoint of the run can be used \(2 ") as found:
        tokmill.train(None, run, quiet=True)
    assert "--from" in found.value.hint and "step-00000006" in found.value.where
    assert sorted(os.listdir(run / "checkpoints")) == before


def test_what_is_not_ours_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints"
    (folder / ".tmp-x").write_text("a file of somebody")
    (folder / ".tmp-thesis").mkdir()
    (folder / "step-00000009").mkdir()
    (folder / "step-00000009/notes.txt").write_text("mine")
    (folder / "step-00000008").write_text("a file")
    (folder / "step-00000007").symlink_to(folder / "step-00000006")
    (folder / ".tmp-step-00000005").mkdir()  # as a killed writer leaves it
    names = {path.name for path in folder.iterdir()}
    assert find_whole(run) == run / NEWEST
    said = capsys.readouterr().err
    assert all(f"step-0000000{n} is not a checkpoint" in said for n in (7, 8, 9))
    tokmill.train(None, run, options={"run": {"steps": 6}}, quiet=True)
    # The next checkpoints need some of these names.
    (run / "recipe.json").write_text(
        (run / "recipe.json").read_text().replace('"cosine"', '"constant"')
    )
    tokmill.train(None, run, options={"run": {"steps": 9}}, quiet=True)
    left = {path.name for path in folder.iterdir()}
    assert names - left == {".tmp-step-00000005", "step-00000004", "step-00000006"}
    assert (folder / "foreign-1-step-00000009/notes.txt").read_text() == "mine"
    assert (folder / "foreign-1-step-00000008").read_text() == "a file"
    assert (folder / "step-00000007").is_symlink()
    assert (folder / ".tmp-x").read_text() == "a file of somebody"


def test_a_checkpoint_whose_state_has_no_digests_is_refused(run: Path) -> None:
    state = json.loads((run / NEWEST / "state.json").read_text())
    del state["files"], state["digest"]
    (run / NEWEST / "state.json").write_text(json.dumps(state))
    assert find_whole(run) == run / BEFORE


@pytest.mark.parametrize("place", ["model", "best", NEWEST])
def test_whoever_reads_weights_checks_them(place: str, run: Path, val: Path, store: Path) -> None:
    if place == NEWEST:
        shutil.rmtree(run / "model")
    path = run / place / "model.safetensors"
    at = "best" if place == "best" else ""
    whole = path.read_bytes()
    flip(path, 8 * (len(whole) - 100) + 3)
    for call in (
        lambda: load_task(run, at),
        lambda: evaluate(run, val, at=at, device="cpu"),
        lambda: tokmill.train(
            recipe(store, 2, run={"start": str(run / place)}), run.parent / "new", quiet=True
        ),
    ):
        with pytest.raises(TokmillError, match="damaged") as found:
            call()
        assert found.value.where == str(path) and found.value.hint
    if place == NEWEST:
        # Whole, but of another step.
        shutil.copy(run / BEFORE / "model.safetensors", path)
        with pytest.raises(TokmillError, match="comes from elsewhere"):
            load_task(run)


def test_a_damaged_one_does_not_push_out_a_whole_one(run: Path) -> None:
    flip(run / NEWEST / "model.safetensors", 9999)
    tokmill.train(None, run, options={"run": {"keep": 1}}, quiet=True)
    assert find_whole(run) == run / NEWEST


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]},
        {"dtype": "F32", "shape": [1 << 60, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 5000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [10**400, 0], "data_offsets": [0, 0]},
        {"dtype": "X", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]},
        {"dtype": "F32"},
        [],
    ],
    ids=str,
)
def test_headers_that_promise_what_is_not_there(entry: object, tmp_path: Path) -> None:
    path = tmp_path / "x"
    for header in (json.dumps({"a": entry}), '{"a":' + json.dumps(entry) + "," + "[" * 10**5):
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
        with pytest.raises(TokmillError, match="damaged"):
            read_tensors(path)


def test_a_seal_is_of_all_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    tensors = {"a": torch.arange(5.0), "empty": torch.zeros(0, 3)}
    assert write_tensors(path, tensors, {"step": "3"}) == write_tensors(
        path, tensors, {"step": "3"}
    )
    assert write_tensors(path, tensors, {"step": "4"}) != write_tensors(
        path, tensors, {"step": "3"}
    )
    checksum = write_tensors(path, tensors)
    assert torch.equal(read_tensors(path, checksum)["a"], tensors["a"])
    with pytest.raises(TokmillError, match="comes from elsewhere"):
        read_tensors(path, "0" * 64)


def test_a_checkpoint_of_another_run_is_not_resumed(
    run: Path, store: Path, val: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = recipe(store, 8, run={"checkpoint_every": 2, "seed": 9}, data={"val": str(val)})
    another = tokmill.train(other, tmp_path / "other", quiet=True).path
    copied = run / "checkpoints/step-00000008"
    shutil.copytree(another / "checkpoints/step-00000008", copied)
    with pytest.raises(TokmillError, match="written by another run") as found:
        load_task(run, "8")
    assert "run-id" in found.value.hint
    assert find_whole(run) == run / NEWEST
    said = capsys.readouterr().err
    assert "written by another run" in said and "continues from step 6" in said
    assert (run / "checkpoints/foreign-1-step-00000008").is_dir() and not copied.exists()


def test_a_run_of_an_older_version_has_no_id_and_is_resumed(run: Path) -> None:
    (run / "run-id").unlink()
    for folder in (NEWEST, BEFORE):
        path = run / folder / "state.json"
        state = json.loads(path.read_text())
        del state["run"]
        path.write_text(json.dumps(state | {"digest": digest_of(json.dumps(state).encode())}))
    assert find_whole(run) == run / NEWEST
    assert tokmill.train(None, run, quiet=True).step == 6
    assert not (run / "run-id").exists()
