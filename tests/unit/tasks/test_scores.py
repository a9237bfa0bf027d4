"""The loss of each token, and which instructions a row holds whole."""

import pytest
import torch
from torch.nn import functional as F

from tokmill.models.transformers.layers import CHUNK, token_scores


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("ids", [30, CHUNK["cpu"] // 256 + 1])
def test_scores_are_those_of_the_logits(ids: int, biased: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 100, 4), torch.randn(ids, 4)
    targets = torch.randint(-1, ids, (3, 100))
    bias = torch.randn(ids) if biased else None
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    likeliest = logits.argmax(-1).view(3, 100)
    targets[:, ::3] = likeliest[:, ::3]
    found = token_scores(hidden, weight, targets, bias)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")
    torch.testing.assert_close(found.loss.flatten(), loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.right, likeliest == targets) and found.right[:, ::3].all()
