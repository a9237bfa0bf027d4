"""Next token: targets, counts, metrics, heads."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch
from tokmill.models.model import Inputs
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.tasks.task import to_tensors

SIZES = {"token": 9}


def task(sizes: dict[str, int] = SIZES, **options: Any) -> NextToken:
    torch.manual_seed(0)
    config = NextTokenConfig(length=5, **options)
    return NextToken(
        config, Decoder(DecoderConfig(dim=8, layers=1, heads=2), Inputs(sizes)), Inputs(sizes)
    )


def batch() -> Batch:
    ids = np.array([[1, 2, 3, 4, 5, 6], [7, 8, 1, 2, 0, 0]], np.uint8)
    document = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]], np.int32)
    return Batch({"token": ids}, document, np.zeros(2, np.uint64))


def test_targets_are_one_ahead_and_never_across_documents() -> None:
    prepared = task().prepare(batch())
    assert prepared.columns["token"].tolist() == [[1, 2, 3, 4, 5], [7, 8, 1, 2, 0]]
    assert prepared.targets["token"].tolist() == [[2, 3, -1, 5, 6], [8, 1, 2, -1, -1]]
    assert prepared.document.shape == (2, 5)
    assert task().count(prepared) == 7


@pytest.mark.parametrize("tied", [True, False])
def test_loss_is_the_sum_over_targets(tied: bool) -> None:
    learner = task(tied=tied)
    tensors = to_tensors(learner.prepare(batch()), torch.device("cpu"))
    loss, sums = learner(tensors)
    logits = learner.logits(learner.model(tensors))
    by_hand = sum(
        -F.log_softmax(logits[b, t], -1)[tensors.targets["token"][b, t]]
        for b in range(2)
        for t in range(5)
        if tensors.targets["token"][b, t] >= 0
    )
    torch.testing.assert_close(loss, by_hand)
    assert sums["loss"].item() == loss.item() and not sums["loss"].requires_grad


def test_the_tied_head_is_the_embedding() -> None:
    names = [name for name, _ in task().named_parameters()]
    assert not any("head" in name for name in names)
    apart = task(tied=False)
    assert dict(apart.named_parameters())["heads.linear.column_token.weight"].shape == (9, 8)
    grouped = [p for group in apart.param_groups(0.1) for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, apart.parameters()))
    assert apart.parameter_count() == task().parameter_count() + 72
    assert apart.flops_per_token(5) == task().flops_per_token(5)


def test_metrics_by_hand() -> None:
    report = task().report({"loss": 6.0}, 3, bytes_per_token=4.0)
    assert report["loss"] == 2.0
    assert report["perplexity"] == pytest.approx(math.e**2)
    assert report["bits_per_byte"] == pytest.approx(2 / math.log(2) / 4)
    assert "bits_per_byte" not in task().report({"loss": 6.0}, 3)
    assert task().report({"loss": 1e4}, 1)["perplexity"] == math.inf


def test_the_column_to_predict() -> None:
    with pytest.raises(UsageError, match="did you mean 'asm'"):
        task({"asm": 4, "reg": 3}, column="asn")
    assert task({"asm": 4, "reg": 3}, column="reg").columns == {"reg": 3}
    assert task({"asm": 4, "reg": 3}).columns == {"asm": 4, "reg": 3}


def streams() -> Batch:
    """Instructions begin at 0, 3, 5, and in the second row at 0, 1."""
    plain = batch()
    border = np.array([[1, 0, 0, 3, 0, 1], [1, 1, 0, 0, 0, 0]], np.uint8)
    columns = {"asm": plain.columns["token"], "reg": plain.columns["token"] % 3, "border": border}
    document = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, -1, -1]], np.int32)
    return Batch(columns, document, plain.key)


def test_all_columns_are_predicted_by_heads_of_their_own() -> None:
    both = {"asm": 9, "reg": 3}
    for tied in (True, False):
        learner = task(both, tied=tied)
        prepared = learner.prepare(streams())
        assert learner.count(prepared) == 8
        tensors = to_tensors(prepared, torch.device("cpu"))
        loss, sums = learner(tensors)
        hidden = learner.model(tensors)
        by_hand = {
            f"loss_{name}": F.cross_entropy(
                learner.logits(hidden, name).flatten(0, 1),
                tensors.targets[name].flatten(),
                ignore_index=-1,
                reduction="sum",
            )
            for name in both
        }
        torch.testing.assert_close(loss, sum(by_hand.values()))
        assert sums.keys() == {"loss", *by_hand}
        for name, value in by_hand.items():
            torch.testing.assert_close(sums[name], value.detach())
        grouped = [p for group in learner.param_groups(0.1) for p in group["params"]]
        assert sorted(map(id, grouped)) == sorted(map(id, learner.parameters()))
        assert "perplexity" not in learner.report({"loss": 1.0, "loss_asm": 1.0}, 2)
