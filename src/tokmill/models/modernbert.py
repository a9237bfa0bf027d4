"""A modern Transformer that looks both ways (Warner et al. 2024, ModernBERT, arXiv 2412.13663).

Norms stand in front of the branches and behind the embedding, positions are rotary, the branch is a
GeGLU and nothing has a bias. Of every three blocks one looks at the whole document, the first of
them; the others look at a window around each position, and have another rotary base. The first
block's attention has no norm, as the embedding's is right in front of it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from tokmill.errors import UsageError
from tokmill.models.block import Sizes, TransformerConfig
from tokmill.models.inputs import Inputs
from tokmill.models.layers import Activation
from tokmill.models.transformer import Transformer


class ModernBertConfig(TransformerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and style; the defaults are ModernBERT's style."""

    kind: Literal["modernbert"] = "modernbert"
    """Which model this is."""
    norm: Literal["rms", "layer"] = "layer"
    """Which norm: RMSNorm or LayerNorm."""
    activation: Activation = "geglu"
    """Of the feed-forward branch; swiglu and geglu have a gate; gelu is exact, gelu_tanh GPT-2's
    approximation of it."""
    window: int = 128
    """Positions around a position that it looks at in a local block, half of them on each side; 0:
    all blocks are global."""
    global_every: int = 3
    """One of so many blocks is global, the first of them; the others are local."""
    rope_theta: float = 160_000.0
    """Base of the rotary frequencies of global blocks."""
    local_theta: float = 10_000.0
    """Base of the rotary frequencies of local blocks."""

    sizes: ClassVar[Sizes] = {
        "tiny": {"dim": 128, "layers": 4, "heads": 2, "hidden": 192},
        "base": {"dim": 768, "layers": 22, "heads": 12, "hidden": 1152},
        "large": {"dim": 1024, "layers": 28, "heads": 16, "hidden": 2624},
    }
    """base and large are those of the published models."""

    def window_of(self, block: int) -> int:
        """Return how many positions to each side a block looks at; 0: its whole document."""
        return self.window // 2 if block % self.global_every else 0

    def theta_of(self, window: int) -> float:
        """Return the base of the rotary frequencies of blocks with a window; 0: without one."""
        return self.local_theta if window else self.rope_theta

    def check(self) -> None:
        """Refuse sizes that do not fit together."""
        super().check()
        if self.window < 0 or self.window % 2:
            raise UsageError(
                f"a window of {self.window} has no halves",
                where="model.window",
                hint="take an even number; half of it is on each side",
            )
        if self.global_every < 1:
            raise UsageError(
                "one of at least one block is global",
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
