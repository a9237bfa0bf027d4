"""A device that no machine needs: tensors without numbers that say that they are on it.

Torch refuses to compute with tensors of two devices as it would on a GPU. (It lets tensors of the
device `meta` be mixed with others.) What code asks a tensor for, by `int` and `bool`, is answered
as it was on the CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

DEVICE = torch.device("lazy:0")
"""The only one beside the CPU and `meta` that torch without CUDA knows; nothing runs there."""


def computed_there(
    module: nn.Module,
    given: Mapping[str, Tensor],
    compute: Callable[[Mapping[str, Tensor]], Any],
    *,
    left: str = "",
) -> Any:
    """Run `compute(given)` on the CPU, then with the module and `given` on the device.

    Returns what was computed there. `left`: a tensor of `given` that stays on the CPU.
    The module has no numbers afterwards.
    """
    asked: list[Any] = []

    def noted(method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def note(tensor: Tensor) -> Any:
            asked.append(method(tensor))
            return asked[-1]

        return note

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for name in ("__int__", "__bool__"):
            patch.setattr(Tensor, name, noted(getattr(Tensor, name)))
        compute(given)
    mode = FakeTensorMode()

    def move(tensor: Tensor, device: torch.device = DEVICE) -> Tensor:
        with torch.no_grad():
            return FakeTensor(mode, tensor.detach().to("meta"), device)

    there = {
        name: move(one, torch.device("cpu") if name == left else DEVICE)
        for name, one in given.items()
    }
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for name in ("__int__", "__bool__"):
            patch.setattr(FakeTensor, name, lambda tensor: asked.pop(0), raising=False)
        # Torch cannot say it of this device.
        patch.setattr(torch, "is_autocast_enabled", lambda device: False)
        # Weights are replaced: no change in place makes them tensors of another kind.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            module._apply(move)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        with mode:
            found = compute(there)
    assert not asked
    return found
