"""The precision of matrix products, and the loss scale of fp16.

Weights, gradients and Adam's moments are float32 in every precision: autocast rounds copies of
weights and inputs for each matrix product, and updates are added to the float32 weights
(Micikevicius et al. 2018, "Mixed Precision Training"). bf16 has the range of float32 and needs
nothing more. fp16 ends at 65,504, and values below 6e-8 become 0. So with fp16 the loss is
multiplied before the backward pass, and the gradients are divided after it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import write_file
from tokmill.store.manifest import encode, read_json
from tokmill.training.recipe.settings import tell

SCALE = "scale.json"
FIRST_SCALE = 2.0**16
RAISE_AFTER = 2000
"""Good steps in a row after which the scale is doubled."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossScale(msgspec.Struct):
    """The factor of the loss: it is halved by an overflow, and doubled after many good steps.

    It stays a power of two, so multiplying and dividing round nothing. Section 3.2 of the paper
    gives the reason, its last paragraph the rule.
    """

    value: float = FIRST_SCALE
    good: int = 0
    """Steps since the scale last changed."""
    skipped: int = 0
    """Number of all steps whose update was skipped, because the gradient overflowed."""

    def update(self, finite: bool) -> None:
        """Adapt the scale to a gradient; raise `TokmillError` if no scale is small enough."""
        if finite:
            self.good += 1
            if self.good == RAISE_AFTER:
                self.value, self.good = 2 * self.value, 0
            return
        self.value, self.good, self.skipped = self.value / 2, 0, self.skipped + 1
        if self.value < 1:
            raise TokmillError(
                "gradients overflow fp16 even if the loss is not scaled up",
                where="run.precision",
                hint='--set run.precision="bf16" has a larger range, and "fp32" runs everywhere; '
                "a smaller optim.lr may help too",
            )


class Precision:
    """The precision of a run's matrix products; only fp16 has a `scale`.

    Raises `UsageError` if the device does not support it.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.device, self.dtype = device, DTYPES[name]
        self.scale = LossScale() if name == "fp16" else None
        # Without hardware for bf16, torch emulates it, which is slower than float32.
        if name == "bf16" and device.type == "cuda":
            with torch.cuda.device(device):
                supported = torch.cuda.is_bf16_supported(including_emulation=False)
            if not supported:
                raise UsageError(
                    "this GPU does not compute in bf16",
                    where="run.precision",
                    hint='--set run.precision="fp16"',
                )
        emulated = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if name == "bf16" and device.type == "cpu" and emulated:
            tell("this processor does not compute in bf16; --set run.precision=fp32 is faster")

    def autocast(self) -> torch.autocast:
        """Return the context that a forward pass runs in."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    @property
    def factor(self) -> float:
        """The factor of the loss before the backward pass."""
        return self.scale.value if self.scale else 1.0

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the factor of the loss, in place."""
        if self.scale and gradients:
            torch._foreach_mul_(list(gradients), 1 / self.scale.value)

    def save(self, folder: Path) -> dict[str, str]:
        """Write the scale for a resumed run; return file → sha256."""
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
                    f"the loss scale {self.scale.value} is not possible",
                    where=str(folder / SCALE),
                    hint="remove the folder of this checkpoint: --resume then goes on from the "
                    "one before",
                )
