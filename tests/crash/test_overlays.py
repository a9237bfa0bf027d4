"""Kills and full disks while an overlay is made: the store stays, and the overlay goes on."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from test_faults import TURNS, Disturber, Scenario, ordinary, points_of

from crash_stores import contents, copy, write_inputs
from forked import Forked
from tokmill.store.store import Store


@pytest.fixture
def scenario(fast_path: Path, tokenizer: Path, forked: Forked) -> Scenario:
    """An overlay of a store of three shards."""
    template, store, mask = fast_path / "template", fast_path / "store", fast_path / "mask.npy"
    write_inputs(fast_path / "in", 2)
    built = forked("build", "jsonl", fast_path / "in", "-o", store, "--tokenizer", tokenizer,
                   "--workers", 0, "-q")  # fmt: skip
    assert built.code == 0, built.err
    shutil.copytree(store, template)
    np.save(mask, np.arange(Store(store).tokens) % 2)
    arguments = ("build", "overlay", store, "--values", mask, "--workers", 0, "-q")
    made = forked(*arguments)
    assert made.code == 0, made.err
    return Scenario(arguments, store, template, contents(store))


def test_a_fault_at_each_call(scenario: Scenario, strace: Forked) -> None:
    """Kills and errors take turns; the test below kills at more calls."""
    disturb = Disturber(scenario, strace, validate=True)
    for number, point in enumerate(ordinary(points_of(scenario, strace))):
        disturb(point, TURNS[number % len(TURNS)])
    assert disturb.faults >= 20


def test_a_killed_one_leaves_the_store_as_it_was(scenario: Scenario, strace: Forked) -> None:
    """Nothing is there but in its own folder."""
    assert scenario.template is not None
    before = contents(scenario.template)
    for point in ordinary(points_of(scenario, strace))[::4]:
        copy(scenario.template, scenario.store)
        inject = f"inject={point.call}:signal=KILL:when={point.number}"
        strace(*scenario.arguments, strace=["-e", f"trace={point.call}", "-e", inject])
        found = contents(scenario.store)
        assert {n: data for n, data in found.items() if not n.startswith("overlays/")} == before
