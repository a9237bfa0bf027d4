"""From an observation of the environment to a vector, of which policies and values are computed.

`plugins.EMBEDDINGS` lists the kinds; a recipe chooses by `model_type`, and `model_config` has a
table for each, as in the configuration of MLIR-RL's DistilBERT. B are observations.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import UsageError, check_name
from tokmill.mlir.tokens.views import Spaces, Wanted
from tokmill.models.model import Tensors

Observation = Mapping[str, Tensor]
"""Name of an array → (B, …)."""


class EmbeddingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of an embedding.

    A `dropout` works only where an embedding is trained by other code: the task `schedules` never
    drops values (`task.Schedules.train`), and a policy with one says so in a note.
    """

    def view(self) -> Wanted:
        """Return what the environment must show."""
        return Wanted()

    def unused(self) -> dict[str, str]:
        """Return the keys that are set and change nothing: name → why."""
        if getattr(self, "dropout", 0.0):
            return {
                "dropout": "PPO compares a policy with the one that acted, so nothing is dropped"
            }
        return {}


class Embedding(nn.Module):
    """From observations to (B, output_size); made of a config and of the environment's spaces.

    The row of an observation does not depend on the others of its batch, nor on its padding.
    """

    Config: ClassVar[type[EmbeddingConfig]] = EmbeddingConfig
    output_size: int

    def forward(self, observation: Observation) -> Tensor:
        """Return float32 (B, output_size)."""
        raise NotImplementedError


class Encoded(Embedding):
    """An `encoder`, made by a subclass: its state at `[CLS]`, and the history beside it."""

    encoder: Any

    def __init__(self, config: EmbeddingConfig) -> None:
        super().__init__()
        least = {"hidden_size": 1, "num_attention_heads": 1, "num_hidden_layers": 1}
        check_sizes(config, **least, intermediate_size=0)

    def forward(self, observation: Observation) -> Tensor:
        tensors = self.tensors(observation)
        first = torch.zeros(len(tensors.document), 1, dtype=torch.int64)
        states = self.encoder(tensors, first.to(tensors.document.device))
        return torch.cat((states[:, 0], observation["history"].float()), dim=-1)

    def tensors(self, observation: Observation) -> Tensors:
        raise NotImplementedError


def make(
    model_type: str, spaces: Spaces, model_config: Mapping[str, Any] | None = None
) -> Embedding:
    """Return a new embedding.

    Args:
        spaces: of the environment: `observation_space.spaces`.
        model_config: kind → its table of sizes.

    Raises `UsageError` for an unknown kind or key, and if the environment shows something else.
    """
    config = config_of(model_type, model_config)
    needed = {"flat": "operation", "fields": "segments", "buckets": "ids"}[config.view().kind]
    if needed not in spaces:
        raise UsageError(
            f"{model_type} reads the view {config.view().kind!r}, and the environment shows "
            f"{', '.join(spaces)}",
            hint="make the environment with `embeddings.view_of(model_type, model_config)`",
        )
    kind = plugins.load(plugins.EMBEDDINGS, model_type)
    with torch.device("meta"):
        count = weights_of(kind(config, spaces))
    if count > MOST_WEIGHTS:
        raise UsageError(
            f"{model_type} would have {count:,} weights",
            where="model_config",
            hint=f"at most {MOST_WEIGHTS:,}: choose smaller sizes",
        )
    return kind(config, spaces)


def view_of(model_type: str, model_config: Mapping[str, Any] | None = None) -> Wanted:
    return config_of(model_type, model_config).view()


def config_of(model_type: str, model_config: Mapping[str, Any] | None = None) -> EmbeddingConfig:
    """Return the sizes of an embedding; the tables of the other kinds are checked too."""
    check_name("no embedding is", model_type, plugins.EMBEDDINGS, "model_type")
    tables = dict(model_config or {})
    for kind, table in tables.items():
        check_name("no embedding is", kind, plugins.EMBEDDINGS, f"model_config.{kind}")
        if not isinstance(table, Mapping):
            raise UsageError(
                "it is not a table", where=f"model_config.{kind}", hint="its keys are sizes"
            )
    configs = {
        kind: recipe.convert(
            plugins.load(plugins.EMBEDDINGS, kind).Config, table, f"model_config.{kind}"
        )
        for kind, table in ({model_type: {}} | tables).items()
    }
    return configs[model_type]


MOST_WEIGHTS, MOST_LAYERS, MOST = 1 << 31, 256, 1 << 14
"""Weights, layers and other sizes that an embedding may have."""


def weights_of(embedding: nn.Module) -> int:
    return sum(parameter.numel() for parameter in embedding.parameters())


def batch(observations: Sequence[Mapping[str, np.ndarray[Any, Any]]]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.stack([one[name] for one in observations]))
        for name in observations[0]
    }


def check_sizes(config: EmbeddingConfig, **least: int) -> None:
    """Refuse sizes that are too small or large, shares that cannot be dropped, wrong heads."""
    where = "model_config"
    for name, low in least.items():
        value, most = getattr(config, name), MOST
        if name == "num_hidden_layers":
            most = MOST_LAYERS
        if not low <= value <= most:
            raise UsageError(
                f"{name} = {value} is too {'small' if value < low else 'large'}",
                where=where,
                hint=f"{low} to {most:,}",
            )
    share = getattr(config, "dropout", 0.0)
    if not 0 <= share < 1:
        raise UsageError(
            f"dropout = {share}: this share cannot be dropped",
            where=where,
            hint="it is at least 0 and below 1",
        )
    heads, width = getattr(config, "num_attention_heads", 1), getattr(config, "hidden_size", 1)
    if width % heads:
        raise UsageError(
            f"{heads} heads do not divide hidden_size = {width}",
            where=where,
            hint="choose hidden_size = num_attention_heads × a width",
        )


def draw_blocks(encoder: nn.Module) -> None:
    """Draw the matrices of blocks so that what goes through them keeps its size.

    With the 0.02 of models that are 768 wide or more, `[CLS]` of a small one hardly hears of the
    other positions, and operations have nearly the same vector.
    """
    for part in encoder.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=part.in_features**-0.5)
