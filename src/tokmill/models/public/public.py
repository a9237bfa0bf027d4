"""The interface of families of public checkpoints: keys of config.json, tensors, heads."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.models.public.public_tensors import Head, TensorNames
from tokmill.models.transformers.block import TransformerConfig

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
        length: int = getattr(self, self.length_key)
        return length

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
