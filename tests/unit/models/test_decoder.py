"""The decoder: documents do not see each other, nothing looks ahead, in both styles."""

from typing import Any

import numpy as np
import pytest
import torch

from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch
from tokmill.models.model import Inputs, Tensors
from tokmill.models.transformers.attention import RopeScaling
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.tasks.task import to_tensors

CPU = torch.device("cpu")
SMALL = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2)
GPT2 = DecoderConfig(
    dim=16, layers=2, heads=4, norm="layer", position="learned", activation="gelu_tanh", bias=True,
    context=24,
)  # fmt: skip


def tensors(ids: np.ndarray, document: np.ndarray) -> Tensors:
    keys = np.zeros(len(ids), np.uint64)
    return to_tensors(Batch({"token": ids}, document.astype(np.int32), keys), CPU)


def decoder(config: DecoderConfig = SMALL, **sizes: int) -> Decoder:
    torch.manual_seed(1)
    model = Decoder(config, Inputs(sizes or {"token": 11}))
    for parameter in model.parameters():
        # Larger than at the start, so that a leak could not hide below the tolerance.
        torch.nn.init.normal_(parameter, mean=parameter.ndim == 1, std=0.3)
    return model


def test_blocks_are_not_run_again_where_nothing_is_learned() -> None:
    model = decoder().eval()
    model.recompute = True
    batch = tensors(np.zeros((1, 4), np.int64), np.zeros((1, 4)))
    plain = model(batch)
    assert "Checkpoint" not in str(plain.grad_fn)
    with torch.no_grad():
        assert torch.equal(model.train()(batch), plain)


def test_a_document_longer_than_the_learned_table_is_refused() -> None:
    model = decoder(GPT2)
    model(tensors(np.zeros((1, 24), np.int64), np.zeros((1, 24))))
    with pytest.raises(UsageError, match="25 positions .* has 24") as caught:
        model(tensors(np.zeros((2, 25), np.int64), np.array([[0] * 24 + [1], [0] * 25])))
    assert "model.context=25" in str(caught.value.hint)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_initial_weights_have_the_promised_spread(style: str) -> None:
    torch.manual_seed(0)
    keys: dict[str, Any] = {"norm": "layer", "position": "learned", "activation": "gelu",
                            "bias": True, "context": 40} if style == "gpt2" else {}  # fmt: skip
    model = Decoder(DecoderConfig(dim=64, layers=8, heads=4, **keys), Inputs({"token": 500}))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == float("norm" in name and name.endswith("weight"))).all()
            continue
        adds = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
        assert parameter.std().item() == pytest.approx(0.02 / (4 if adds else 1), rel=0.05)


def test_parameters_have_the_documented_names() -> None:
    norms = ["norm", "blocks.0.attention_norm", "blocks.0.feed_forward_norm"]
    attention = [f"blocks.0.attention.{part}" for part in "qkvo"]
    branch = ["blocks.0.feed_forward.up", "blocks.0.feed_forward.down"]
    tables = ["fields.embeddings.column_token.weight"]
    gated = Decoder(DecoderConfig(dim=8, layers=1, heads=2), Inputs({"token": 3}))
    linear = [*norms, *attention, *branch, "blocks.0.feed_forward.gate"]
    assert set(gated.state_dict()) == {*tables, *(f"{name}.weight" for name in linear)}
    config = DecoderConfig(
        dim=8, layers=1, heads=2, norm="layer", position="learned", activation="gelu", bias=True,
        context=4,
    )  # fmt: skip
    both = [f"{name}.{part}" for name in norms + attention + branch for part in ("weight", "bias")]
    plain = Decoder(config, Inputs({"token": 3}))
    assert set(plain.state_dict()) == {*tables, "positions.weight", *both}


def test_columns_are_added_and_may_have_any_name() -> None:
    model = decoder(type=5, token=11, forward=3)
    ids = {name: torch.zeros(1, 2, dtype=torch.int64) for name in ("type", "token", "forward")}
    total = sum(model.embedding(name)[0] for name in ids)
    torch.testing.assert_close(model.fields(ids)[0, 0], total)
    with pytest.raises(UsageError, match="no column 'tokem'"):
        model.embedding("tokem")


def test_columns_may_stand_end_to_end() -> None:
    config = DecoderConfig(dim=16, layers=1, heads=2, join="concat", field_dim=6)
    model = Decoder(config, Inputs({"asm": 7, "type": 5}))
    columns = {"asm": torch.tensor([[1, 2]]), "type": torch.tensor([[0, 4]])}
    batch = Tensors(columns, torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], True)
    assert model(batch).shape == (1, 2, 16)
    assert model.fields.joined is not None and model.fields.joined.weight.shape == (16, 12)


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (DecoderConfig(dim=10, heads=4), "model.heads"),
        (DecoderConfig(dim=12, heads=4), "model.heads"),
        (DecoderConfig(head_dim=7), "model.head_dim"),
        (DecoderConfig(heads=4, kv_heads=3), "model.kv_heads"),
        (DecoderConfig(kv_heads=-1), "model"),
        (DecoderConfig(layers=0), "model"),
        (DecoderConfig(position="learned"), "model.context"),
        (DecoderConfig(rope_scaling=RopeScaling(high_freq_factor=1.0)), "model.rope_scaling"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: DecoderConfig, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        Decoder(config, Inputs({"token": 3}))
    assert caught.value.where == where


def test_widths_that_are_left_out() -> None:
    assert DecoderConfig(dim=128).feed_forward == 352
    assert DecoderConfig(dim=128, activation="gelu").feed_forward == 512
    assert DecoderConfig(dim=128, hidden=100).feed_forward == 100
    odd = DecoderConfig(dim=12, heads=4, position="learned", context=3)
    assert Decoder(odd, Inputs({"token": 3})).config.head_width == 3


def test_flops_are_counted_by_hand() -> None:
    config = DecoderConfig(dim=8, layers=2, heads=2, hidden=16)
    weights = 2 * (4 * 8 * 8 + 3 * 8 * 16)
    assert Decoder(config, Inputs({"token": 3})).flops_per_token(10) == 6 * weights + 6 * 2 * 8 * 10
    config = DecoderConfig(dim=8, layers=2, heads=2, head_dim=6, hidden=16, activation="gelu",
                           norm="layer", position="learned", bias=True, context=9)  # fmt: skip
    weights = 2 * (4 * 8 * 12 + 2 * 8 * 16)
    assert (
        Decoder(config, Inputs({"token": 3})).flops_per_token(10) == 6 * weights + 6 * 2 * 12 * 10
    )
