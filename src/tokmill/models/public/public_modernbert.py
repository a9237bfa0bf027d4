"""ModernBERT as public checkpoints: what its config.json says, and the names of its tensors.

Format: the configuration and modelling files of transformers,
https://github.com/huggingface/transformers. Keys and defaults are theirs, so that an absent key
means here what it means there.
"""

from __future__ import annotations

from typing import Any

from tokmill.models.public.public import Public, unlike
from tokmill.models.public.public_encoders import hidden_tokens, plain_heads
from tokmill.models.public.public_tensors import Head, PublicModule, TensorNames
from tokmill.models.transformers.modernbert import ModernBertConfig

MODERNBERT_NAMES = TensorNames(
    base="model.",
    embedding="embeddings.tok_embeddings",
    outer=(
        PublicModule("embeddings.norm", ("embedding_norm",)),
        PublicModule("final_norm", ("norm",)),
    ),
    blocks="layers",
    block=(
        PublicModule("attn_norm", ("attention_norm",)),
        PublicModule("attn.Wqkv", ("attention.q", "attention.k", "attention.v")),
        PublicModule("attn.Wo", ("attention.o",)),
        PublicModule("mlp_norm", ("feed_forward_norm",)),
        PublicModule("mlp.Wi", ("feed_forward.gate", "feed_forward.up")),
        PublicModule("mlp.Wo", ("feed_forward.down",)),
    ),
)


class ModernBert(Public, frozen=True, kw_only=True):
    """ModernBERT (Warner et al. 2024)."""

    vocab_size: int = 50_368
    tie_word_embeddings: bool = True
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    decoder_bias: bool = True
    classifier_activation: str = "gelu"
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    layer_types: list[str] | None = None
    global_rope_theta: float = 160_000.0
    local_rope_theta: float | None = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    embedding_dropout: float = 0.0
    mlp_dropout: float = 0.0
    attention_dropout: float = 0.0

    kind = "modernbert"
    model_type = "modernbert"
    tensor_names = MODERNBERT_NAMES
    roles = {
        "pad": "pad_token_id",
        "cls": "cls_token_id",
        "sep": "sep_token_id",
        "bos": "bos_token_id",
        "eot": "eos_token_id",
    }
    same = {
        "hidden_size": "dim",
        "intermediate_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "norm_eps": "norm_eps",
    }
    heads = {
        "ModernBertForMaskedLM": Head(
            "masked",
            hidden_tokens("head.dense", "head.norm", "decoder", "decoder.bias"),
            {"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        )
    }
    known = {
        "hidden_activation": ("gelu", "silu"),
        "classifier_activation": ("gelu",),
        "decoder_bias": (True,),
        "rope_scaling": (None,),
    }

    def model(self, where: str) -> dict[str, Any]:
        """Return the keys of the model that computes the same."""
        keys = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
        biases = [getattr(self, key) for key in keys]
        if len(set(biases)) > 1:
            raise unlike(", ".join(keys), tuple(biases), where, self.kind)
        return {
            **super().model(where),
            "activation": "geglu" if self.hidden_activation == "gelu" else "swiglu",
            "bias": self.mlp_bias,
            # Half of the window, rounded down, is on each side.
            "window": self.local_attention // 2 * 2,
            "global_every": self.every(where),
            "rope_theta": self.theta("full_attention", self.global_rope_theta, where),
            "local_theta": self.theta(
                "sliding_attention", self.local_rope_theta or self.global_rope_theta, where
            ),
        }

    def every(self, where: str) -> int:
        """Return n, where the first of every n blocks is global."""
        kinds, said = self.layer_types, self.global_attn_every_n_layers
        if kinds is None:
            if said < 1:
                raise unlike("global_attn_every_n_layers", said, where, self.kind)
            return said
        full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
        every = full[1] if len(full) > 1 else max(2, len(kinds))
        # With few blocks several numbers mean the same.
        for number in (said, every):
            same = number > 0 and kinds == layer_types(len(kinds), number)
            if same and len(kinds) == self.num_hidden_layers:
                return number
        raise unlike("layer_types", kinds, where, self.kind)

    def theta(self, kind: str, theta: float, where: str) -> float:
        """Return the base of the rotary frequencies of blocks of a kind."""
        # Version 5 of transformers writes `rope_parameters`.
        said = (self.rope_parameters or {}).get(kind) or {}
        if not isinstance(said, dict) or said.get("rope_type", "default") != "default":
            raise unlike(f"rope_parameters.{kind}", said, where, self.kind)
        found = said.get("rope_theta", theta)
        if not isinstance(found, int | float):
            raise unlike(f"rope_parameters.{kind}.rope_theta", found, where, self.kind)
        return float(found)

    @classmethod
    def others(cls, model: ModernBertConfig) -> dict[str, Any]:
        """Return the keys that are not in `same`."""
        thetas = {"full_attention": model.rope_theta, "sliding_attention": model.local_theta}
        every = model.global_every if model.window else 1
        return {
            "hidden_activation": "gelu" if model.activation == "geglu" else "silu",
            "norm_bias": model.bias,
            "attention_bias": model.bias,
            "mlp_bias": model.bias,
            "classifier_bias": model.bias,
            "local_attention": model.window or 128,
            "global_attn_every_n_layers": every,
            "layer_types": layer_types(model.layers, every),
            "global_rope_theta": model.rope_theta,
            "local_rope_theta": model.local_theta,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta}
                for kind, theta in thetas.items()
            },
            "embedding_dropout": model.dropout,
            "attention_dropout": model.attention_dropout,
        }

    @classmethod
    def needs(cls, model: ModernBertConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "norm": ("layer",),
            "position": ("rope",),
            "activation": ("geglu", "swiglu"),
            "rope_scaling": (None,),
            **plain_heads(model),
        }


def layer_types(layers: int, every: int) -> list[str]:
    """Return `layer_types` of transformers, where the first of `every` blocks is global."""
    return ["sliding_attention" if number % every else "full_attention" for number in range(layers)]
