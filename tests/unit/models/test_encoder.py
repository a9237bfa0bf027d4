"""The encoder: sizes of published models, styles, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch

from small_models import small_model
from tokmill.base.errors import TokmillError, UsageError
from tokmill.feed.feed import Batch
from tokmill.inference.vectors import reading
from tokmill.models.heads import Pooler
from tokmill.models.model import Inputs, Tensors
from tokmill.models.transformers.transformer import Encoder, EncoderConfig
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.tasks.task import to_tensors

STYLES: dict[str, dict[str, Any]] = {
    "bert": {},
    "pre-norm": {"norm_place": "pre", "position": "rope", "activation": "swiglu", "bias": False},
    "rms": {"norm": "rms", "norm_place": "pre", "embedding_norm": False},
}
STYLE = pytest.mark.parametrize("style", STYLES)


def tensors(ids: np.ndarray, document: np.ndarray) -> Tensors:
    keys = np.zeros(len(ids), np.uint64)
    return to_tensors(Batch({"token": ids}, document.astype(np.int32), keys), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "weights"),
    [("tiny", 4_385_920), ("medium", 41_373_184), ("base", 109_482_240), ("large", 335_141_888),
     ("distilbert", 66_362_880)],
)  # fmt: skip
def test_sizes_have_the_published_number_of_weights(name: str, weights: int) -> None:
    """A BERT's are counted with its pooler; the branch of the published tiny one is wider."""
    made = {} if name == "distilbert" else {"segment": 2}
    sizes = dict(EncoderConfig.sizes[name]) | ({"hidden": 512} if name == "tiny" else {})
    with torch.device("meta"):
        model = Encoder(EncoderConfig(**sizes), Inputs({"token": 30_522}, made=made))
        pooler = Pooler(model.dim)
    found = sum(p.numel() for p in model.parameters())
    found += sum(p.numel() for p in pooler.parameters()) * bool(made)
    assert found == weights


@STYLE
def test_the_last_block_computes_what_is_asked_for_alone(style: str) -> None:
    model = small_model("encoder", {"token": 11}, **STYLES[style])
    seen: dict[str, tuple[int, ...]] = {}
    for name in ("blocks.0", "blocks.1"):
        for part in ("attention.q", "attention.k", "feed_forward"):
            module = model.get_submodule(f"{name}.{part}")
            module.register_forward_hook(
                lambda _, given, __, key=f"{name}.{part}": seen.update({key: given[0].shape})
            )
    model(tensors(np.zeros((2, 20), np.int64), np.zeros((2, 20))), torch.tensor([[3], [4]]))
    assert seen["blocks.1.attention.q"] == seen["blocks.1.feed_forward"] == (2, 1, 16)
    everywhere = ("blocks.0.attention.q", "blocks.0.feed_forward", "blocks.1.attention.k")
    assert {seen[name] for name in everywhere} == {(2, 20, 16)}


def test_initial_weights_have_the_promised_spread() -> None:
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(dim=64, layers=4, heads=4), Inputs({"token": 500, "segment": 2}))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == float("norm" in name and name.endswith("weight"))).all()
        elif parameter.numel() > 500:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05)


def test_flops_count_attention_in_both_directions() -> None:
    weights = 2 * (4 * 8 * 8 + 2 * 8 * 32)
    model = Encoder(EncoderConfig(dim=8, layers=2, heads=2), Inputs({"token": 3}))
    assert model.flops_per_token(10) == 6 * weights + 12 * 2 * 8 * 10


def test_the_next_token_is_not_to_be_learned() -> None:
    model = small_model("encoder", {"token": 11})
    with pytest.raises(UsageError, match="looks ahead"):
        NextToken(NextTokenConfig(), model, Inputs({"token": 11}))


def test_the_next_token_is_not_to_be_sampled() -> None:
    """Nor of a task that somebody made of it all the same."""
    task = NextToken(
        NextTokenConfig(), small_model("decoder", {"token": 11}), Inputs({"token": 11})
    )
    task.model = small_model("encoder", {"token": 11})
    assert task.model.cached() is None
    with pytest.raises(TokmillError, match="not causal"):
        reading(task)


def test_sizes_that_do_not_fit_are_refused() -> None:
    for config, where in (
        (EncoderConfig(dim=10, heads=4), "model.heads"),
        (EncoderConfig(context=0), "model.context"),
        (EncoderConfig(context=-5), "model"),
        (EncoderConfig(norm_eps=-1.0), "model"),
        (EncoderConfig(position="rope", rope_theta=0.0), "model"),
        (EncoderConfig(attention_dropout=1.0), "model"),
        (EncoderConfig(dropout=-0.1), "model"),
        (EncoderConfig(dim=6, heads=2, position="rope"), "model.heads"),
    ):
        with pytest.raises(UsageError) as caught:
            Encoder(config, Inputs({"token": 3}))
        assert caught.value.where == where
