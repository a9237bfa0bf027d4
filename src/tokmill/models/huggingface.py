"""Decoders as public checkpoints: what their config.json says.

Formats: the configuration files of transformers, https://github.com/huggingface/transformers, for
`GPT2LMHeadModel`, `LlamaForCausalLM`, `MistralForCausalLM` and `Qwen3ForCausalLM`. Keys and
defaults are theirs, so that an absent key means here what it means there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec

from tokmill.errors import TokmillError
from tokmill.models.decoder import DecoderConfig
from tokmill.models.public_tensors import GPT2_NAMES, LLAMA_NAMES, QWEN3_NAMES, TensorNames

ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}
"""Keys of `rope_scaling` with the type llama3, theirs → ours."""


class Public(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a config.json that decide what a model computes."""

    vocab_size: int
    tie_word_embeddings: bool

    architecture: ClassVar[str]
    model_type: ClassVar[str]
    tensor_names: ClassVar[TensorNames]
    known: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Key → the values with which the decoder computes the same."""

    @property
    def length(self) -> int:
        """Positions that the model was made for."""
        raise NotImplementedError

    def decoder(self, where: str) -> dict[str, Any]:
        """Return the keys of the decoder that computes the same; dropout belongs to a training."""
        raise NotImplementedError

    @classmethod
    def of(cls, decoder: DecoderConfig, vocab: int, tied: bool, length: int) -> Self:
        """Return the keys of a decoder that has what `needs` says."""
        raise NotImplementedError

    @classmethod
    def needs(cls, decoder: DecoderConfig) -> dict[str, tuple[Any, ...]]:
        """Return key → values that a decoder must have to be such a model."""
        raise NotImplementedError

    def to_config(self) -> dict[str, Any]:
        """Return the content of config.json for weights in float32."""
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        return {**names, "torch_dtype": "float32", **msgspec.to_builtins(self)}


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

    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    tensor_names = GPT2_NAMES
    known = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }

    @property
    def length(self) -> int:
        """Rows of the position table."""
        return self.n_positions

    def decoder(self, where: str) -> dict[str, Any]:
        """Return the keys of the decoder that computes the same."""
        return {
            "norm": "layer",
            "position": "learned",
            "activation": "gelu" if self.activation_function == "gelu" else "gelu_tanh",
            "bias": True,
            "context": self.n_positions,
            "dim": self.n_embd,
            "layers": self.n_layer,
            "heads": self.n_head,
            "hidden": self.n_inner or 4 * self.n_embd,
            "norm_eps": self.layer_norm_epsilon,
        }

    @classmethod
    def of(cls, decoder: DecoderConfig, vocab: int, tied: bool, length: int) -> Self:
        """Return the keys of a decoder that has what `needs` says."""
        return cls(
            vocab_size=vocab,
            tie_word_embeddings=tied,
            n_positions=decoder.context,
            n_embd=decoder.dim,
            n_layer=decoder.layers,
            n_head=decoder.heads,
            n_inner=decoder.feed_forward,
            activation_function="gelu" if decoder.activation == "gelu" else "gelu_new",
            layer_norm_epsilon=decoder.norm_eps,
        )

    @classmethod
    def needs(cls, decoder: DecoderConfig) -> dict[str, tuple[Any, ...]]:
        """Return key → values that a decoder must have to be such a model."""
        return {
            "norm": ("layer",),
            "position": ("learned",),
            "activation": ("gelu_tanh", "gelu"),
            "bias": (True,),
            "qk_norm": (False,),
            "kv_heads": (0, decoder.heads),
            "head_dim": (0, decoder.dim // decoder.heads),
            "dim": (divided(decoder),),
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

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    tensor_names = LLAMA_NAMES
    known = {"hidden_act": ("silu",)}

    @property
    def length(self) -> int:
        """Positions that the model was trained with."""
        return self.max_position_embeddings

    def decoder(self, where: str) -> dict[str, Any]:
        """Return the keys of the decoder that computes the same."""
        if self.attention_bias != self.mlp_bias:
            both = self.attention_bias, self.mlp_bias
            raise unlike("attention_bias, mlp_bias", both, where)
        # Version 5 of transformers writes `rope_parameters`; the older key wins there too.
        key = "rope_scaling" if self.rope_scaling else "rope_parameters"
        rope = {"rope_theta": self.rope_theta, **(self.rope_scaling or self.rope_parameters or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise unlike(f"{key}.rope_type", kind, where)
        if rope.get("partial_rotary_factor", 1) != 1:
            raise unlike(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], where)
        scaling = {ours: rope.get(theirs) for theirs, ours in ROPE_SCALING.items()}
        return {
            "norm": "rms",
            "position": "rope",
            "activation": "swiglu",
            "bias": self.mlp_bias,
            "dim": self.hidden_size,
            "layers": self.num_hidden_layers,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads or 0,
            "head_dim": self.head_dim or 0,
            "hidden": self.intermediate_size,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling if kind == "llama3" else None,
            "norm_eps": self.rms_norm_eps,
        }

    @classmethod
    def of(cls, decoder: DecoderConfig, vocab: int, tied: bool, length: int) -> Self:
        """Return the keys of a decoder that has what `needs` says."""
        rope: dict[str, Any] | None = None
        if decoder.rope_scaling is not None:
            values = {
                key: getattr(decoder.rope_scaling, ours) for key, ours in ROPE_SCALING.items()
            }
            rope = {"rope_type": "llama3", **values}
        return cls(
            vocab_size=vocab,
            tie_word_embeddings=tied,
            hidden_size=decoder.dim,
            intermediate_size=decoder.feed_forward,
            num_hidden_layers=decoder.layers,
            num_attention_heads=decoder.heads,
            num_key_value_heads=decoder.groups,
            head_dim=decoder.head_width,
            max_position_embeddings=length,
            rms_norm_eps=decoder.norm_eps,
            attention_bias=decoder.bias,
            mlp_bias=decoder.bias,
            rope_theta=decoder.rope_theta,
            rope_scaling=rope,
        )

    @classmethod
    def needs(cls, decoder: DecoderConfig) -> dict[str, tuple[Any, ...]]:
        """Return key → values that a decoder must have to be such a model."""
        return {
            "norm": ("rms",),
            "position": ("rope",),
            "activation": ("swiglu",),
            "qk_norm": (False,),
            "dim": (divided(decoder),),
        }


class Mistral(Llama, frozen=True, kw_only=True):
    """Mistral (Jiang et al. 2023) without its sliding window: a Llama with other defaults."""

    intermediate_size: int = 14_336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096

    architecture = "MistralForCausalLM"
    model_type = "mistral"
    known = {**Llama.known, "sliding_window": (None,)}


class Qwen3(Llama, frozen=True, kw_only=True):
    """Qwen3 (Yang et al. 2025) without a window: a Llama with norms of queries and keys."""

    vocab_size: int = 151_936
    hidden_size: int = 4096
    intermediate_size: int = 22_016
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 32_768
    use_sliding_window: bool = False

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    tensor_names = QWEN3_NAMES
    known = {**Llama.known, "use_sliding_window": (False,)}

    def decoder(self, where: str) -> dict[str, Any]:
        """Return the keys of the decoder that computes the same."""
        return {**super().decoder(where), "qk_norm": True}

    @classmethod
    def needs(cls, decoder: DecoderConfig) -> dict[str, tuple[Any, ...]]:
        """Return key → values that a decoder must have to be such a model."""
        # There is no key for biases of the feed-forward branch.
        return {**super().needs(decoder), "qk_norm": (True,), "bias": (False,)}


READ: tuple[type[Public], ...] = (GPT2, Llama, Mistral, Qwen3)
WRITTEN: tuple[type[Public], ...] = (GPT2, Llama, Qwen3)


def divided(decoder: DecoderConfig) -> int:
    """Return the width that the heads divide: transformers asks for it even with `head_dim`."""
    return decoder.dim - decoder.dim % decoder.heads


def unlike(key: str, value: Any, where: str) -> TokmillError:
    """Return the error for a key of config.json that makes a model which the decoder cannot be."""
    return TokmillError(
        f"the decoder cannot be a model with {key} = {value!r}",
        where=where,
        hint="docs/exchange.md lists what can be read",
    )


def read_config(config: Mapping[str, Any], where: str) -> tuple[Public, DecoderConfig]:
    """Return what the content of a config.json says, and the decoder that computes the same.

    Raises `TokmillError` that names the key and its value where there is no such decoder.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("model_type")
    found = [one for one in READ if name in (one.architecture, one.model_type)]
    if not found:
        raise TokmillError(
            f"the architecture {name!r} is not known",
            where=where,
            hint=f"known: {', '.join(one.architecture for one in READ)}",
        )
    if quantized := config.get("quantization_config"):
        raise unlike("quantization_config", quantized, where)
    try:
        public = msgspec.convert(config, found[0])
        for key, values in public.known.items():
            if getattr(public, key) not in values:
                raise unlike(key, getattr(public, key), where)
        return public, msgspec.convert(public.decoder(where), DecoderConfig)
    except msgspec.ValidationError as error:
        raise TokmillError(
            f"a key has the wrong type: {error}", where=where, hint="fetch the file again"
        ) from None


def public_of(
    decoder: DecoderConfig, vocab: int, tied: bool, length: int, where: str = ""
) -> Public:
    """Return what config.json says of a decoder with `vocab` ids that sees `length` positions.

    Raises `TokmillError` where no public architecture computes the same.
    """
    wanted: list[str] = []
    for kind in WRITTEN:
        other = [
            f"{key} = {values[0]!r}"
            for key, values in kind.needs(decoder).items()
            if getattr(decoder, key) not in values
        ]
        if not other:
            return kind.of(decoder, vocab, tied, length)
        wanted.append(f"{kind.architecture} with model.{', model.'.join(other)}")
    raise TokmillError(
        "no public architecture computes what this model does",
        where=where,
        hint=f"it would be {'; '.join(wanted)}",
    )
