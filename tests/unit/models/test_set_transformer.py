"""The Set Transformer: a signature of weighted elements alone, and its formula."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from small_models import small_model
from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch
from tokmill.models.model import WEIGHT, Inputs, OfSets, Tensors
from tokmill.models.sets.set_transformer import Mab, SetTransformer
from tokmill.tasks.task import to_tensors

INPUTS = Inputs(vectors={"vector": 6, WEIGHT: 1})


def batch_of(sets: list[tuple[np.ndarray, np.ndarray]], length: int = 0) -> Tensors:
    """Rows of a set each, (n, 6) and (n,), padded to `length` or to the largest."""
    length = length or max(len(weights) for _, weights in sets)
    vectors = np.zeros((len(sets), length, 6), np.float32)
    weight = np.zeros((len(sets), length, 1), np.float32)
    document = np.full((len(sets), length), -1, np.int32)
    for row, (elements, weights) in enumerate(sets):
        vectors[row, : len(weights)], weight[row, : len(weights), 0] = elements, weights
        document[row, : len(weights)] = 0
    columns = {"vector": vectors, WEIGHT: weight}
    return to_tensors(Batch(columns, document, np.zeros(len(sets), np.uint64)), torch.device("cpu"))


def some_set(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 6)).astype(np.float32), random.random(count).astype(
        "f4"
    ) + 0.01


def signature(model: Any, *sets: tuple[np.ndarray, np.ndarray], length: int = 0) -> Tensor:
    with torch.no_grad():
        made: Tensor = model.signature(batch_of(list(sets), length))
    return made


@pytest.fixture(params=["attention", "feature", "both"])
def model(request: pytest.FixtureRequest) -> Any:
    return small_model("set_transformer", INPUTS, weigh=request.param)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_order_padding_and_batch_mates_change_nothing(model: Any) -> None:
    assert isinstance(model, OfSets)
    sets = [some_set(count, seed) for seed, count in enumerate((5, 1, 40, 17))]
    alone = torch.cat([signature(model, one) for one in sets])
    assert np.ptp(alone.numpy(), axis=0).min() > 1e-3
    for length in (40, 41, 512):
        close(signature(model, *sets, length=length), alone)
    close(signature(model, *sets[::-1]).flip(0), alone)
    order = np.random.default_rng(9).permutation(40)
    elements, weights = sets[2]
    close(signature(model, (elements[order], weights[order])), alone[2:3])


def test_weights_are_amounts() -> None:
    """Two halves are the whole, nothing is nothing, and a scale of all weights does not count."""
    model = small_model("set_transformer", INPUTS)
    elements, weights = some_set(9)
    wanted = signature(model, (elements, weights))
    twice = np.concatenate([elements, elements[:3]])
    halves = np.concatenate([weights[:3] / 2, weights[3:], weights[:3] / 2])
    close(signature(model, (twice, halves)), wanted)
    more = np.concatenate([elements, elements[:2] + 5]), np.append(weights, [0, 0]).astype("f4")
    close(signature(model, more), wanted)
    close(signature(model, (elements, weights * 1000)), wanted)
    other = weights.copy()
    other[0] *= 10
    assert (signature(model, (elements, other)) - wanted).abs().max() > 1e-3


def test_a_set_without_weight_is_zero(model: Any) -> None:
    elements, weights = some_set(4)
    batch = batch_of([(elements, weights * 0), (elements, weights), (elements, -weights)])
    found = model.signature(batch)
    assert not found[0].any() and found[1].any() and not found[2].any()
    found.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_sets_side_by_side_are_sets_alone() -> None:
    model = small_model("set_transformer", INPUTS)
    left, right = some_set(5), some_set(7, seed=1)
    batch = batch_of([tuple(np.concatenate(pair) for pair in zip(left, right, strict=True))], 15)
    batch.document[0, 5:12] = 1
    with torch.no_grad():
        found = model(batch)[0]
        alone = [model(batch_of([one]))[0] for one in (left, right)]
    close(found[:12], torch.cat(alone))


def test_a_block_is_that_of_the_paper() -> None:
    """Against PyTorch's multihead attention, with the logarithms of weights as a mask."""
    torch.manual_seed(0)
    block, peer = Mab(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    for name in ("norm", "last_norm"):
        nn.init.normal_(getattr(block, name).weight)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([block.q.weight, block.k.weight, block.v.weight]))
        peer.in_proj_bias.copy_(torch.cat([block.q.bias, block.k.bias, block.v.bias]))
        peer.out_proj.weight.copy_(block.o.weight)
        peer.out_proj.bias.copy_(block.o.bias)
        x, y, logs = torch.randn(2, 3, 16), torch.randn(2, 7, 16), torch.rand(2, 1, 7).log()
        mask = logs.expand(-1, 3, -1).repeat_interleave(4, 0)
        h = block.norm(x + peer(x, y, y, attn_mask=mask)[0])
        wanted = block.last_norm(h + F.relu(block.feed_forward(h)))
        torch.testing.assert_close(block(x, y, logs), wanted, atol=1e-5, rtol=1e-5)


def test_half_precision_and_recomputing_are_near() -> None:
    model: SetTransformer = small_model("set_transformer", INPUTS)  # type: ignore[assignment]
    sets = [some_set(12, seed) for seed in range(3)]
    wanted = signature(model, *sets)
    with torch.autocast("cpu", torch.bfloat16):
        found = signature(model, *sets)
    assert F.cosine_similarity(found.float(), wanted).min() > 0.99
    grads = []
    for again in (False, True):
        model.train().recompute = again
        model.zero_grad()
        model.signature(batch_of(sets)).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("keys", [{"seeds": 0}, {"inducing": -1}, {"heads": 3}, {"layers": 0}])
def test_impossible_sizes_are_refused(keys: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        small_model("set_transformer", INPUTS, **keys)
