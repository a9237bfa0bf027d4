"""The average of the weights: what it is, how a run goes on with it, and who reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
from tokmill.base.errors import Interrupted, TokmillError, UsageError
from tokmill.inference.embed import embed
from tokmill.inference.sample import sample
from tokmill.models.model_inputs import Inputs
from tokmill.training.budget.memory import rough_bytes, tensor_bytes
from tokmill.training.engines.optimisers.average import AVERAGE, BLOCK, Average, decay_at
from tokmill.training.engines.saving import Saved
from tokmill.training.engines.single import Single
from tokmill.training.engines.tensors import read_tensors, write_tensors
from tokmill.training.evaluate import evaluate
from tokmill.training.recipe.check_recipe import from_dict
from tokmill.training.runs.intact import check_checkpoint
from tokmill.training.runs.run import load_task, make_task
from tokmill.training.runs.weight_files import export_file
from tokmill.training.runs.weights import step_of, weights_at
from toy import SIZE, losses, recipe, stop_after, text_store, weights

EMA = 0.7
LAST = "checkpoints/step-00000010"
WRITTEN = ("model.safetensors", "optimizer.safetensors", AVERAGE, "rng-00000.json")


def averaging(store: Path, val: Path, steps: int = 10, **sections: Any) -> dict[str, Any]:
    run = {"eval_every": 5, "checkpoint_every": 5, "seed": 3, **sections.pop("run", {})}
    model = {"dropout": 0.1}
    optim = {"ema": EMA, **sections.pop("optim", {})}
    return recipe(store, steps, data={"val": str(val)}, run=run, model=model, optim=optim)


@pytest.fixture(scope="module")
def made(store: Path, val: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps with an average."""
    out = tmp_path_factory.mktemp("runs") / "run"
    return tokmill.train(averaging(store, val), out, quiet=True).path


def test_the_decay_rises_to_what_was_asked_for() -> None:
    assert [decay_at(0.5, t) for t in (0, 1, 7, 8, 9, 10**12)] == [0.1, 2 / 11, 8 / 17] + 3 * [0.5]
    assert decay_at(0.999, 889) < 0.99 <= decay_at(0.999, 890)


