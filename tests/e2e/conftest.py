"""Scripts of benchmarks/ as modules."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def benchmark_script(repository: Path) -> Callable[[str], ModuleType]:
    """A function that imports a script by its name; others find what they import beside it."""

    def script(name: str) -> ModuleType:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(repository / "benchmarks"))
            return importlib.import_module(name)

    return script
