"""Pooling, whole and segment by segment, against its definition."""

import math

import pytest
import torch
from torch import Tensor

from tokmill.base.errors import UsageError
from tokmill.models.heads import (
    RunningLast,
    RunningMean,
    check_pool,
)

LENGTHS = torch.tensor([11, 7, 7, 1])
"""Falling, as rows come."""


@pytest.fixture
def hidden() -> Tensor:
    torch.manual_seed(0)
    states = torch.randn(4, 11, 6)
    # What stands behind a row's end counts nowhere, whatever it is.
    states[torch.arange(11) >= LENGTHS[:, None]] = math.nan
    return states


def by_segments(pooling: RunningMean | RunningLast, hidden: Tensor, length: int) -> Tensor:
    for start in range(0, hidden.shape[1], length):
        rows = int((start < LENGTHS).sum())
        count = (LENGTHS[:rows] - start).clamp(max=length)
        pooling.add(hidden[:rows, start : start + int(count[0])], count)
    return pooling.result()


@pytest.mark.parametrize("length", [1, 2, 3, 7, 11, 100])
def test_segments_are_the_whole(hidden: Tensor, length: int) -> None:
    rows = [states[:n] for states, n in zip(hidden, LENGTHS.tolist(), strict=True)]
    wanted: dict[RunningMean | RunningLast, list[Tensor]] = {
        RunningMean(4, 6, hidden.device): [row.mean(0) for row in rows],
        RunningLast(4, 6, hidden.device): [row[-1] for row in rows],
    }
    for pooling, parts in wanted.items():
        found = by_segments(pooling, hidden.nan_to_num(1e3), length)
        torch.testing.assert_close(found, torch.stack(parts), rtol=1e-5, atol=1e-6)


def test_padding_that_is_not_a_number(hidden: Tensor) -> None:
    for pooling in (RunningMean(4, 6, hidden.device), RunningLast(4, 6, hidden.device)):
        assert by_segments(pooling, hidden, 4).isfinite().all()


def test_half_precision_is_summed_in_float32() -> None:
    states = torch.full((1, 4096, 2), 1.001, dtype=torch.bfloat16)
    pooling = RunningMean(1, 2, states.device)
    pooling.add(states, torch.tensor([4096]))
    torch.testing.assert_close(pooling.result(), states[0, :1].float())


def test_what_is_no_pooling() -> None:
    check_pool("mean")
    with pytest.raises(UsageError, match="pooled by 'men'") as error:
        check_pool("men")
    assert error.value.hint == "did you mean 'mean'?"
