"""The decoder and its head alone: the loss is that of the logits, the weights those of a run."""

from __future__ import annotations

import pytest
import torch

from tokmill.models.decoder import Decoder, DecoderConfig
from tokmill.models.inputs import Inputs
from tokmill.models.language_model import LanguageModel
from tokmill.models.layers import cross_entropy
from tokmill.tasks.next_token import NextToken, NextTokenConfig

CONFIG = DecoderConfig(dim=16, layers=2, heads=2)


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_the_cross_entropy_of_the_logits(tied: bool) -> None:
    torch.manual_seed(0)
    model, ids = LanguageModel(CONFIG, 20, tied), torch.randint(20, (3, 9))
    targets = torch.randint(20, (3, 9))
    targets[1, 4] = -1
    assert model(ids).shape == (3, 9, 20)
    loss, expected = model.loss(ids, targets), cross_entropy(model(ids), targets)
    torch.testing.assert_close(loss, expected)
    weights = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_a_run(tied: bool) -> None:
    torch.manual_seed(0)
    task = NextToken(
        NextTokenConfig(tied=tied), Decoder(CONFIG, Inputs({"token": 20})), Inputs({"token": 20})
    )
    model = LanguageModel(CONFIG, 20, tied)
    model.load_state_dict(task.state_dict())
    ids = torch.randint(20, (2, 5))
    torch.testing.assert_close(model(ids), task.logits(model.hidden(ids)))
