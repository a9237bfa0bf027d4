"""A folder for the programs that the tests of one process compile once."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled programs lie: `compiles` makes each once."""
    return tmp_path_factory.mktemp("programs")
