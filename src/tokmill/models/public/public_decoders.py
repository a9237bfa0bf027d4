"""Decoders as public checkpoints: what their config.json says.

Formats: the configuration files of transformers, https://github.com/huggingface/transformers, for
`GPT2LMHeadModel` and `LlamaForCausalLM`. Keys and defaults are theirs, so that an absent key means
here what it means there.
"""

from typing import Any

from tokmill.models.public.public import GPT2_NAMES, LLAMA_NAMES, Head, Public, divided, unlike
from tokmill.models.transformers.transformer import DecoderConfig

ROLES = {"bos": "bos_token_id", "eot": "eos_token_id", "pad": "pad_token_id"}
ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}
"""Keys of `rope_scaling` with the type llama3, theirs → ours."""


def next_token(embedding: str) -> Head:
    head = "lm_head.weight"
    return Head(
        "next_token", ((head, "heads.linear.{column}.weight"),), {head: f"{embedding}.weight"}
    )


class GPT2(Public, frozen=True, kw_only=True):
    """GPT-2 (Radford et al. 2019)."""

    vocab_size: int = 50_257
    tie_word_embeddings: bool = True
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False

    kind = "decoder"
    model_type = "gpt2"
    tensor_names = GPT2_NAMES
    heads = {"GPT2LMHeadModel": next_token("transformer.wte")}
    roles = ROLES
    same = {
        "n_positions": "context",
        "n_embd": "dim",
        "n_layer": "layers",
        "n_head": "heads",
        "layer_norm_epsilon": "norm_eps",
    }
    length_key = "n_positions"
    allowed = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }

    def model(self, where: str) -> dict[str, Any]:
        return {
            **super().model(where),
            "norm": "layer",
            "position": "learned",
            "activation": "gelu" if self.activation_function == "gelu" else "gelu_tanh",
            "bias": True,
            "hidden": self.n_inner or 4 * self.n_embd,
        }

    @classmethod
    def others(cls, model: DecoderConfig) -> dict[str, Any]:
        return {
            "n_inner": model.feed_forward,
            "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        }

    @classmethod
    def needs(cls, model: DecoderConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "norm": ("layer",),
            "position": ("learned",),
            "activation": ("gelu_tanh", "gelu"),
            "bias": (True,),
            "kv_heads": (0, model.heads),
            "head_dim": (0, model.dim // model.heads),
            "dim": (divided(model),),
        }


class Llama(Public, frozen=True, kw_only=True):
    """Llama (Touvron et al. 2023)."""

    vocab_size: int = 32_000
    tie_word_embeddings: bool = False
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    kind = "decoder"
    model_type = "llama"
    tensor_names = LLAMA_NAMES
    heads = {"LlamaForCausalLM": next_token("model.embed_tokens")}
    roles = ROLES
    same = {
        "hidden_size": "dim",
        "intermediate_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "rms_norm_eps": "norm_eps",
    }
    allowed = {"hidden_act": ("silu",)}

    def model(self, where: str) -> dict[str, Any]:
        if self.attention_bias != self.mlp_bias:
            both = self.attention_bias, self.mlp_bias
            raise unlike("attention_bias, mlp_bias", both, where, self.kind)
        # Version 5 of transformers writes `rope_parameters`; the older key wins there too.
        key = "rope_scaling" if self.rope_scaling else "rope_parameters"
        rope = {"rope_theta": self.rope_theta, **(self.rope_scaling or self.rope_parameters or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise unlike(f"{key}.rope_type", kind, where, self.kind)
        if rope.get("partial_rotary_factor", 1) != 1:
            raise unlike(
                f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], where, self.kind
            )
        scaling = {ours: rope.get(theirs) for theirs, ours in ROPE_SCALING.items()}
        return {
            **super().model(where),
            "norm": "rms",
            "position": "rope",
            "activation": "swiglu",
            "bias": self.mlp_bias,
            "kv_heads": self.num_key_value_heads or 0,
            "head_dim": self.head_dim or 0,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling if kind == "llama3" else None,
        }

    @classmethod
    def others(cls, model: DecoderConfig) -> dict[str, Any]:
        rope: dict[str, Any] | None = None
        if model.rope_scaling is not None:
            values = {key: getattr(model.rope_scaling, ours) for key, ours in ROPE_SCALING.items()}
            rope = {"rope_type": "llama3", **values}
        return {
            "num_key_value_heads": model.groups,
            "head_dim": model.head_width,
            "attention_bias": model.bias,
            "mlp_bias": model.bias,
            "rope_theta": model.rope_theta,
            "rope_scaling": rope,
        }

    @classmethod
    def needs(cls, model: DecoderConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "norm": ("rms",),
            "position": ("rope",),
            "activation": ("swiglu",),
            "dim": (divided(model),),
        }
