"""A small model of every kind in the table, with weights that leave nothing near 0."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokmill import plugins
from tokmill.base.recipe import convert
from tokmill.models.model import Inputs, Model

CONFIGS: dict[str, dict[str, Any]] = {
    "decoder": {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2},
    "encoder": {"dim": 16, "layers": 2, "heads": 4, "context": 64},
    "rwkv7": {"dim": 16, "layers": 2, "head_dim": 8},
    "bag": {"dim": 16, "layers": 1, "buckets": 64},
    "set_transformer": {"dim": 16, "layers": 2, "heads": 4, "inducing": 3, "seeds": 2},
}
"""Kind → its configuration. A new kind of model needs a line here."""
KINDS = [kind for kind in plugins.MODELS if kind != "policy"]
"""Those that read columns; a policy sees an environment (tests/unit/rl)."""


def small_model(kind: str, inputs: Inputs | Mapping[str, int], **keys: Any) -> Model:
    """Return the model of a kind, the same each time, in evaluation."""
    inputs = inputs if isinstance(inputs, Inputs) else Inputs(inputs)
    part = plugins.load(plugins.MODELS, kind)
    torch.manual_seed(1)
    model: Model = part(convert(part.Config, CONFIGS[kind] | keys), inputs)
    for parameter in model.parameters():
        # Larger than at the start, so that a leak could not hide below the tolerance.
        nn.init.normal_(parameter, mean=parameter.ndim == 1, std=0.3)
    return model.eval()
