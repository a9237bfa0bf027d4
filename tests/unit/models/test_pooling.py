"""Pooling, whole and segment by segment, against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tokmill.base.errors import UsageError
from tokmill.models.pooling import (
    AttentionPooling,
    Running,
    RunningAttention,
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


def by_segments(pooling: Running, hidden: Tensor, length: int) -> Tensor:
    for start in range(0, hidden.shape[1], length):
        rows = int((start < LENGTHS).sum())
        count = (LENGTHS[:rows] - start).clamp(max=length)
        pooling.add(hidden[:rows, start : start + int(count[0])], count)
    return pooling.result()


def attended(states: Tensor, query: Tensor) -> Tensor:
    """The definition, of one row."""
    return (states @ query / math.sqrt(len(query))).softmax(0) @ states


@pytest.mark.parametrize("length", [1, 2, 3, 7, 11, 100])
def test_segments_are_the_whole(hidden: Tensor, length: int) -> None:
    rows = [states[:n] for states, n in zip(hidden, LENGTHS.tolist(), strict=True)]
    query = torch.randn(4, 6) * 3
    wanted = {
        RunningMean(4, 6, hidden.device): [row.mean(0) for row in rows],
        RunningLast(4, 6, hidden.device): [row[-1] for row in rows],
        RunningAttention(query): [attended(row, q) for row, q in zip(rows, query, strict=True)],
    }
    for pooling, parts in wanted.items():
        found = by_segments(pooling, hidden.nan_to_num(1e3), length)
        torch.testing.assert_close(found, torch.stack(parts), rtol=1e-5, atol=1e-6)


def test_padding_that_is_not_a_number(hidden: Tensor) -> None:
    """A mean and a last state never see it; attention weighs it 0, and 0 times that is none."""
    for pooling in (RunningMean(4, 6, hidden.device), RunningLast(4, 6, hidden.device)):
        assert by_segments(pooling, hidden, 4).isfinite().all()


def test_scores_that_no_exponential_holds() -> None:
    hidden = torch.tensor([[[100.0, 0.0], [0.0, 100.0], [200.0, 0.0]]])
    found = RunningAttention(torch.tensor([[50.0, 0.0]]))
    for place in range(3):
        found.add(hidden[:, place : place + 1], torch.tensor([1]))
    torch.testing.assert_close(found.result(), torch.tensor([[200.0, 0.0]]))


def test_half_precision_is_summed_in_float32() -> None:
    states = torch.full((1, 4096, 2), 1.001, dtype=torch.bfloat16)
    pooling = RunningMean(1, 2, states.device)
    pooling.add(states, torch.tensor([4096]))
    torch.testing.assert_close(pooling.result(), states[0, :1].float())


def test_a_learned_query() -> None:
    """At first the mean; its gradient is that of the definition; half precision does not round."""
    torch.manual_seed(1)
    pooling, hidden = AttentionPooling(6), torch.randn(4, 11, 6)
    first = [hidden[i, :n].mean(0) for i, n in enumerate(LENGTHS.tolist())]
    torch.testing.assert_close(pooling(hidden, LENGTHS), torch.stack(first))
    torch.nn.init.normal_(pooling.query)
    found = pooling(hidden, LENGTHS)
    wanted = torch.stack(
        [attended(hidden[i, :n], pooling.query) for i, n in enumerate(LENGTHS.tolist())]
    )
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(found)
    gradients = [torch.autograd.grad((y * weight).sum(), pooling.query)[0] for y in (found, wanted)]
    torch.testing.assert_close(*gradients)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(pooling(hidden, LENGTHS), found)


def test_what_is_no_pooling() -> None:
    check_pool("mean")
    with pytest.raises(UsageError, match="pooled by 'men'") as error:
        check_pool("men")
    assert error.value.hint == "did you mean 'mean'?"
