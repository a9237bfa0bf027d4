"""What every family of public checkpoints says of itself: keys of config.json, tensors, heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec

from tokmill.errors import TokmillError
from tokmill.models.block import TransformerConfig
from tokmill.models.public_tensors import Head, TensorNames


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
    known: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Key → the values with which a model here computes the same."""
    segments: ClassVar[bool] = False
    """Whether an embedding of segments is added to that of the tokens."""
    roles: ClassVar[Mapping[str, str]]
    """Role → the key that says its id."""

    @property
    def length(self) -> int:
        """Positions that the model was made for."""
        raise NotImplementedError

    def model(self, where: str) -> dict[str, Any]:
        """Return the keys of the model that computes the same; dropout belongs to a training."""
        raise NotImplementedError

    @classmethod
    def of(cls, model: Any, vocab: int, tied: bool, length: int) -> Self:
        """Return the keys of a model that has what `needs` says."""
        raise NotImplementedError

    @classmethod
    def needs(cls, model: Any) -> dict[str, tuple[Any, ...]]:
        """Return key → values that a model must have to be such a one."""
        raise NotImplementedError

    def to_config(self, task: str = "next_token") -> dict[str, Any]:
        """Return the content of config.json for weights in float32, with the head of a task."""
        name = next(name for name, head in self.heads.items() if head.task == task)
        names = {"architectures": [name], "model_type": self.model_type}
        return {**names, "torch_dtype": "float32", **msgspec.to_builtins(self)}


def unlike(key: str, value: Any, where: str, kind: str) -> TokmillError:
    """Return the error for a key of config.json that makes a model which ours cannot be."""
    return TokmillError(
        f"the {kind} cannot be a model with {key} = {value!r}",
        where=where,
        hint="docs/exchange.md lists what can be read",
    )


def divided(model: TransformerConfig) -> int:
    """Return the width that the heads divide: transformers asks for it even with `head_dim`."""
    return model.dim - model.dim % model.heads
