"""First weights from another run."""

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import tokmill
from compare_task import PLACE
from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.store.manifest import read_json
from tokmill.store.schema import Column
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.task_inputs import Facts
from tokmill.training.runs.run import FACTS, load_task
from tokmill.training.runs.weights import check_ids, start_facts
from toy import cycles, make_store, recipe

BARE = Facts(fingerprint="", columns={"token": 20}, schema={"token": Column("u1")}, vocabularies={})
NAMED = msgspec.structs.replace(
    BARE,
    schema={"token": Column("u1", vocab="token")},
    vocabularies={"token": Vocabulary("tokenizer.json", "a" * 64, 20)},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    store = make_store(folder / "store", cycles(20))
    tokmill.train(recipe(store, steps=4, data={"val": str(store)}), folder / "run", quiet=True)
    return folder / "run"


@pytest.mark.parametrize("place", [".", "model", "best", "checkpoints/step-00000004"])
def test_every_folder_with_weights_is_a_start(place: str, run: Path, tmp_path: Path) -> None:
    store = run.parent / "store"
    start = {"start": str(run / place), "steps": 1}
    tokmill.train(
        {"data": {"train": str(store)}, "run": start, "optim": {"lr": 0}}, tmp_path / "new"
    )
    folder = {".": "model"}.get(place, place)
    before = load_file(run / folder / "model.safetensors")
    after = load_task(tmp_path / "new").state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_another_model_is_told_by_the_keys_that_differ(run: Path, tmp_path: Path) -> None:
    value = recipe(run.parent / "store", run={"start": str(run)})
    value["model"] = {"dim": 32, "layers": 2, "heads": 2}
    with pytest.raises(TokmillError, match=r"to start from: model\.dim: 16 → 32\b") as caught:
        tokmill.train(value, tmp_path / "new", quiet=True)
    assert "model.layers" not in caught.value.what and caught.value.hint
    value["model"] = {"dim": 16, "dropout": 0.1}
    value["run"]["steps"] = 1
    tokmill.train(value, tmp_path / "new", quiet=True)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"dropout": 0.1}, ""),
        ({"kv_heads": 2, "head_dim": 8}, ""),
        ({"norm_eps": 0.1}, "model.norm_eps: 1e-05 → 0.1"),
        ({"heads": 1, "rope_theta": 9.0}, "model.heads: 2 → 1; model.rope_theta: 10000.0 → 9.0"),
    ],
)
@pytest.mark.parametrize("task", ["next_token", "neighbours"])
def test_what_no_weight_shows_is_told(
    model: dict[str, float],
    told: str,
    task: str,
    neighbours: None,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The weights fit, and the model computes something else."""
    value = {"data": {"train": str(run.parent / "store"), "batch": 8}, "task": {"kind": task}}
    value |= {"run": {"start": str(run), "steps": 1}, "model": {"dim": 16, **model}}
    tokmill.train(value, tmp_path / "new", quiet=True)
    notes = [one for one in capsys.readouterr().err.splitlines() if "the model differs" in one]
    assert len(notes) == bool(told) and all(one.endswith(f": {told}") for one in notes)


def test_a_run_that_has_begun_needs_its_start_no_more(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "first")
    store = str(run.parent / "store")
    value = {"data": {"train": store}, "run": {"start": str(tmp_path / "first"), "steps": 2}}
    tokmill.train(value, tmp_path / "new", quiet=True)
    before = load_task(tmp_path / "new").state_dict()
    shutil.rmtree(tmp_path / "first")
    tokmill.train(None, tmp_path / "new", quiet=True)
    after = load_task(tmp_path / "new").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bare_ids_may_lack_the_largest(run: Path) -> None:
    fewer = msgspec.structs.replace(BARE, columns={"token": 12})
    check_ids(BARE, fewer, run)
    with pytest.raises(TokmillError, match="ids up to 19; the run to start from knows 0 to 11"):
        check_ids(fewer, BARE, run)


@pytest.mark.parametrize(("before", "now"), [(BARE, NAMED), (NAMED, BARE)])
def test_bare_ids_are_no_vocabulary(before: Facts, now: Facts, run: Path) -> None:
    with pytest.raises(TokmillError, match="no vocabulary") as refused:
        check_ids(before, now, run)
    assert refused.value.hint


def test_another_column_is_refused(run: Path) -> None:
    other = msgspec.structs.replace(BARE, columns={"opcode": 5})
    with pytest.raises(TokmillError, match="reads the columns token; the store has opcode"):
        check_ids(BARE, other, run)


def test_facts_keep_the_rows_of_the_start(run: Path) -> None:
    facts = read_json(run / FACTS, Facts)
    assert start_facts(run, facts) == facts
    fewer = msgspec.structs.replace(facts, columns={"token": 9})
    assert start_facts(run, fewer) == facts


@pytest.fixture
def neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task of the same model: it has no head, and compares rows."""
    monkeypatch.setitem(plugins.TASKS, "neighbours", PLACE)


def untied(folder: Path) -> Path:
    """A run with a head of its own."""
    store = make_store(folder / "store", cycles(20))
    tokmill.train(recipe(store, steps=2, task={"tied": False}), folder / "untied", quiet=True)
    return folder / "untied"


def test_another_task_takes_what_has_equal_names(
    neighbours: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = untied(tmp_path)
    value = {"data": {"train": str(tmp_path / "store"), "batch": 8}, "optim": {"lr": 0.0}}
    value |= {"task": {"kind": "neighbours"}, "run": {"start": str(run), "steps": 1}}
    before = load_file(run / "model/model.safetensors")
    capsys.readouterr()
    tokmill.train(value, tmp_path / "other", quiet=True)
    said = capsys.readouterr().err
    heads = {name for name in before if not name.startswith("model.")}
    assert heads and all(name in said for name in heads) and "not used" in said
    after = load_task(tmp_path / "other").state_dict()
    assert after.keys() == before.keys() - heads
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    # And back: the head begins anew, as drawn from the seed.
    value["task"] = {"kind": "next_token", "tied": False}
    value["run"]["start"] = str(tmp_path / "other")
    tokmill.train(value, tmp_path / "back", quiet=True)
    said = capsys.readouterr().err
    assert "begin anew" in said and all(name in said for name in heads)
    back = load_task(tmp_path / "back").state_dict()
    assert all(torch.equal(back[name], before[name]) == (name not in heads) for name in before)
