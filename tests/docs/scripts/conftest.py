"""The sections of docs/coming-from-the-scripts.md, played once."""

import os
from collections.abc import Callable, Container
from pathlib import Path

import pytest
from page import Played

Play = Callable[..., Played]


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Run the commands of a section in the order of the page, once for all its tests.

    play("CS336", put_inputs, later=LATER) puts the inputs that the page names into a new folder
    and runs the commands but those of `later`, which `.rest()` runs. All workers of pytest-xdist
    share the folder, so tests read what is in it and write elsewhere.
    """
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    known: dict[str, Played] = {}

    def played(
        system: str, put_inputs: Callable[[Path], None], later: Container[str] = ()
    ) -> Played:
        if system not in known:
            folder = base / f"played-{system.replace(' ', '-')}"
            folder.mkdir(exist_ok=True)
            known[system] = Played(system, folder, later)
            known[system].first(put_inputs)
        return known[system]

    return played
