"""Heads: their losses are those of plain logits; a head computes what it is given and no more."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from small_models import small_model
from tokmill.base.errors import UsageError
from tokmill.models.heads import Classes, Heads, Pooler, Transform
from tokmill.models.model import Model, predicted, taken
from tokmill.models.transformers import layers

SIZES = {"token": 11, "kind": 5}


def made(tied: bool, bias: bool, transformed: bool) -> tuple[Model, Heads]:
    model = small_model("encoder", SIZES)
    transform = Transform(model.dim) if transformed else None
    heads = Heads(model, SIZES, tied, bias=bias, transform=transform)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, mean=parameter.ndim == 1, std=0.3)
    return model, heads


def problem() -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states (B, T, D), and targets of two columns, few of which count."""
    torch.manual_seed(2)
    hidden = torch.randn(3, 40, 16, requires_grad=True)
    targets = {name: torch.randint(n, (3, 40)) for name, n in SIZES.items()}
    hidden_targets = torch.rand(3, 40) > 0.15
    return hidden, {n: t.masked_fill(hidden_targets, -1) for n, t in targets.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transformed", [True, False])
@pytest.mark.parametrize("rows", [7, 1000], ids=["chunks", "once"])
def test_losses_are_those_of_plain_logits(
    rows: int, transformed: bool, bias: bool, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all positions, and of those alone that are predicted; with the gradients of weights."""
    monkeypatch.setitem(layers.CHUNK, "cpu", 0)
    monkeypatch.setattr(layers, "LEAST_ROWS", rows)
    model, heads = made(tied, bias, transformed)
    hidden, targets = problem()
    places, fewer = predicted({name: target.numpy() for name, target in targets.items()})
    at = {name: torch.from_numpy(target) for name, target in fewer.items()}
    alone = heads.losses(model, taken(hidden, torch.from_numpy(places)), at)
    weights = [hidden, *heads.parameters(), *(model.embedding(c) for c in SIZES if tied)]
    expected = {}
    for column, target in targets.items():
        states = hidden if heads.transform is None else heads.transform(hidden)
        logits = F.linear(states, heads.weight(model, column), heads.bias(column))
        torch.testing.assert_close(heads.logits(model, hidden, column), logits)
        expected[column] = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum"
        )
    assert len(heads.biases) == 2 * bias and len(heads.linear) == 2 * (not tied)
    wanted = torch.autograd.grad(sum(expected.values(), hidden.new_zeros(())), weights)
    for losses in (heads.losses(model, hidden, targets), alone):
        for column in SIZES:
            torch.testing.assert_close(losses[column], expected[column])
        total = sum(losses.values(), hidden.new_zeros(()))
        for one, other in zip(torch.autograd.grad(total, weights), wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_the_bias_has_a_gradient_in_half_precision() -> None:
    model, heads = made(tied=True, bias=True, transformed=False)
    hidden, targets = problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss = heads.losses(model, hidden, targets)["token"]
    (found,) = torch.autograd.grad(loss, heads.bias("token"))
    logits = F.linear(hidden, heads.weight(model, "token"), heads.bias("token")).flatten(0, 1)
    plain = F.cross_entropy(logits, targets["token"].flatten(), ignore_index=-1, reduction="sum")
    (expected,) = torch.autograd.grad(plain, heads.bias("token"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)


def test_nothing_to_predict_leaves_gradients_of_zero() -> None:
    """DDP wants a gradient of every weight, of a micro-batch without targets too."""
    model, heads = made(tied=False, bias=True, transformed=True)
    for positions in (0, 1):
        states = torch.randn(2, positions, 16)
        nothing = {name: torch.full((2, positions), -1) for name in SIZES}
        loss = sum(heads.losses(model, states, nothing).values(), torch.zeros(()))
        assert loss == 0
        for gradient in torch.autograd.grad(loss, list(heads.parameters())):
            assert (gradient == 0).all()


def test_a_head_that_cannot_be_tied_says_so_at_once() -> None:
    model = small_model("encoder", SIZES, join="concat", field_dim=8)
    with pytest.raises(UsageError, match="8 wide"):
        Heads(model, SIZES, tied=True)


def test_only_matrices_of_heads_decay() -> None:
    _, heads = made(tied=False, bias=True, transformed=True)
    decayed, plain = heads.param_groups(0.1)
    assert {p.ndim for p in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {p.ndim for p in plain["params"]} == {1} and plain["weight_decay"] == 0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(heads.parameters()))


def test_a_class_a_row() -> None:
    torch.manual_seed(0)
    head, vectors = Classes(16, 4), torch.randn(5, 16)
    assert head(vectors).shape == (5, 4)
    torch.testing.assert_close(head(vectors), vectors @ head.linear.weight.T)
    nn.init.normal_(head.linear.bias)
    labels = torch.tensor([3, -1, 0, 0, 2])
    known = labels >= 0
    likely = head(vectors)[known].log_softmax(-1)
    expected = -likely[torch.arange(4), labels[known]].sum()
    torch.testing.assert_close(head.loss(vectors, labels), expected)
    none = head.loss(vectors, torch.full((5,), -1))
    assert none == 0
    none.backward()
    assert head.linear.weight.grad is not None and (head.linear.weight.grad == 0).all()


def test_a_pooler_reads_the_first_position() -> None:
    torch.manual_seed(0)
    pooler, hidden = Pooler(16), torch.randn(3, 9, 16)
    expected = torch.tanh(hidden[:, 0] @ pooler.linear.weight.T + pooler.linear.bias)
    torch.testing.assert_close(pooler(hidden), expected)
    changed = hidden.clone()
    changed[:, 1:] = 0
    assert torch.equal(pooler(changed), pooler(hidden))


def test_what_heads_drop_they_drop_in_training_alone() -> None:
    torch.manual_seed(0)
    head, vectors = Classes(16, 4, dropout=0.5), torch.randn(5, 16)
    assert not torch.equal(head(vectors), head(vectors))
    head.eval()
    assert torch.equal(head(vectors), head(vectors))
