"""`tokmill rl train --from`: a policy begins with the weights of an encoder, or of a policy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import made_times
import tokmill
from made_times import recipe
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators
from toy import losses, weights

Command = Callable[..., str]
torch.set_num_threads(1)
ENCODER = "model.observes.encoder."
"""How the names of an encoder's weights begin in a policy."""


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurements, "_measure", made_times.made)


@pytest.fixture
def command(here: Callable[..., tuple[str, str]]) -> Command:
    """Run a line; return what it prints."""
    return lambda line, code=0: "".join(here(*shlex.split(line), code=code))


def test_an_encoder_becomes_a_policy_whose_attention_is_drawn(command: Command) -> None:
    """The commands of docs/schedules.md with small sizes; a slow test runs them as they stand."""
    small = "--set model.dim=16 --set model.layers=1 --set model.heads=2 --set model.hidden=32"
    policy = '{"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}'
    Path("policy.json").write_text(
        '{"model_type": "distilbert", "bench_count": 2, "lr": 0.0, '
        f'"model_config": {{"distilbert": {policy}}}}}'
    )
    few = "--config policy.json --set 'task.modules=[\"relu 8\"]' --set 'task.held_out=[]'"
    Path("a.mlir").write_text(generators.chain("matmul 8 8 8, relu"))
    command("build mlir a.mlir --schedules 3 -o store")
    command(f"train mlir-fields --data store -o encoder --steps 2 --quiet {small}")
    for name, start in (("policy", "--from encoder"), ("other", "")):
        command(f"rl train schedules-distilbert {start} -o {name} --steps 1 --quiet {few}")
    command("plot attention policy 'matmul 64 64 64, relu' -o attention.svg")
    assert Path("attention.svg").stat().st_size > 10_000
    # Nothing was learned (lr = 0), so the encoder is that of the run, but for what has other rows.
    theirs, mine, other = (weights(Path(name)) for name in ("encoder", "policy", "other"))
    names = {name.removeprefix(ENCODER) for name in mine if name.startswith(ENCODER)}
    equal = {
        name: torch.equal(mine[ENCODER + name], theirs[f"model.{name}"])
        for name in names
        if mine[ENCODER + name].shape == theirs[f"model.{name}"].shape
    }
    assert len(equal) >= 10 and all(equal.values())
    assert not torch.equal(mine[key := f"{ENCODER}blocks.0.attention.q.weight"], other[key])


def test_a_policy_begins_with_the_weights_of_another(command: Command) -> None:
    few = "--steps 1 --quiet --set task.bench_count=2 --set 'task.held_out=[]'"
    more = f"{few} --set 'task.modules=[\"relu 8\"]' --set lr=0.0"
    command(f"rl train schedules-lstm -o before {few}")
    # Other modules; nothing is learned (lr = 0), so the weights are those of the beginning.
    command(f"rl train schedules-lstm --from before -o after {more} --set run.seed=5")
    command(f"rl train schedules-lstm -o alone {more} --set run.seed=5")
    mine, theirs, anew = (weights(Path(name)) for name in ("after", "before", "alone"))
    assert mine.keys() == theirs.keys() == anew.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not torch.equal(mine["heads.kind.weight"], anew["heads.kind.weight"])
    # The best schedules of the run are of other modules, and do not come with it.
    assert losses(Path("after"), "evaluations") == {1: 2.0}
    assert json.loads(Path("after", "schedules.json").read_text()).keys() == {"relu 8"}


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("model.model_type", "'lstm'", "'distilbert'"),
        ("model.model_type", "'lstm'", "'loop_transformer'"),
        ("model.hidden", "32", "16"),
    ],
)
def test_a_policy_of_another_kind_is_refused(
    key: str, old: str, new: str, command: Command, tmp_path: Path
) -> None:
    tokmill.train(recipe(tmp_path / "cache", steps=1, eval_every=0), Path("before"), quiet=True)
    sets = f"--set {key}={new} --set 'task.modules=[\"relu 8\"]'"
    line = f"rl train policy --from before -o after {sets}"
    said = command(line, code=1)
    assert "the model is not that of the run to start from" in said in said
    assert f"{key}: {old} → {new}" in said
    # What the modules are, and how is learned from them, may differ.
    assert "before" in said and "hint: " in said and "task." not in said
    assert not Path("after", "model").exists()
