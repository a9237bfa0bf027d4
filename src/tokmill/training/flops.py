"""The peak of a device: the most floating point operations a second, for MFU.

Figures are the makers' data sheets: dense products, no sparsity, at the board's full power.
"""

from __future__ import annotations

import re

import torch

from tokmill.training.recipe.config import RunConfig

PEAKS: dict[str, dict[str, float]] = {
    # "half": fp16, and bf16 where the device has it; "single": fp32. In 10¹² a second.
    "B200": {"half": 2250, "single": 75},
    "H200": {"half": 989, "single": 67},
    "H100 PCIe": {"half": 756, "single": 51},
    "H100 NVL": {"half": 835, "single": 60},
    "H100": {"half": 989, "single": 67},
    "A100": {"half": 312, "single": 19.5},
    "A10G": {"half": 70, "single": 35},
    "A10": {"half": 125, "single": 31.2},
    "A40": {"half": 149.7, "single": 37.4},
    "L40S": {"half": 362, "single": 91.6},
    "L4": {"half": 121, "single": 30.3},
    "V100": {"half": 125, "single": 15.7},
    "T4": {"half": 65, "single": 8.1},
    "RTX 4090": {"half": 165.2, "single": 82.6},
    "RTX 3090": {"half": 71, "single": 35.6},
}
"""Words of a GPU's name → its peak. The first line that fits counts, so longer names come first."""

OTHER = re.compile(r"laptop|ti|super|d|mig|grid|\d+[abcq]")
"""A GPU with such a word in its name is another board, a slice (A100 … MIG 1g.5gb) or a virtual GPU
(NVIDIA A40-48Q): no peak is known of it."""


def peak_flops(config: RunConfig, device: torch.device) -> float:
    """Return the operations a second that a device can do in a recipe's precision; 0: not known.

    `run.peak_flops` wins over the table. Nothing is known of a CPU: a short measurement at the
    start depends on what else the machine does, and steps have reached more than twice its result.
    """
    if config.peak_flops:
        return config.peak_flops
    if device.type == "cpu":
        return 0.0
    return known(torch.cuda.get_device_name(device), config.precision)


def known(name: str, precision: str) -> float:
    """Return the peak of a GPU by its name, 0 where the table has none.

    Products in fp32 are those of PyTorch's default, without TF32.
    """
    words = name.replace("-", " ").lower().split()
    for part, figures in PEAKS.items():
        if all(word in words for word in part.lower().split()) and not any(
            map(OTHER.fullmatch, words)
        ):
            return figures["single" if precision == "fp32" else "half"] * 1e12
    return 0.0
