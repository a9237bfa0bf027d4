"""Google's BERT checkpoints: their configuration, and the public names of their variables.

Format: modeling.py and run_pretraining.py of https://github.com/google-research/bert, and the
modelling file of transformers for `BertForPreTraining`. A kernel of TensorFlow is (inputs,
outputs), a weight of torch the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tokmill.base.errors import TokmillError

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
