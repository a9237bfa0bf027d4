"""The fast product is the product, and its gradient the gradient."""

import pytest
import torch
from torch.nn import functional as F

from tokmill.models.transformers import layers
from tokmill.models.transformers.layers import ROWS, linear, outer, prefers_onednn, product

needs_onednn = pytest.mark.skipif(not layers.HAS_ONEDNN, reason="torch has no oneDNN here")


@pytest.fixture(autouse=True)
def wherever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test oneDNN's way where MKL is faster, too."""
    monkeypatch.setattr(layers, "ONEDNN", layers.HAS_ONEDNN)


@pytest.mark.parametrize(("lines", "intel"), [
    ("processor\t: 0\nvendor_id\t: GenuineIntel\n", True),
    ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", False),
    ("processor\t: 0\n", False),
    ("", False),
])  # fmt: skip
def test_who_made_the_processor(lines: str, intel: bool) -> None:
    """Only on Intel's processors MKL has its kernels for AVX-512."""
    assert layers.is_intel(lines) == intel


@needs_onednn
@pytest.mark.parametrize("shape", [(2, 300, 24, 40), (ROWS, 40, 24), (1, ROWS, 16, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_and_its_gradients_equal_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    *lead, width, out = shape
    x = torch.randn(*lead, width, requires_grad=True)
    weight = torch.randn(out, width, requires_grad=True)
    added = torch.randn(out, requires_grad=True) if bias else None
    inputs = [one for one in (x, weight, added) if one is not None]
    upstream = torch.randn(*lead, out)
    assert prefers_onednn(x, weight)
    found, expected = linear(x, weight, added), F.linear(x, weight, added)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@needs_onednn
def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight = torch.randn(ROWS, 8, requires_grad=True), torch.randn(8, 8)
    y = linear(x, weight)
    assert y.grad_fn is not None and y.grad_fn.name() == "OneDnnBackward"
    y.sum().backward()
    assert x.grad is not None and weight.grad is None


@needs_onednn
def test_matrices_that_lie_crosswise_are_read_right() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(40, ROWS).t(), torch.randn(40, 24)
    torch.testing.assert_close(product(a, b), a @ b, atol=1e-4, rtol=1e-4)
    for width in (8, 72):
        c = torch.randn(ROWS, width)
        torch.testing.assert_close(outer(a, c), a.t() @ c, atol=1e-4, rtol=1e-4)


def test_the_rest_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 8)
    few, many = torch.randn(ROWS - 1, 8), torch.randn(ROWS, 8)
    assert not prefers_onednn(few, weight)
    assert not prefers_onednn(many.double(), weight.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert not prefers_onednn(many, weight)
        assert linear(many, weight).dtype == torch.bfloat16
    torch.testing.assert_close(product(few, weight), few @ weight)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(many, torch.randn(8, 9))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not prefers_onednn(many, weight)
