"""Dilated convolutions: PyTorch's, document by document."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from small_models import small_model
from tokmill.errors import UsageError
from tokmill.feed.feed import Batch
from tokmill.models.convolution import neighbours
from tokmill.tasks.task import to_tensors


@pytest.mark.parametrize("dilation", [1, 2, 8, 30])
@pytest.mark.parametrize("taps", [1, 3, 5])
def test_a_convolution_is_that_of_pytorch(taps: int, dilation: int) -> None:
    """Also with a reach beyond the row, and for each document of a row by itself."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 17, 6), torch.randn(4, taps * 6)
    kernel = weight.view(4, taps, 6).transpose(1, 2)

    def peer(rows: torch.Tensor) -> torch.Tensor:
        reach = taps // 2 * dilation
        return F.conv1d(rows.transpose(1, 2), kernel, padding=reach, dilation=dilation).mT

    found = neighbours(x, None, taps, dilation) @ weight.T
    torch.testing.assert_close(found, peer(x), atol=1e-4, rtol=1e-4)
    document = torch.tensor([[0] * 5 + [1] * 9 + [-1] * 3, [0] * 17])
    found = neighbours(x, document, taps, dilation) @ weight.T
    parts = [peer(x[:1, :5]), peer(x[:1, 5:14]), peer(x[:1, 14:])]
    wanted = torch.cat([torch.cat(parts, 1), peer(x[1:])])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_it_sees_as_far_as_it_says() -> None:
    """4 layers of 3 taps with the dilations 1, 2, 4 and 1: 8 positions to each side."""
    model = small_model("convolution", {"token": 11}, taps=3, cycle=3).double()
    ids = np.arange(60)[None] % 11
    batch = Batch({"token": ids}, np.zeros((1, 60), np.int32), np.zeros(1, np.uint64))
    embedded: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    model.get_submodule("fields").register_forward_hook(keep)
    model(to_tensors(batch, torch.device("cpu")))[0, 30, 0].backward()
    reached = torch.nonzero(embedded[0].grad[0].abs().sum(-1))[:, 0].tolist()  # type: ignore[index]
    assert reached == list(range(22, 39))


@pytest.mark.parametrize("keys", [{"taps": 4}, {"taps": -1}, {"cycle": 0}, {"dropout": 1}])
def test_impossible_sizes_are_refused(keys: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        small_model("convolution", {"token": 11}, **keys)
