"""Checkpoints: whole or not there, and for any number of processes."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tokmill.models.model import Inputs
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.store.manifest import encode
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.training.engines.devices.device import seed_for
from tokmill.training.engines.engine import Engine
from tokmill.training.recipe.config import OptimConfig, RunConfig
from tokmill.training.runs.checkpoint import (
    State,
    checkpoints,
    digest_of,
    load_checkpoint,
    machine,
    moves,
    save_checkpoint,
)

SIZES = {"token": 23}


@pytest.fixture
def engine() -> Engine:
    model = Decoder(DecoderConfig(dim=8, layers=1, heads=2), Inputs(SIZES))
    engine = Engine(RunConfig(device="cpu"))
    engine.prepare(NextToken(NextTokenConfig(length=8), model, Inputs(SIZES)), OptimConfig())
    return engine


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.random()), random.random()


def test_only_the_newest_are_kept(engine: Engine, tmp_path: Path) -> None:
    for step in (5, 100_000_000, 20):
        save_checkpoint(tmp_path, engine, State(step=step), keep=2)
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["step-00000020", "step-100000000"]
    # The same step once more, beside what a kill has left.
    (tmp_path / "checkpoints/.tmp-step-00000020").mkdir()
    save_checkpoint(tmp_path, engine, State(step=20, tokens=7), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == names
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert load_checkpoint(tmp_path / "checkpoints/step-00000020", engine, 0).tokens == 7


def test_random_states_come_back(engine: Engine, tmp_path: Path) -> None:
    seed_for(3, 0, 0)
    folder = save_checkpoint(tmp_path, engine, State(step=4), keep=1)
    expected = drawn()
    seed_for(99, 0, 0)
    assert load_checkpoint(folder, engine, 0).step == 4
    assert drawn() == expected


def test_for_another_number_of_processes_they_are_drawn_anew(
    engine: Engine, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, engine, State(step=4), keep=1)
    other = State(step=4, world=3, machine=machine(engine))
    other.digest = digest_of(encode(other))
    (folder / "state.json").write_bytes(encode(other))
    found = []
    for seed in (7, 7, 8):
        state = load_checkpoint(folder, engine, seed)
        found.append(drawn())
    assert found[0] == found[1] != found[2]
    seed_for(7, 4, 0)
    assert drawn() == found[0]
    assert "processes: 3 then, 1 now; dropout is drawn anew" in moves(state, engine)


def test_every_process_and_step_draws_its_own() -> None:
    found = set()
    for seed, step, rank in np.ndindex(3, 3, 3):
        seed_for(seed - 1, step, rank)
        found.add(drawn())
    assert len(found) == 27


def test_what_moved_is_named(engine: Engine) -> None:
    here = machine(engine)
    assert moves(State(machine=here, engine="single"), engine) == ""
    assert moves(State(machine="abacus", engine="single"), engine) == (
        f" (was abacus, is {here}: equal up to rounding)"
    )
    assert moves(State(machine=here, engine="ddp"), engine) == (
        " (engine: ddp then, single now: equal up to rounding)"
    )
