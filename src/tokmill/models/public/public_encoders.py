"""Encoders as public checkpoints: what their config.json says, and the names of their tensors.

Formats: the configuration and modelling files of transformers,
https://github.com/huggingface/transformers, for BERT and DistilBERT. Keys and defaults are theirs,
so that an absent key means here what it means there.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.models.model import PREFIX
from tokmill.models.public.public import Head, Public, PublicModule, TensorNames, both, divided
from tokmill.models.transformers.transformer import EncoderConfig

SEGMENT = f"fields.embeddings.{PREFIX}segment"
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""Theirs → ours."""
BERT_NAMES = TensorNames(
    base="bert.",
    embedding="embeddings.word_embeddings",
    outer=(
        PublicModule("embeddings.position_embeddings", ("positions",)),
        PublicModule("embeddings.token_type_embeddings", (SEGMENT,)),
        PublicModule("embeddings.LayerNorm", ("embedding_norm",)),
    ),
    blocks="encoder.layer",
    block=(
        PublicModule("attention.self.query", ("attention.q",)),
        PublicModule("attention.self.key", ("attention.k",)),
        PublicModule("attention.self.value", ("attention.v",)),
        PublicModule("attention.output.dense", ("attention.o",)),
        PublicModule("attention.output.LayerNorm", ("attention_norm",)),
        PublicModule("intermediate.dense", ("feed_forward.up",)),
        PublicModule("output.dense", ("feed_forward.down",)),
        PublicModule("output.LayerNorm", ("feed_forward_norm",)),
    ),
)
DISTILBERT_NAMES = TensorNames(
    base="distilbert.",
    embedding="embeddings.word_embeddings",
    outer=(
        PublicModule("embeddings.position_embeddings", ("positions",)),
        PublicModule("embeddings.LayerNorm", ("embedding_norm",)),
    ),
    blocks="transformer.layer",
    block=(
        PublicModule("attention.q_lin", ("attention.q",)),
        PublicModule("attention.k_lin", ("attention.k",)),
        PublicModule("attention.v_lin", ("attention.v",)),
        PublicModule("attention.out_lin", ("attention.o",)),
        PublicModule("sa_layer_norm", ("attention_norm",)),
        PublicModule("ffn.lin1", ("feed_forward.up",)),
        PublicModule("ffn.lin2", ("feed_forward.down",)),
        PublicModule("output_layer_norm", ("feed_forward_norm",)),
    ),
)


def hidden_tokens(dense: str, norm: str, decoder: str, bias: str) -> tuple[tuple[str, str], ...]:
    """Return the tensors of a head for masked tokens; it has a matrix only if it is not tied."""
    return (
        *both(dense, "heads.transform.linear"),
        *both(norm, "heads.transform.norm"),
        (f"{decoder}.weight", "heads.linear.{column}.weight"),
        (bias, "heads.biases.{column}"),
    )


