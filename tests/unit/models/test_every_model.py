"""What holds of every model in the table: what it says of itself, and what it can be asked."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from small_models import KINDS, small_model
from tokmill.feed.feed import Batch
from tokmill.models.model import Tensors, taken
from tokmill.tasks.task import to_tensors

DOCUMENTS = np.repeat([[0, 1, -1]], [7, 9, 3], 1)


def tensors(ids: np.ndarray, document: np.ndarray) -> Tensors:
    keys = np.zeros(len(ids), np.uint64)
    return to_tensors(Batch({"token": ids}, document.astype(np.int32), keys), torch.device("cpu"))


def batch_of(whole: bool, rows: int = 1) -> Tensors:
    """Rows of one document, or of two and padding."""
    document = np.repeat(np.zeros_like(DOCUMENTS) if whole else DOCUMENTS, rows, 0)
    return tensors(np.arange(document.size).reshape(document.shape) % 11, document)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_position_depends_on_what_the_model_says(kind: str, whole: bool) -> None:
    """By the gradient: of the own document, and of a causal model not what is ahead."""
    batch = batch_of(whole)
    document, length = batch.document.numpy(), DOCUMENTS.shape[1]
    model = small_model(kind, {"token": 11}).double()
    embedded: list[torch.Tensor] = []

    def keep(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    model.get_submodule("fields").register_forward_hook(keep)
    hidden = model(batch)
    for t in range(length):
        if document[0, t] < 0:
            # Nobody reads the state of padding.
            continue
        (gradient,) = torch.autograd.grad(hidden[0, t, 0], embedded[0], retain_graph=True)
        # RWKV-7's chunks divide by what they multiply with: what is 0 is so up to rounding.
        reached = gradient[0].abs().sum(-1) > 1e-12
        expected = document[0] == document[0, t]
        if model.causal:
            expected &= np.arange(length) <= t
        assert reached.tolist() == expected.tolist()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_some_positions_are_those_of_all(kind: str, whole: bool) -> None:
    """States and gradients; a position may be asked for twice, in any order."""
    batch, model = batch_of(whole, rows=2), small_model(kind, {"token": 11})
    places = torch.tensor([[0, 3, 7, 12, 18], [5, 5, 2, 0, 15]])
    upstream = torch.randn(2, 5, model.dim)

    def learn(asked: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        hidden = model(batch, places) if asked else taken(model(batch), places)
        hidden.backward(upstream)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return hidden.detach(), grads

    (found, mine), (expected, theirs) = learn(True), learn(False)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_separate_ones(kind: str) -> None:
    """Hidden states and gradients, with padding in the row: positions begin with each document."""
    lengths = [15, 1, 17, 5]
    document = np.append(np.repeat(np.arange(4), lengths), [-1] * 8)[None].repeat(2, 0)
    ids = np.random.default_rng(0).integers(0, 11, document.shape)
    model = small_model(kind, {"token": 11})
    packed = model(tensors(ids, document))
    upstream = torch.randn(packed.shape) / 10
    upstream[:, 38:] = 0
    packed.backward(upstream)
    together = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    ends = np.cumsum([0, *lengths]).tolist()
    for row, (start, stop) in product(range(2), pairwise(ends)):
        part = slice(start, stop)
        alone = model(tensors(ids[row : row + 1, part], np.zeros((1, stop - start))))
        torch.testing.assert_close(packed[row, part], alone[0], atol=1e-5, rtol=1e-5)
        alone.backward(upstream[row : row + 1, part])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "keys"), [("decoder", {"dropout": 0.3}), ("encoder", {"dropout": 0.3}), ("rwkv7", {})]
)
def test_blocks_run_again_give_the_same_bits(kind: str, keys: dict[str, float]) -> None:
    def learn(recompute: bool) -> list[torch.Tensor]:
        model = small_model(kind, {"token": 11}, **keys).train()
        model.recompute = recompute
        torch.manual_seed(5)
        loss = model(batch_of(False, rows=2)).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    for kept, again in zip(learn(False), learn(True), strict=True):
        assert torch.equal(kept, again)
