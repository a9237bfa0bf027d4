"""`make profiles`: stores of the profiles that are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from profiled import ran, text_file
from tokmill.bbv.traces.profile import Asked, profile
from tokmill.store.store import Store


@pytest.fixture(scope="module")
def script(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("profiles")


def test_stores_are_made_anew_when_a_program_is_added(script: Any, tmp_path: Path) -> None:
    """The files and libraries of both are others than at the first time."""
    data = str(text_file(tmp_path / "data", 20_000))
    folder, asked = tmp_path / "profiles", Asked(every_blocks=100_000)
    for name, programs in (("gzip", 1), ("bzip2", 2)):
        profile([ran(name), "-c", data], folder, asked, name=name)
        script.stores(folder)
        store = Store(folder / "store")
        found = {store.record(number)["program"] for number in range(len(store))}
        assert len(found) == programs
    # Of the same profiles they become the same.
    before = store.fingerprint
    script.stores(folder)
    assert Store(folder / "store").fingerprint == before
