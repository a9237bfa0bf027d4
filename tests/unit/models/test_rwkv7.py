"""RWKV-7: documents do not see each other, nothing looks ahead, and its groups are the rule's."""

import numpy as np
import pytest
import torch

from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch
from tokmill.models.model import Inputs, Tensors
from tokmill.models.rwkv.rwkv7 import RWKV7, RWKV7Config
from tokmill.tasks.task import to_tensors

SMALL = RWKV7Config(dim=16, layers=2, head_dim=8)


def tensors(ids: np.ndarray, document: np.ndarray) -> Tensors:
    batch = Batch({"token": ids}, document.astype(np.int32), np.zeros(len(ids), np.uint64))
    return to_tensors(batch, torch.device("cpu"))


def model(config: RWKV7Config = SMALL, **sizes: int) -> RWKV7:
    torch.manual_seed(1)
    made = RWKV7(config, Inputs(sizes or {"token": 11})).double()
    with torch.no_grad():
        for parameter in made.parameters():
            # Away from the zeros of the start, behind which a leak could hide.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


def test_a_row_may_be_run_in_parts() -> None:
    made = model()
    ids = torch.arange(40)[None] % 11
    whole = made(tensors(ids.numpy(), np.zeros((1, 40))))
    state, parts = made.start(1), []
    for part in (ids[:, :1], ids[:, 1:2], ids[:, 2:37], ids[:, 37:]):
        y, state = made.run({"token": part}, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-10)


def test_groups_follow_the_official_rule() -> None:
    made = model()
    names = {id(p): name for name, p in made.named_parameters()}
    decay, plain, fast = made.param_groups(0.1)
    assert (decay["weight_decay"], plain["weight_decay"], fast["weight_decay"]) == (0.1, 0.0, 0.0)
    assert {names[id(p)] for p in fast["params"]} == {f"blocks.{i}.att.w0" for i in range(2)}
    assert fast["lr_scale"] == 2.0
    decayed = {names[id(p)] for p in decay["params"]}
    assert "blocks.0.att.key.weight" in decayed and len(decayed) == 1 + 2 * 6
    assert not any(name.endswith(("1", "2", "r_k", "ln_x.weight")) for name in decayed)
    total = sum(len(group["params"]) for group in (decay, plain, fast))
    frozen = [name for name, p in made.named_parameters() if not p.requires_grad]
    assert frozen == [f"blocks.0.att.v{i}" for i in range(3)]
    assert total + 3 == len(list(made.parameters()))


def test_the_number_of_weights_is_the_published_one() -> None:
    """2 V C + 4 C + L (19 C + 12 C² + 2 C (ranks)), with the head."""
    config = RWKV7Config(dim=256, layers=3)
    ranks = {"w": 32, "a": 32, "v": 32, "g": 64}
    assert config.ranks == ranks
    made = RWKV7(config, Inputs({"token": 50}))
    width, layers = config.dim, config.layers
    each = 19 * width + 12 * width**2 + 2 * width * sum(ranks.values())
    weights = sum(p.numel() for p in made.parameters()) + 50 * width
    assert weights == 2 * 50 * width + 4 * width + layers * each


def test_weights_in_bfloat16_are_run_in_it() -> None:
    """As DeepSpeed's own bf16 holds them; the recurrence stays in float32."""
    ids = np.arange(1, 21).reshape(2, 10) % 11
    batch = tensors(ids, np.zeros_like(ids))
    expected = model()(batch)
    found = model().bfloat16()(batch)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=0.1, rtol=0.05)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="not a number of heads"):
        RWKV7(RWKV7Config(dim=100), Inputs({"token": 3}))
    with pytest.raises(UsageError, match="expected `int` >= 1"):
        RWKV7(RWKV7Config(layers=0), Inputs({"token": 3}))
    RWKV7(RWKV7Config(dim=8, head_dim=1, layers=1), Inputs({"token": 3}))
