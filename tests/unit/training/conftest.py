"""Stores that the tests of training share. Do not write to them."""

from pathlib import Path

import pytest
import torch

from toy import cycles, make_store

# Shapes are too small for two threads, which wait for each other where the machine is busy.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store to learn from."""
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(120))


@pytest.fixture(scope="session")
def val(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other documents of the same kind."""
    return make_store(tmp_path_factory.mktemp("stores") / "val", cycles(30, seed=1))
