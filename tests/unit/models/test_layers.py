"""The parts without documents: the loss in chunks, and what they share with torch."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tokmill.models.transformers import layers
from tokmill.models.transformers.layers import (
    cross_entropy_with_gradient_,
    linear_cross_entropy,
)


def problem(rows: int = 70, dim: int = 12, ids: int = 31) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, ids, (2, rows // 2))
    targets[0, 3] = targets[1, -5:] = -1
    hidden = torch.randn(2, rows // 2, dim, requires_grad=True)
    return hidden, torch.randn(ids, dim, requires_grad=True), targets


def plainly(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once."""
    logits = F.linear(hidden, weight).flatten(0, -2).float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")


@pytest.mark.parametrize("rows", [7, 64, 70, 1000])
def test_the_loss_in_chunks_equals_the_plain_one(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(layers.CHUNK, "cpu", 0)
    monkeypatch.setattr(layers, "LEAST_ROWS", rows)
    hidden, weight, targets = problem()
    found, expected = (f(hidden, weight, targets) for f in (linear_cross_entropy, plainly))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for one, other in zip(
        torch.autograd.grad(found * 0.3, (hidden, weight)),
        torch.autograd.grad(expected * 0.3, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert one.is_contiguous()


@pytest.mark.parametrize(("rows", "ids"), [(1500, 40), (300, 9000), (40, 9000)])
@pytest.mark.parametrize("onednn", [True, False])
def test_the_loss_by_both_libraries_equals_the_plain_one(
    rows: int, ids: int, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "ONEDNN", onednn and layers.HAS_ONEDNN)
    hidden, weight, targets = problem(rows=rows, ids=ids)
    found, expected = (f(hidden, weight, targets) for f in (linear_cross_entropy, plainly))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    for one, other in zip(
        torch.autograd.grad(found, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_plain_one_in_bfloat16() -> None:
    hidden, weight, targets = problem()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (f(hidden, weight, targets) for f in (linear_cross_entropy, plainly))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for one, other in zip(
        torch.autograd.grad(found, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("pull", [0.0, 0.3])
def test_as_on_a_gpu_ids_are_padded(
    compiled: bool, pull: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is compiled there is the same formula."""
    hidden, weight, targets = (x.detach().clone() for x in problem())
    given = [x.double().requires_grad_() for x in (hidden, weight, torch.randn(len(weight)))]

    def learn(**keys: bool) -> list[Tensor]:
        loss = linear_cross_entropy(*given[:2], targets, pull, given[2], **keys)
        return [loss, *torch.autograd.grad(loss, given)]

    plain = learn()
    monkeypatch.setitem(layers.ALIGNED, "cpu", 8)
    monkeypatch.setitem(layers.CHUNK, "cpu", 0)
    monkeypatch.setattr(layers, "LEAST_ROWS", 32)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    layers.compiled_gradient.cache_clear()
    for one, other in zip(learn(compiled=compiled), plain, strict=True):
        torch.testing.assert_close(one, other)
    layers.compiled_gradient.cache_clear()


def test_gradients_are_made_only_where_they_are_asked_for() -> None:
    hidden, weight, targets = problem()
    frozen = linear_cross_entropy(hidden, weight.detach(), targets)
    (of_hidden,) = torch.autograd.grad(frozen, hidden)
    (expected,) = torch.autograd.grad(plainly(hidden, weight, targets), hidden)
    torch.testing.assert_close(of_hidden, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, frozen.detach(), rtol=0, atol=0)


def test_two_backward_passes_add_up() -> None:
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    once = weight.grad.clone()
    (loss * 2).backward()
    torch.testing.assert_close(weight.grad, 3 * once)


def test_logits_far_from_zero_do_not_overflow() -> None:
    logits = torch.tensor([[1000.0, 0.0, -1000.0], [-1000.0, -1000.0, -1000.0]])
    loss = cross_entropy_with_gradient_(logits, torch.tensor([2, -1]))
    assert loss == 2000
    torch.testing.assert_close(logits, torch.tensor([[1.0, 0, -1], [0, 0, 0]]))


def test_highest_logits_are_pulled_to_zero() -> None:
    """The gradient is that of the loss and of pull / 2 · (highest logit)², the value without it."""
    torch.manual_seed(0)
    targets = torch.tensor([3, -1, 0, 6, 2])
    for pull in (0.0, 0.3):
        hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, targets, pull)
        found = torch.autograd.grad(loss, (hidden, weight))
        logits = hidden @ weight.t()
        plain = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        torch.testing.assert_close(loss, plain)
        square = (logits.amax(-1)[targets >= 0] ** 2).sum()
        expected = torch.autograd.grad(plain + pull / 2 * square, (hidden, weight))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
