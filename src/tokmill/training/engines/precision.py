"""The numbers that matrix products are computed in, and the loss scale of fp16.

Weights, gradients and Adam's moments are float32 in every precision: autocast rounds copies of
weights and inputs for each matrix product, so what is learned is added to master weights
(Micikevicius et al. 2018, "Mixed Precision Training"). bf16 has the range of float32 and needs
nothing more. fp16 ends at 65,504 and loses what is below 6e-8, so there the loss is multiplied
before the backward pass and the gradients are divided after it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tokmill.errors import TokmillError, UsageError
from tokmill.files import write_file
from tokmill.store.manifest import encode, read_json

SCALE = "scale.json"
FIRST_SCALE = 2.0**16
RAISE_AFTER = 2000
"""Good steps in a row after which the scale is doubled."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossScale(msgspec.Struct):
    """What the loss is multiplied by: halved by an overflow, doubled after many good steps.

    It stays a power of two, so multiplying and dividing round nothing. Section 3.2 of the paper
    gives the reason, its last paragraph the rule.
    """

    value: float = FIRST_SCALE
    good: int = 0
    """Steps since the scale last changed."""
    skipped: int = 0
    """Steps in all whose update was left out, as their gradient overflowed."""

    def update(self, finite: bool) -> None:
        """Take notice of a gradient; raise `TokmillError` where no scale would be small enough."""
        if finite:
            self.good += 1
            if self.good == RAISE_AFTER:
                self.value, self.good = 2 * self.value, 0
            return
        self.value, self.good, self.skipped = self.value / 2, 0, self.skipped + 1
        if self.value < 1:
            raise TokmillError(
                "gradients overflow fp16 even where the loss is not scaled up",
                where="run.precision",
                hint='--set run.precision="bf16" has the range for them, "fp32" everywhere; '
                "a smaller optim.lr may help too",
            )


class Precision:
    """How the matrix products of a run are computed; `scale` is there for fp16 alone.

    Raises `UsageError` where the device cannot do it.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.device, self.dtype = device, DTYPES[name]
        self.scale = LossScale() if name == "fp16" else None
        # Without a unit for it torch emulates bf16, slower than float32.
        if name == "bf16" and device.type == "cuda":
            with torch.cuda.device(device):
                able = torch.cuda.is_bf16_supported(including_emulation=False)
            if not able:
                raise UsageError(
                    "this GPU does not compute in bf16",
                    where="run.precision",
                    hint='--set run.precision="fp16"',
                )

    def autocast(self) -> torch.autocast:
        """Return the context that a forward pass runs in."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    @property
    def factor(self) -> float:
        """What the loss is multiplied by before the backward pass."""
        return self.scale.value if self.scale else 1.0

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients, in place, by what the loss was multiplied by."""
        if self.scale and gradients:
            torch._foreach_mul_(list(gradients), 1 / self.scale.value)

    def save(self, folder: Path) -> dict[str, str]:
        """Write what a resumed run needs to know of the scale; return file → sha256."""
        if self.scale is None:
            return {}
        data = encode(self.scale)
        write_file(folder / SCALE, data)
        return {SCALE: hashlib.sha256(data).hexdigest()}

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        if self.scale:
            self.scale = read_json(folder / SCALE, LossScale)
            if not 1 <= self.scale.value < math.inf or self.scale.good < 0:
                raise TokmillError(
                    f"a loss cannot be scaled by {self.scale.value}",
                    where=str(folder / SCALE),
                    hint="remove the folder of this checkpoint: --resume then goes on from the "
                    "one before",
                )
