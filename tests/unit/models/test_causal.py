"""Every model says whether it looks ahead, and it is so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from small_models import KINDS, small_model
from tokmill.feed.feed import Batch
from tokmill.tasks.task import to_tensors

DOCUMENTS = np.repeat([[0, 1, -1]], [7, 9, 3], 1)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_position_depends_on_what_the_model_says(kind: str, whole: bool) -> None:
    """By the gradient: of the own document, and of a causal model not what is ahead."""
    document = np.zeros_like(DOCUMENTS) if whole else DOCUMENTS
    length = document.shape[1]
    ids = np.arange(length)[None] % 11
    keys = np.zeros(1, np.uint64)
    batch = to_tensors(Batch({"token": ids}, document.astype(np.int32), keys), torch.device("cpu"))
    model = small_model(kind, {"token": 11}).double()
    embedded: list[torch.Tensor] = []

    def keep(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    model.get_submodule("fields").register_forward_hook(keep)
    hidden = model(batch)
    for t in range(length):
        (gradient,) = torch.autograd.grad(hidden[0, t, 0], embedded[0], retain_graph=True)
        # RWKV-7's chunks divide by what they multiply with: what is 0 is so up to rounding.
        reached = gradient[0].abs().sum(-1) > 1e-12
        expected = document[0] == document[0, t]
        if model.causal:
            expected &= np.arange(length) <= t
        assert reached.tolist() == expected.tolist()
