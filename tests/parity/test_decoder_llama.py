"""The decoder against transformers' Llama with the same weights: logits, loss and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tokmill.models.transformers.attention import RopeScaling
from tokmill.models.transformers.decoder import DecoderConfig
from transformers_peer import LENGTH, VOCAB, Case, ask, compare

PARTS = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
WHOLE = {
    "model.fields.embeddings.column_token.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "heads.linear.column_token.weight": "lm_head.weight",
}


def translated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our named tensors → Llama's: other names alone."""
    theirs = {}
    for name, tensor in tensors.items():
        if name in WHOLE:
            theirs[WHOLE[name]] = tensor
        else:
            _, _, number, rest = name.split(".", 3)
            part, _, leaf = rest.rpartition(".")
            theirs[f"model.layers.{number}.{PARTS[part]}.{leaf}"] = tensor
    return theirs


def case(config: DecoderConfig, tied: bool = False, **keys: Any) -> Case:
    """Return a configuration with what transformers calls the same."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": config.dim,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.groups,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2 * LENGTH,
    }
    return Case(config, sizes | keys, tied)


SCALED = RopeScaling(factor=4.0, low_freq_factor=1.5, high_freq_factor=6.0, original_context=64)
CASES = {
    "heads": case(DecoderConfig(dim=32, layers=2, heads=4, hidden=48)),
    "groups": case(DecoderConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=48), tied=True),
    "wide-heads": case(DecoderConfig(dim=24, layers=1, heads=4, kv_heads=1, head_dim=10)),
    "theta": case(DecoderConfig(dim=64, layers=3, heads=2, rope_theta=500.0, norm_eps=1e-3)),
    "bias": case(DecoderConfig(dim=32, layers=2, heads=4, bias=True)),
    "llama3": case(
        DecoderConfig(dim=64, layers=2, heads=2, rope_theta=1000.0, rope_scaling=SCALED),
        rope_scaling={
            "rope_type": "llama3",
            "factor": SCALED.factor,
            "low_freq_factor": SCALED.low_freq_factor,
            "high_freq_factor": SCALED.high_freq_factor,
            "original_max_position_embeddings": SCALED.original_context,
        },
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers computes, of all cases."""
    folder = tmp_path_factory.mktemp("llama")
    ask("Llama", CASES, translated, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_equal_to_llama(name: str, answers: Path) -> None:
    compare(name, CASES[name], translated, answers)


def test_the_scaled_frequencies_differ() -> None:
    """Some are kept, some divided, some between: else the case above would prove little."""
    import torch

    from tokmill.models.transformers.attention import rotary

    place = torch.tensor([1])
    plain, _ = rotary(place, 32, 1000.0)
    scaled, _ = rotary(place, 32, 1000.0, SCALED)
    share = (scaled.acos() / plain.acos())[0]
    assert share.max() == 1 and share.min() < 0.26
    assert ((share > 0.3) & (share < 0.9)).any()
