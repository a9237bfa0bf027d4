"""`tokmill rl train --from`: a policy begins with the weights of an encoder, or of a policy."""

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
from toy import losses, weights

Command = Callable[..., str]
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurements, "_measure", made_times.made)


@pytest.fixture
def command(here: Callable[..., tuple[str, str]]) -> Command:
    """Run a line; return what it prints."""
    return lambda line, code=0: "".join(here(*shlex.split(line), code=code))


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
