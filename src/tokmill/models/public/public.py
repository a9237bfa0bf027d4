"""The interface of families of public checkpoints: keys of config.json, tensors, heads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import msgspec
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.models.model import PREFIX
from tokmill.models.transformers.block import TransformerConfig

DERIVED = re.compile(
    r"h\.\d+\.attn\.(masked_)?bias|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|embeddings\.position_ids"
)
"""Tensors of older checkpoints that follow from the configuration."""

OLD_LEAVES = {"gamma": "weight", "beta": "bias"}
"""Names in BERT checkpoints that were converted from TensorFlow → names of today."""


class PublicModule(NamedTuple):
    """A module of a public checkpoint, and the modules here that it holds, one after the other."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    """Whether its weight is (inputs, outputs)."""


class TensorNames(NamedTuple):
    """How a family of public checkpoints names its modules."""

    base: str
    """Prefix of all names except those of a head; some checkpoints leave it out."""
    embedding: str
    outer: tuple[PublicModule, ...]
    blocks: str
    block: tuple[PublicModule, ...]


class Head(NamedTuple):
    """The head of an architecture, and the task here that has the same."""

    task: str
    tensors: tuple[tuple[str, str], ...]
    """Their name, and ours in the task's state dict; `{column}` is the column of tokens."""
    same: Mapping[str, str] = {}
    """Tensor that may be there as a copy → the original; for an untied head it is not a copy."""
    unused: tuple[str, ...] = ()
    """Prefixes of tensors that belong to other heads; they may be there too."""
    keys: Mapping[str, tuple[Any, ...]] = {}
    """Key of the task → the values with which it computes the same; the first is taken."""


def both(theirs: str, ours: str) -> tuple[tuple[str, str], ...]:
    """Return their names and ours of the weight and the bias of a module."""
    return tuple((f"{theirs}.{leaf}", f"{ours}.{leaf}") for leaf in ("weight", "bias"))


GPT2_NAMES = TensorNames(
    base="transformer.",
    embedding="wte",
    outer=(PublicModule("wpe", ("positions",)), PublicModule("ln_f", ("norm",))),
    blocks="h",
    block=(
        PublicModule("ln_1", ("attention_norm",)),
        PublicModule("attn.c_attn", ("attention.q", "attention.k", "attention.v"), transposed=True),
        PublicModule("attn.c_proj", ("attention.o",), transposed=True),
        PublicModule("ln_2", ("feed_forward_norm",)),
        PublicModule("mlp.c_fc", ("feed_forward.up",), transposed=True),
        PublicModule("mlp.c_proj", ("feed_forward.down",), transposed=True),
    ),
)
LLAMA_NAMES = TensorNames(
    base="model.",
    embedding="embed_tokens",
    outer=(PublicModule("norm", ("norm",)),),
    blocks="layers",
    block=(
        PublicModule("input_layernorm", ("attention_norm",)),
        PublicModule("self_attn.q_proj", ("attention.q",)),
        PublicModule("self_attn.k_proj", ("attention.k",)),
        PublicModule("self_attn.v_proj", ("attention.v",)),
        PublicModule("self_attn.o_proj", ("attention.o",)),
        PublicModule("post_attention_layernorm", ("feed_forward_norm",)),
        PublicModule("mlp.gate_proj", ("feed_forward.gate",)),
        PublicModule("mlp.up_proj", ("feed_forward.up",)),
        PublicModule("mlp.down_proj", ("feed_forward.down",)),
    ),
)


def entries(
    tensor_names: TensorNames, head: Head, own: Mapping[str, Tensor], column: str
) -> Iterator[PublicModule]:
    """Yield each tensor of a public checkpoint that holds tensors of a task's state dict."""
    modules = [
        PublicModule(tensor_names.embedding, (f"fields.embeddings.{PREFIX}{column}",)),
        *tensor_names.outer,
    ]
    for number in range(1 + max(int(name.split(".")[2]) for name in own if ".blocks." in name)):
        for theirs, ours, transposed in tensor_names.block:
            places = tuple(f"blocks.{number}.{name}" for name in ours)
            modules.append(
                PublicModule(f"{tensor_names.blocks}.{number}.{theirs}", places, transposed)
            )
    for theirs, ours, transposed in modules:
        for leaf in ("weight", "bias"):
            names = tuple(f"model.{name}.{leaf}" for name in ours)
            if names[0] in own:
                yield PublicModule(
                    f"{tensor_names.base}{theirs}.{leaf}", names, transposed and leaf == "weight"
                )
    for theirs, name in head.tensors:
        name = name.format(column=PREFIX + column)
        if name in own:
            yield PublicModule(theirs, (name,))


