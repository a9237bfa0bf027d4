"""Google's BERT checkpoints: the names and shapes of their variables, and the public names.

Format: modeling.py and run_pretraining.py of https://github.com/google-research/bert, and the
modelling file of transformers for `BertForPreTraining`. A kernel of TensorFlow is (inputs,
outputs), a weight of torch the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from tokmill.base.errors import TokmillError

ARCHITECTURE = "BertForPreTraining"
SLOTS = re.compile(r".*/(adam_m|adam_v|Adam|Adam_1)|global_step|beta[12]_power")
"""Variables of the optimiser's state."""
OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""An entry that `tf.train.Checkpoint` of TensorFlow 2 saves with its variables, which are named by
the attributes of Python objects."""
LAYER = re.compile(r"bert/encoder/layer_(\d+)/.*")
NORM_EPS = 1e-12
"""Epsilon of LayerNorm, which is in the code and not in the configuration."""
ACTIVATIONS = ("gelu",)


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


class Variable(NamedTuple):
    """A variable of Google's BERT."""

    name: str
    public: str
    """The name of the tensor in transformers."""
    shape: tuple[str | int, ...]
    """The shape in TensorFlow; a text is a key of bert_config.json."""
    transposed: bool = False


V, D, F = "vocab_size", "hidden_size", "intermediate_size"
"""Axes of shapes."""


def dense(name: str, public: str, inputs: str, outputs: str) -> tuple[Variable, Variable]:
    return (
        Variable(f"{name}/kernel", f"{public}.weight", (inputs, outputs), transposed=True),
        Variable(f"{name}/bias", f"{public}.bias", (outputs,)),
    )


def norm(name: str, public: str) -> tuple[Variable, Variable]:
    return (
        Variable(f"{name}/LayerNorm/gamma", f"{public}.LayerNorm.weight", (D,)),
        Variable(f"{name}/LayerNorm/beta", f"{public}.LayerNorm.bias", (D,)),
    )


def table(name: str, rows: str) -> Variable:
    return Variable(
        f"bert/embeddings/{name}_embeddings",
        f"bert.embeddings.{name}_embeddings.weight",
        (rows, D),
    )


OUTER: tuple[Variable, ...] = (
    table("word", V),
    table("token_type", "type_vocab_size"),
    table("position", "max_position_embeddings"),
    *norm("bert/embeddings", "bert.embeddings"),
    *dense("bert/pooler/dense", "bert.pooler.dense", D, D),
    *dense("cls/predictions/transform/dense", "cls.predictions.transform.dense", D, D),
    *norm("cls/predictions/transform", "cls.predictions.transform"),
    Variable("cls/predictions/output_bias", "cls.predictions.bias", (V,)),
    Variable("cls/seq_relationship/output_weights", "cls.seq_relationship.weight", (2, D)),
    Variable("cls/seq_relationship/output_bias", "cls.seq_relationship.bias", (2,)),
)
BLOCK: tuple[Variable, ...] = (
    *dense("attention/self/query", "attention.self.query", D, D),
    *dense("attention/self/key", "attention.self.key", D, D),
    *dense("attention/self/value", "attention.self.value", D, D),
    *dense("attention/output/dense", "attention.output.dense", D, D),
    *norm("attention/output", "attention.output"),
    *dense("intermediate/dense", "intermediate.dense", D, F),
    *dense("output/dense", "output.dense", F, D),
    *norm("output", "output"),
)
"""Variables of a layer; their names begin with `bert/encoder/layer_N/` and `bert.encoder.layer.N.`.
"""


def variables(layers: int) -> Iterator[Variable]:
    """Yield all variables of a BERT, without those of the optimiser."""
    yield from OUTER
    for number in range(layers):
        for one in BLOCK:
            yield one._replace(
                name=f"bert/encoder/layer_{number}/{one.name}",
                public=f"bert.encoder.layer.{number}.{one.public}",
            )


def check_config(config: GoogleBert, where: str) -> None:
    """Refuse a configuration from which no BERT can be made."""
    if config.hidden_act not in ACTIVATIONS:
        raise TokmillError(
            f"the encoder cannot be a model with hidden_act = {config.hidden_act!r}",
            where=where,
            hint=f"known: {', '.join(ACTIVATIONS)}",
        )
    heads = config.num_attention_heads
    if min(config.hidden_size, heads) < 1 or config.hidden_size % heads:
        raise TokmillError(
            f"hidden_size = {config.hidden_size} cannot be cut into "
            f"num_attention_heads = {heads} equal parts",
            where=where,
            hint="fetch the file again",
        )


def chosen(
    config: GoogleBert, shapes: Mapping[str, tuple[int, ...]], where: str
) -> tuple[list[Variable], list[str]]:
    """Return the variables of the model, and the names of the optimiser's that are left out.

    `shapes` has all variables of the checkpoint. Raises `TokmillError` that names variables which
    are missing, unknown or of another shape than the configuration says.
    """
    if OBJECTS in shapes:
        raise TokmillError(
            "the checkpoint is an object-based one of TensorFlow 2, whose names are not BERT's",
            where=where,
            hint="only checkpoints of Google's BERT code can be read, which name "
            f"{OUTER[0].name}; docs/exchange.md lists the names",
        )
    left_out = [name for name in shapes if SLOTS.fullmatch(name)]
    names_there = shapes.keys() - set(left_out)
    layers = len({match[1] for match in map(LAYER.fullmatch, names_there) if match})
    if layers and layers != config.num_hidden_layers:
        raise TokmillError(
            f"bert_config.json says num_hidden_layers = {config.num_hidden_layers}, and the "
            f"checkpoint has {layers} layers",
            where=where,
            hint="bert_config.json and the checkpoint are not of one model",
        )
    wanted = {one.name: one for one in variables(max(layers, 1))}
    for verb, names in (
        ("lacks", wanted.keys() - names_there),
        ("also holds", names_there - wanted.keys()),
    ):
        if names:
            raise TokmillError(
                f"the checkpoint {verb} the variables {listed(names)}",
                where=where,
                hint="only a pre-trained BERT can be read: bert/… and cls/…; "
                "docs/exchange.md lists the names",
            )
    for one in wanted.values():
        shape = tuple(getattr(config, n) if isinstance(n, str) else n for n in one.shape)
        if shapes[one.name] != shape:
            raise TokmillError(
                f"the variable {one.name!r} is {list(shapes[one.name])}; bert_config.json asks "
                f"for {list(shape)}",
                where=where,
                hint="bert_config.json and the checkpoint are not of one model",
            )
    return list(wanted.values()), left_out


def listed(names: Iterable[str], most: int = 4) -> str:
    """Return the first names, for a message."""
    names = sorted(names)
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
