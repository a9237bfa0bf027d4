"""RWKV-7: documents do not see each other, nothing looks ahead, and its groups are the rule's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch
from tokmill.models.model import Inputs, Tensors
from tokmill.models.rwkv.rwkv7 import RWKV7, RWKV7Config
from tokmill.tasks.next_token import NextToken, NextTokenConfig
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
    with pytest.raises(UsageError, match="no number of heads"):
        RWKV7(RWKV7Config(dim=100), Inputs({"token": 3}))
    with pytest.raises(UsageError, match="at least 1"):
        RWKV7(RWKV7Config(layers=0), Inputs({"token": 3}))
    RWKV7(RWKV7Config(dim=8, head_dim=1, layers=1), Inputs({"token": 3}))


def recall(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Four pairs of a key and a value, then the keys in another order, each before its value."""
    keys = torch.rand(rows, 8, generator=generator).argsort(1)[:, :4]
    values = torch.randint(8, 16, (rows, 4), generator=generator)
    order = torch.rand(rows, 4, generator=generator).argsort(1)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
    ids = torch.cat([torch.stack([keys, values], 2).flatten(1), asked], 1)
    targets = torch.full_like(ids, -1)
    targets[:, 8::2] = asked[:, 1::2]
    return ids, targets


def reversal(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Five digits, a sign, and the digits backwards."""
    digits = torch.randint(0, 10, (rows, 5), generator=generator)
    back = digits.flip(1)
    ids = torch.cat([digits, torch.full((rows, 1), 10), back[:, :-1]], 1)
    targets = torch.full_like(ids, -1)
    targets[:, 5:] = back
    return ids, targets


@pytest.mark.parametrize("problem", [recall, reversal])
def test_it_learns_what_takes_a_memory(problem: Callable[..., Any]) -> None:
    """A model of two layers solves rows that it has never seen."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    config = RWKV7Config(dim=64, layers=2, head_dim=32)
    task = NextToken(
        NextTokenConfig(tied=False), RWKV7(config, Inputs({"token": 16})), Inputs({"token": 16})
    )
    optimizer = torch.optim.AdamW(task.param_groups(0.0), lr=4e-3, betas=(0.9, 0.99), eps=1e-18)

    def batch(rows: int) -> Tensors:
        ids, targets = problem(rows, generator)
        place = torch.arange(ids.shape[1]).expand_as(ids)
        zeros = torch.zeros_like(ids)
        return Tensors({"token": ids}, zeros, place, True, targets={"token": targets})

    for _ in range(130):
        made = batch(64)
        loss, _ = task(made)
        (loss / (made.targets["token"] >= 0).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        fresh = batch(256)
        found = task.logits(task.model(fresh)).argmax(-1)
    asked = fresh.targets["token"] >= 0
    assert (found == fresh.targets["token"])[asked].float().mean() > 0.95