def from_public(
    tensors: Mapping[str, Tensor],
    tensor_names: TensorNames,
    head: Head,
    own: Mapping[str, Tensor],
    column: str,
    where: str,
) -> dict[str, Tensor]:
    """Return the state dict of a task, in float32, from the tensors of a public checkpoint.

    `own` is the task's state dict; only its names and shapes are used. Raises `TokmillError` that
    names tensors which are missing, unknown or of another shape.
    """
    wanted = {
        plain(entry.theirs, tensor_names): entry
        for entry in entries(tensor_names, head, own, column)
    }
    given = {plain(name, tensor_names): tensor for name, tensor in tensors.items()}
    given = without_same(given, wanted.keys(), tensor_names, head, where, is_tied(own))
    left_out = {plain(name, tensor_names) for name in unused(tensors, head)}
    unknown = {
        name for name in given.keys() - wanted.keys() - left_out if not DERIVED.fullmatch(name)
    }
    for verb, names in (("lacks", wanted.keys() - given.keys()), ("also holds", unknown)):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (", …" if len(names) > 4 else "")
            raise TokmillError(
                f"the checkpoint {verb} the tensors {shown}",
                where=where,
                hint="config.json and the weights are not of one model",
            )
    state: dict[str, Tensor] = {}
    for name, (_, ours, transposed) in wanted.items():
        parts = [own[part] for part in ours]
        shape = torch.Size([sum(part.shape[0] for part in parts), *parts[0].shape[1:]])
        tensor = given[name].T if transposed else given[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            asked = shape[::-1] if transposed else shape
            raise TokmillError(
                f"the tensor {name!r} is {given[name].dtype} of {list(given[name].shape)}; "
                f"config.json asks for floating-point numbers of {list(asked)}",
                where=where,
                hint="config.json and the weights are not of one model",
            )
        cut = torch.split(tensor.float(), [part.shape[0] for part in parts])
        state |= {part: piece.contiguous() for part, piece in zip(ours, cut, strict=True)}
    return state


def without_same(
    tensors: Mapping[str, Tensor],
    wanted: Collection[str],
    tensor_names: TensorNames,
    head: Head,
    where: str,
    tied: bool,
) -> dict[str, Tensor]:
    left = dict(tensors)
    for second, first in head.same.items():
        second, first = plain(second, tensor_names), plain(first, tensor_names)
        if second in wanted or second not in left:
            continue
        tensor = left.pop(second)
        if tied and first in left and not torch.equal(tensor, left[first]):
            raise TokmillError(
                f"the head is tied to the embedding, but {second} holds other values",
                where=where,
                hint="should they differ, config.json has to say tie_word_embeddings = false",
            )
        # If the head is not tied, this is the tensor of the head.
        left[first] = tensor
    return left


def unused(tensors: Iterable[str], head: Head) -> list[str]:
    """Return the names of tensors that belong to other heads and are left out."""
    return [name for name in tensors if name.startswith(head.unused or ("\0",))]


def to_public(
    state: Mapping[str, Tensor], tensor_names: TensorNames, head: Head, column: str
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for theirs, ours, transposed in entries(tensor_names, head, state, column):
        tensor = torch.cat([state[name] for name in ours])
        tensors[theirs] = tensor.T.contiguous() if transposed else tensor
    if not is_tied(state):
        for second, first in head.same.items():
            tensors.setdefault(second, tensors[first].clone())
    return tensors


def is_tied(state: Iterable[str]) -> bool:
    """Say whether the head of a task is tied to its embedding, by the names of its state dict."""
    return not any(name.startswith("heads.linear.") for name in state)


def plain(name: str, tensor_names: TensorNames) -> str:
    """Return a tensor's name of today, without the prefix that some checkpoints have."""
    head, _, leaf = name.removeprefix(tensor_names.base).rpartition(".")
    return f"{head}.{OLD_LEAVES.get(leaf, leaf)}" if head else leaf


RESOLVED = {"hidden": "feed_forward"}
"""Key of a model whose 0 means a default → the property with its value."""


class Public(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a config.json that decide what a model computes."""

    vocab_size: int
    tie_word_embeddings: bool

    kind: ClassVar[str]
    """The model here: a line of `plugins.MODELS`."""
    model_type: ClassVar[str]
    tensor_names: ClassVar[TensorNames]
    heads: ClassVar[Mapping[str, Head]]
    """Name of an architecture → its head."""
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Key → the values with which a model here computes the same."""
    segments: ClassVar[bool] = False
    """Whether an embedding of segments is added to that of the tokens."""
    roles: ClassVar[Mapping[str, str]]
    """Role → the key that has its id."""
    same: ClassVar[Mapping[str, str]]
    """Key → the key of the model here that has the same value."""
    length_key: ClassVar[str] = "max_position_embeddings"

    @property
    def length(self) -> int:
        """Positions that the model was made for."""
        return getattr(self, self.length_key)

    def model(self, where: str) -> dict[str, Any]:
        """Return the keys of the model that computes the same, without dropout."""
        return {ours: getattr(self, key) for key, ours in self.same.items()}

    @classmethod
    def of(cls, model: Any, vocab: int, tied: bool, length: int) -> Self:
        """Return the config.json of a model that has the values of `needs`."""
        same = {key: getattr(model, RESOLVED.get(ours, ours)) for key, ours in cls.same.items()}
        own = {cls.length_key: length, **same, **cls.others(model)}
        return cls(vocab_size=vocab, tie_word_embeddings=tied, **own)

    @classmethod
    def others(cls, model: Any) -> dict[str, Any]:
        """Return the keys of config.json that are not in `same`."""
        raise NotImplementedError

    @classmethod
    def needs(cls, model: Any) -> dict[str, tuple[Any, ...]]:
        """Return key → values that a model must have to belong to this family."""
        raise NotImplementedError

    def to_config(self, task: str = "next_token") -> dict[str, Any]:
        """Return the content of config.json for weights in float32, with the head of a task."""
        name = next(name for name, head in self.heads.items() if head.task == task)
        names = {"architectures": [name], "model_type": self.model_type}
        return {**names, "torch_dtype": "float32", **msgspec.to_builtins(self)}


def unlike(key: str, value: Any, where: str, kind: str) -> TokmillError:
    """Return the error for a key of config.json with a value that no model here computes."""
    return TokmillError(
        f"the {kind} cannot be a model with {key} = {value!r}",
        where=where,
        hint="docs/exchange.md lists what can be read",
    )


def divided(model: TransformerConfig) -> int:
    """Return the width a multiple of the heads: transformers needs that even with `head_dim`."""
    return model.dim - model.dim % model.heads