BERT_HIDDEN = hidden_tokens(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
BERT_SAME = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
BERT_POOLER = both("bert.pooler.dense", "pooler.linear")
ALWAYS = {"segment": ("always", True)}
"""Keys of tasks without a segment: the model has one, even if the store does not."""


class Bert(Public, frozen=True, kw_only=True):
    """BERT (Devlin et al. 2018)."""

    vocab_size: int = 30_522
    tie_word_embeddings: bool = True
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False

    kind = "encoder"
    model_type = "bert"
    tensor_names = BERT_NAMES
    segments = True
    roles = {"pad": "pad_token_id"}
    same = {
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "hidden",
        "max_position_embeddings": "context",
        "layer_norm_eps": "norm_eps",
    }
    heads = {
        "BertForPreTraining": Head(
            "sentence_pair",
            (*BERT_HIDDEN, *BERT_POOLER, *both("cls.seq_relationship", "relation.linear")),
            BERT_SAME,
        ),
        "BertForMaskedLM": Head(
            "masked",
            BERT_HIDDEN,
            BERT_SAME,
            unused=("bert.pooler.", "cls.seq_relationship."),
            keys=ALWAYS,
        ),
    }
    allowed = {
        "hidden_act": tuple(ACTIVATIONS),
        "type_vocab_size": (2,),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    }

    def model(self, where: str) -> dict[str, Any]:
        return {**super().model(where), "activation": ACTIVATIONS[self.hidden_act]}

    @classmethod
    def other_keys(cls, model: EncoderConfig) -> dict[str, Any]:
        return {
            "hidden_act": "gelu" if model.activation == "gelu" else "gelu_new",
            "hidden_dropout_prob": model.dropout,
            "attention_probs_dropout_prob": model.attention_dropout,
        }

    @classmethod
    def needs(cls, model: EncoderConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "norm": ("layer",),
            "norm_place": ("post",),
            "embedding_norm": (True,),
            "position": ("learned",),
            "activation": ("gelu", "gelu_tanh"),
            "bias": (True,),
            "kv_heads": (0, model.heads),
            "head_dim": (0, model.dim // model.heads),
            "dim": (divided(model),),
        }


class DistilBert(Public, frozen=True, kw_only=True):
    """DistilBERT (Sanh et al. 2019)."""

    vocab_size: int = 30_522
    tie_word_embeddings: bool = True
    dim: int = 768
    n_layers: int = 6
    n_heads: int = 12
    hidden_dim: int = 3072
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    max_position_embeddings: int = 512
    sinusoidal_pos_embds: bool = False

    kind = "encoder"
    model_type = "distilbert"
    tensor_names = DISTILBERT_NAMES
    roles = {"pad": "pad_token_id"}
    same = {
        "dim": "dim",
        "n_layers": "layers",
        "n_heads": "heads",
        "hidden_dim": "hidden",
        "max_position_embeddings": "context",
    }
    heads = {
        "DistilBertForMaskedLM": Head(
            "masked",
            hidden_tokens(
                "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"
            ),
            {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        ),
    }
    allowed = {"activation": tuple(ACTIVATIONS)}

    def model(self, where: str) -> dict[str, Any]:
        # Sinusoidal positions are values of the position table, which is among the weights.
        return {**super().model(where), "activation": ACTIVATIONS[self.activation]}

    @classmethod
    def other_keys(cls, model: EncoderConfig) -> dict[str, Any]:
        return {
            "activation": "gelu" if model.activation == "gelu" else "gelu_new",
            "dropout": model.dropout,
            "attention_dropout": model.attention_dropout,
        }

    @classmethod
    def needs(cls, model: EncoderConfig) -> dict[str, tuple[Any, ...]]:
        return {**Bert.needs(model), "norm_eps": (1e-12,)}


ARCHITECTURE = "BertForPreTraining"
SLOTS = re.compile(r".*/(adam_m|adam_v|Adam|Adam_1)|global_step|beta[12]_power")
"""Variables of the optimiser's state."""
OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""An entry that `tf.train.Checkpoint` of TensorFlow 2 saves with its variables, which are named by
the attributes of Python objects."""
NORM_EPS = 1e-12
"""Epsilon of LayerNorm, which is in the code and not in the configuration."""


class GoogleBert(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of bert_config.json; names and defaults are those of Google's `BertConfig`."""

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 16
    initializer_range: float = 0.02

    def to_config(self) -> dict[str, Any]:
        """Return the content of transformers' config.json for weights in float32."""
        names = {"architectures": [ARCHITECTURE], "model_type": "bert", "torch_dtype": "float32"}
        return {**names, **msgspec.to_builtins(self), "layer_norm_eps": NORM_EPS}


LEAVES = {
    "kernel": "weight", "gamma": "weight", "output_weights": "weight",
    "beta": "bias", "output_bias": "bias",
}  # fmt: skip
"""Last word of a variable → that of the tensor in transformers."""


def public_name(name: str) -> str:
    """Return the name that a variable has in transformers."""
    head, _, leaf = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).rpartition("/")
    leaf = f"{leaf}/weight" if leaf.endswith("_embeddings") else LEAVES.get(leaf, leaf)
    return f"{head}/{leaf}".strip("/").replace("/", ".")


def chosen(names: Iterable[str], where: str) -> tuple[dict[str, str], list[str]]:
    """Return variable → tensor in transformers, and the optimiser's variables, which are left out.

    Raises `TokmillError` for an object-based checkpoint.
    """
    names = list(names)
    if OBJECTS in names:
        raise TokmillError(
            "the checkpoint is an object-based one of TensorFlow 2, whose names are not BERT's",
            where=where,
            hint="only checkpoints of Google's BERT code can be read, which name "
            "bert/embeddings/word_embeddings",
        )
    left_out = [name for name in names if SLOTS.fullmatch(name)]
    return {name: public_name(name) for name in names if name not in set(left_out)}, left_out
