"""ModernBERT, a bidirectional Transformer (Warner et al. 2024, arXiv 2412.13663).

Norms are before the branches and after the embedding, positions are rotary, the feed-forward branch
is a GeGLU, and there are no biases. The first of every three blocks attends to the whole document;
the others attend to a window around each position, and have another rotary base. The attention of
the first block has no norm, because the norm of the embedding is right before it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from tokmill.base.errors import UsageError
from tokmill.models.model_inputs import Inputs
from tokmill.models.transformers.block import Sizes, TransformerConfig
from tokmill.models.transformers.layers import Activation
from tokmill.models.transformers.transformer import Transformer


class ModernBertConfig(TransformerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and style; the defaults are ModernBERT's style."""

    kind: Literal["modernbert"] = "modernbert"
    """Which model this is."""
    norm: Literal["rms", "layer"] = "layer"
    """Which norm: RMSNorm or LayerNorm."""
    activation: Activation = "geglu"
    """Activation of the feed-forward branch; swiglu and geglu have a gate; gelu is exact, gelu_tanh
    GPT-2's approximation of it."""
    window: int = 128
    """Width of the window of a local block, half of it on each side of a position; 0: all blocks
    are global."""
    global_every: int = 3
    """The first of every so many blocks is global; the others are local."""
    rope_theta: float = 160_000.0
    """Base of the rotary frequencies of global blocks."""
    local_theta: float = 10_000.0
    """Base of the rotary frequencies of local blocks."""

    sizes: ClassVar[Sizes] = {
        "tiny": {"dim": 128, "layers": 4, "heads": 2, "hidden": 192},
        "base": {"dim": 768, "layers": 22, "heads": 12, "hidden": 1152},
        "large": {"dim": 1024, "layers": 28, "heads": 16, "hidden": 2624},
    }
    """base and large are the sizes of the published models."""

    def window_of(self, block: int) -> int:
        """Return how many positions to each side a block attends to; 0: its whole document."""
        return self.window // 2 if block % self.global_every else 0

    def theta_of(self, window: int) -> float:
        """Return the base of the rotary frequencies of blocks with a window; 0: without one."""
        return self.local_theta if window else self.rope_theta

    def check(self) -> None:
        """Refuse sizes that do not fit together."""
        super().check()
        if self.window < 0 or self.window % 2:
            raise UsageError(
                f"a window of {self.window} cannot be halved",
                where="model.window",
                hint="take an even number; half of it is on each side",
            )
        if self.global_every < 1:
            raise UsageError(
                "global_every must be at least 1",
                where="model.global_every",
                hint="1: all blocks are global",
            )


class ModernBert(Transformer):
    """The whole backbone. Heads are the task's."""

    Config = ModernBertConfig
    causal = False
    config: ModernBertConfig

    def __init__(self, config: ModernBertConfig, inputs: Inputs) -> None:
        super().__init__(config, inputs, embedding_norm=True, norm_once=True)

    @property
    def adding_scale(self) -> float:
        """1/sqrt(2 layers), as in Warner et al. 2024, appendix B."""
        return float((2 * self.config.layers) ** -0.5)