def test_it_is_the_average_of_the_definition(
    store: Path, val: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summed in float64 from the weights of each step."""
    seen: list[dict[str, torch.Tensor]] = []
    plain = Single.step

    def step(self: Single, lr: float) -> float:
        if not seen:
            seen.append({name: p.detach().double() for name, p in self.task.named_parameters()})
        norm = plain(self, lr)
        seen.append({name: p.detach().double() for name, p in self.task.named_parameters()})
        return norm

    monkeypatch.setattr(Single, "step", step)
    run = tokmill.train(averaging(store, val), tmp_path / "run", quiet=True).path
    average = seen[0]
    for t, now in enumerate(seen[1:]):
        d = min(EMA, (1 + t) / (10 + t))
        average = {name: d * average[name] + (1 - d) * now[name] for name in now}
    assert len(seen) == 11
    found = weights(run, "average")
    for name, value in average.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), value, atol=1e-6, rtol=1e-6)
    assert any(not torch.equal(found[name], value) for name, value in weights(run).items())


def test_a_run_without_one_is_the_same_to_the_bit(
    made: Path, store: Path, val: Path, tmp_path: Path
) -> None:
    plain = tokmill.train(averaging(store, val, optim={"ema": 0.0}), tmp_path / "run", quiet=True)
    for name in (n for n in WRITTEN if n != AVERAGE):
        assert (made / LAST / name).read_bytes() == (plain.path / LAST / name).read_bytes(), name
    for name in ("loss", "grad_norm", "val_loss"):
        assert losses(made, name) == losses(plain.path, name)
    # Nothing of an average is there.
    assert not list(plain.path.rglob("*average*"))
    assert not any("ema" in name for name in plain.metrics)
    with pytest.raises(TokmillError, match="no weights called average") as error:
        weights_at(plain.path, "average")
    assert error.value.hint == "there are: 5, 10, best, last"


def test_nothing_is_done_where_none_is_wanted(store: Path, val: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Average, "__init__")
        patch.delattr(Average, "update")
        patch.delattr(Saved, "averaged")
        tokmill.train(averaging(store, val, 3, optim={"ema": 0.0}), tmp_path / "run", quiet=True)


def test_evaluations_are_of_both(made: Path, val: Path) -> None:
    last, average = losses(made, "val_loss"), losses(made, "val_loss_ema")
    assert list(last) == list(average) == [5, 10] and last[10] != average[10]
    assert losses(made, "val_perplexity_ema").keys() == {5, 10}
    assert losses(made, "val_bits_per_byte_ema").keys() == {5, 10}
    for at, wanted in (("last", last[10]), ("average", average[10])):
        found = evaluate(made, val, at=at, device="cpu")
        assert found["loss"] == pytest.approx(wanted, abs=1e-6) and found["step"] == 10


@pytest.mark.parametrize("stop", [1, 5, 6])
def test_a_resume_is_exact_to_the_last_bit(
    stop: int, made: Path, store: Path, val: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(stop, patch)
        tokmill.train(averaging(store, val), tmp_path / "run", quiet=True)
    assert weights_at(tmp_path / "run", "average").parent.name == f"step-{stop:08d}"
    tokmill.train(None, tmp_path / "run", resume=True, quiet=True)
    for name in WRITTEN:
        left, right = (run / LAST / name for run in (made, tmp_path / "run"))
        assert left.read_bytes() == right.read_bytes(), name
    file = "average/model.safetensors"
    assert (made / file).read_bytes() == (tmp_path / "run" / file).read_bytes()
    for name in ("loss", "val_loss", "val_loss_ema"):
        assert losses(made, name) == losses(tmp_path / "run", name)


def test_a_longer_run_drops_its_final_average(store: Path, val: Path, tmp_path: Path) -> None:
    value = averaging(store, val, 4, optim={"schedule": "constant"})
    tokmill.train(value, tmp_path / "run", quiet=True)
    assert weights_at(tmp_path / "run", "average") == tmp_path / "run/average/model.safetensors"
    value["run"]["steps"] = 9
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(7, patch)
        tokmill.train(value, tmp_path / "run", resume=True, quiet=True)
    assert not (tmp_path / "run/average").exists()
    assert step_of(weights_at(tmp_path / "run", "average").parent) == 7
    tokmill.train(value, tmp_path / "run", resume=True, quiet=True)
    assert step_of(tmp_path / "run/average") == 9


def test_another_decay_is_refused_on_resume(
    made: Path, store: Path, val: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "run")
    with pytest.raises(TokmillError, match=r"optim\.ema: 0\.7 → 0\.9"):
        value = averaging(store, val, optim={"ema": 0.9})
        tokmill.train(value, tmp_path / "run", resume=True, quiet=True)


def test_state_binds_it(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "run")
    path = tmp_path / "run" / LAST / AVERAGE
    files = json.loads((tmp_path / "run" / LAST / "state.json").read_text())["files"]
    assert AVERAGE in files and check_checkpoint(path.parent).step == 10
    whole = path.read_bytes()
    older = tmp_path / "run/checkpoints/step-00000005" / AVERAGE
    flipped = bytearray(whole)
    flipped[-9] ^= 1
    for data in (older.read_bytes(), bytes(flipped), whole[:-4], None):
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(TokmillError, match="damaged") as error:
            check_checkpoint(path.parent)
        assert error.value.where == str(path)
    path.write_bytes(older.read_bytes())
    shutil.rmtree(tmp_path / "run/average")
    with pytest.raises(TokmillError, match="comes from elsewhere"):
        load_task(tmp_path / "run", "average")
    # A resume goes on from the one before, and comes to the same average.
    shutil.rmtree(tmp_path / "run/model")
    tokmill.train(None, tmp_path / "run", resume=True, quiet=True)
    assert path.read_bytes() == whole


def test_a_file_that_does_not_say_its_updates(made: Path, tmp_path: Path) -> None:
    average = Average(0.9, lambda: [torch.zeros(1)])
    for said in ({}, {"updates": "x"}, {"updates": "-1"}, {"updates": "9" * 5000}):
        write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, said)
        with pytest.raises(TokmillError, match="how often"):
            average.load(tmp_path / "a.safetensors")
    average.load(made / LAST / AVERAGE)
    assert average.updates == 10


@pytest.mark.parametrize("place", ["average/model.safetensors", f"{LAST}/{AVERAGE}"])
def test_whoever_reads_weights_reads_it(
    place: str, made: Path, store: Path, val: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    if not place.startswith("average"):
        shutil.rmtree(run / "average")
    assert weights_at(run, "average") == run / place
    wanted = read_tensors(run / place)
    state = load_task(run, "average").state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in state.items())
    export_file(run, tmp_path / "w.pt", at="average")
    exported = torch.load(tmp_path / "w.pt", weights_only=True)
    assert all(torch.equal(value, wanted[name]) for name, value in exported.items())
    shutil.copytree(val, tmp_path / "val")
    digests = [embed(run, tmp_path / "val", at=at).model for at in ("last", "average")]
    assert digests[0] != digests[1]
    # It is one of the places that a new run may begin with.
    if place.startswith("average"):
        start = recipe(store, 1, run={"start": str(run / "average")}, optim={"lr": 0.0})
        begun = tokmill.train(start, tmp_path / "new", quiet=True).path
        assert all(torch.equal(value, weights(begun)[name]) for name, value in wanted.items())
    (run / place).write_bytes((run / place).read_bytes()[:-1])
    with pytest.raises(TokmillError, match="damaged"):
        load_task(run, "average")


def test_it_can_be_sampled(tmp_path: Path) -> None:
    texts = text_store(tmp_path / "store", ["a man a plan a canal panama", "was it a cat i saw"])
    value = recipe(texts, 12, optim={"ema": EMA})
    run = tokmill.train(value, tmp_path / "run", quiet=True).path
    found = sample(run, "a ", 30, at="average", device="cpu")
    shutil.copytree(run, tmp_path / "other")
    shutil.copy(run / "average/model.safetensors", tmp_path / "other/model/model.safetensors")
    assert found == sample(tmp_path / "other", "a ", 30, device="cpu")
    assert found != sample(run, "a ", 30, device="cpu")


def test_places_are_changed_and_changed_back() -> None:
    """Of weights that are larger than a block too, and of those without a value."""
    held = [torch.randn(2 * BLOCK + 5), torch.randn(3, 4), torch.zeros(0), torch.tensor(2.0)]
    before = [one.clone() for one in held]
    average = Average(0.5, lambda: held)
    for one in held:
        one.add_(1)
    average.update()
    kept = [one.clone() for one in average.tensors]
    average.swap()
    assert all(torch.equal(left, right) for left, right in zip(held, kept, strict=True))
    average.swap()
    assert all(torch.equal(left, right) for left, right in zip(average.tensors, kept, strict=True))
    assert all(torch.equal(left, right + 1) for left, right in zip(held, before, strict=True))


def test_a_failed_evaluation_leaves_the_weights(
    made: Path, store: Path, val: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokmill.training.loop import RowLoop

    plain, calls = RowLoop.measure, [0]

    def failing(self: Any, quiet: bool) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            held = [one.clone() for one in self.task.parameters()]
            average = [one.clone() for one in self.engine.average.tensors]
            monkeypatch.setattr(self.engine, "was", (held, average), raising=False)
            engines.append(self.engine)
            raise MemoryError
        return plain(self, quiet)

    engines: list[Any] = []
    monkeypatch.setattr(RowLoop, "measure", failing)
    with pytest.raises(MemoryError):
        tokmill.train(averaging(store, val), tmp_path / "run", quiet=True)
    (engine,) = engines
    now = (list(engine.task.parameters()), engine.average.tensors)
    for places in (0, 1):
        # They had changed places when it failed.
        pairs = zip(engine.was[places], now[1 - places], strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


def test_fp16_steps_that_are_left_out_change_no_average(
    store: Path, val: Path, tmp_path: Path
) -> None:
    run = tokmill.train(
        averaging(store, val, 8, run={"precision": "fp16"}), tmp_path / "run", quiet=True
    )
    skipped = run.metrics["skipped_steps"]
    average = Average(EMA, list)
    average.load(run.path / "checkpoints/step-00000008" / AVERAGE)
    assert average.updates == 8 - skipped


def test_the_estimate_counts_it(store: Path) -> None:
    with_, without = (
        from_dict(recipe(store, model={"dim": 64}, optim={"ema": ema})) for ema in (0.9, 0.0)
    )
    task = Single(with_.run)
    made = make_task(with_, Inputs({"token": SIZE}))
    task.prepare(made, with_.optim)
    assert task.average is not None
    held = sum(one.numel() * one.element_size() for one in task.average.tensors)
    sizes = {"token": SIZE}
    difference = tensor_bytes(with_, Inputs(sizes), 4, 2) - tensor_bytes(
        without, Inputs(sizes), 4, 2
    )
    assert difference == held == 4 * made.parameter_count()
    assert rough_bytes(with_, Inputs(sizes), 4) - rough_bytes(without, Inputs(sizes), 4) == held


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"optim": {"ema": 1.0}}, "optim.ema: 1.0 is above"),
        ({"optim": {"ema": -0.1}}, "optim.ema: -0.1 is below 0"),
        ({"run": {"engine": "deepspeed"}}, "deepspeed keeps no average"),
    ],
)
def test_what_is_refused(
    sections: dict[str, Any], what: str, store: Path, val: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as error:
        tokmill.train(averaging(store, val, **sections), tmp_path / "run", quiet=True)
    assert what in str(error.value) and "--set optim.ema=" in error.value.hint
    assert not (tmp_path / "run").exists()
