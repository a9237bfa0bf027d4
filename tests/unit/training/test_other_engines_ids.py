"""A store whose engine gave other ids than this program gives: training and sampling refuse it."""

import shutil
from pathlib import Path

import msgspec
import pytest

import tokmill
from making import jsonl, quick_build
from tokmill.base.errors import TokmillError
from tokmill.inference.coders import load_coder
from tokmill.store.checks.probe import probe_digest, probe_path, read_probe
from tokmill.store.checks.validate import validate
from tokmill.store.manifest import Manifest, read_checked, with_checksum
from tokmill.store.store import Store
from tokmill.training.runs.run import VOCAB, read_run

RECIPE = {
    "data": {"batch": 2},
    "task": {"length": 16},
    "model": {"kind": "decoder", "dim": 16, "layers": 1, "heads": 2},
    "run": {"steps": 1},
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rows = [{"text": f"record {i} of some text, long enough"} for i in range(30)]
    return quick_build("jsonl", jsonl(tmp_path / "a.jsonl", rows), tmp_path / "s").path


def other_ids(store: Path) -> Path:
    """The same store as another engine would have left it: known texts got other ids."""
    probe = read_probe(store)
    answers = [(text, ids[1:] if text.startswith("The ") else ids) for text, ids in probe.answers]
    probe_path(store).write_bytes(with_checksum(msgspec.structs.replace(probe, answers=answers)))
    manifest = read_checked(store / "manifest.json", Manifest)
    manifest = msgspec.structs.replace(manifest, probe=probe_digest(store))
    (store / "manifest.json").write_bytes(with_checksum(manifest))
    assert validate(Store(store)).ok
    return store


def train(out: Path, *stores: Path) -> Path:
    data = {**RECIPE["data"], "train": [str(store) for store in stores]}
    return tokmill.train({**RECIPE, "data": data}, out, quiet=True).path


def test_a_run_keeps_the_texts_and_asks_again(store: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", store)
    file = run / VOCAB / "probe.json"
    assert file.read_bytes() == probe_path(store).read_bytes()
    assert load_coder(run, read_run(run)[1], ["token"])[1] is not None
    other_ids(store)
    shutil.copyfile(probe_path(store), file)
    with pytest.raises(TokmillError, match="this program gives other ids .* text 1 of") as told:
        load_coder(run, read_run(run)[1], ["token"])
    assert "tokmill doctor" in told.value.hint


def test_training_on_ids_of_another_engine_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="this program gives other ids"):
        train(tmp_path / "run", other_ids(store))


def test_stores_of_two_engines_are_not_mixed(store: Path, tmp_path: Path) -> None:
    other = other_ids(Path(shutil.copytree(store, tmp_path / "other")))
    with pytest.raises(TokmillError, match=f"other ids than that of {store}: text 1 of 64"):
        train(tmp_path / "run", store, other)


def test_stores_without_a_probe_are_read(store: Path, tmp_path: Path) -> None:
    manifest = read_checked(store / "manifest.json", Manifest)
    manifest = msgspec.structs.replace(manifest, probe=msgspec.UNSET)
    (store / "manifest.json").write_bytes(with_checksum(manifest))
    probe_path(store).unlink()
    assert not (train(tmp_path / "run", store) / VOCAB / "probe.json").exists()
