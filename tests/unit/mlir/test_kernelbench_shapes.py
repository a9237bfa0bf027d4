"""The shapes of KernelBench are modules, and small enough."""

from __future__ import annotations

import pytest

from tokmill.mlir.modules import kernelbench, problem


@pytest.mark.parametrize("name", kernelbench.LEVEL_1)
def test_each_shape_is_a_module_of_bounded_work(name: str) -> None:
    found = problem.of_line(kernelbench.LEVEL_1[name])
    assert sum(each.iterations for each in found.operations) <= kernelbench.MOST
