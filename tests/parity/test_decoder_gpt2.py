"""The decoder against transformers' GPT-2 with the same weights: logits, loss and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokmill.models.transformers.decoder import DecoderConfig
from transformers_peer import VOCAB, Case, ask, compare

PARTS = {
    "attention_norm": "ln_1",
    "attention.o": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
WHOLE = {
    "model.fields.embeddings.column_token.weight": "transformer.wte.weight",
    "model.positions.weight": "transformer.wpe.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "model.norm.bias": "transformer.ln_f.bias",
    "heads.linear.column_token.weight": "lm_head.weight",
}


def translated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our named tensors → GPT-2's: q, k and v are one, and matrices lie the other way round."""
    theirs = {}
    for name, tensor in tensors.items():
        if name in WHOLE:
            theirs[WHOLE[name]] = tensor
            continue
        _, _, number, rest = name.split(".", 3)
        part, _, leaf = rest.rpartition(".")
        if part in ("attention.k", "attention.v"):
            continue
        if part == "attention.q":
            beside = [name.replace("attention.q", f"attention.{x}") for x in "qkv"]
            tensor, where = torch.cat([tensors[one] for one in beside]), "attn.c_attn"
        else:
            where = PARTS[part]
        theirs[f"transformer.h.{number}.{where}.{leaf}"] = tensor.t() if tensor.ndim > 1 else tensor
    return theirs


def case(tied: bool = True, **keys: Any) -> Case:
    """Return a configuration with what transformers calls the same."""
    config = DecoderConfig(
        **{"norm": "layer", "position": "learned", "activation": "gelu_tanh", "bias": True} | keys
    )
    theirs = {
        "vocab_size": VOCAB,
        "n_positions": config.context,
        "n_embd": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.feed_forward,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Case(config, theirs, tied)


CASES = {
    "tied": case(dim=32, layers=2, heads=4, context=24),
    "untied": case(dim=32, layers=1, heads=2, context=64, tied=False),
    "exact-gelu": case(dim=24, layers=2, heads=2, context=30, activation="gelu"),
    "odd-sizes": case(dim=21, layers=3, heads=3, context=24, hidden=50, norm_eps=1e-3),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers computes, of all cases."""
    folder = tmp_path_factory.mktemp("gpt2")
    ask("GPT2", CASES, translated, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_equal_to_gpt2(name: str, answers: Path) -> None:
    compare(name, CASES[name], translated, answers)
